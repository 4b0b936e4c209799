"""Thin Ray Serve adapters: one file a stage. `deployments.app` binds them, nothing else binds."""
