"""What the cluster decides, as pure functions over numbers and plain records: no torch, no vLLM, no Ray."""
