"""What `benchmarks.simulate` runs: recorded acceptance, one simulated engine, the policies, and their comparison."""
