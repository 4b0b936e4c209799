"""Names of the deployments, as `serve status` shows them and handles find them."""

APP_NAME = "peagle"
"""The application's name in the YAML files of `configs/`."""

TARGET_NAME = "target"
INGRESS_NAME = "ingress"
DRAFTER_NAME = "drafter"
