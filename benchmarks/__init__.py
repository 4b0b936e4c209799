"""Measurements of the training system: each program writes its figures with their conditions."""
