"""Thin adapters that run the service on Ray Serve. The names of its deployments, as `serve status` shows them."""

APP_NAME = "peagle"
"""The application's name in the YAML files of `configs/`."""

TARGET_NAME = "target"
ROUTER_NAME = "router"
DRAFTER_NAME = "drafter"
LEARNER_NAME = "learner"
GATEWAY_NAME = "gateway"
