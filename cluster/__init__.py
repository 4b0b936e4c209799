"""What the cluster decides, as pure functions over numbers and plain records: no torch, no vLLM, no Ray.

Letters of arrays: K draft positions (2K: how often reached, how often accepted), C workloads, P plans compared.
"""
