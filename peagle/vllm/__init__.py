"""P-EAGLE inside vLLM: K by request (`scheduler`), counts by request and workload (`acceptance`), what a request may
ask for (`limits`), drafts of another process (`remote`), engine settings (`engine`), training data (`generate`).

Importing this package imports no vLLM. What depends on vLLM's version is in `compat`; it is checked when an engine
starts.
"""
