"""P-EAGLE inside vLLM: per-request depth (`scheduler`), acceptance by request (`stats`), engine settings (`engine`).

Importing this package imports no vLLM: only `scheduler` and `compat` do, and vLLM loads those in its engine process.
"""
