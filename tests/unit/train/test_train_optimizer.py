"""Muon's arithmetic on a CPU."""
