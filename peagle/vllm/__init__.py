"""P-EAGLE inside vLLM. Importing this package imports no vLLM.

| attaches to vLLM's | by | modules |
| --- | --- | --- |
| engine arguments | keyword arguments | `engine_settings`, `setting_types` (their types), `generate` (training data) |
| scheduler | `scheduler_cls` | `scheduler`, `draft_budget`, `rejections` (forecast), `turns` |
| scheduler's outputs | `scheduler_cls` | `outputs` (stream coalescing) |
| V2 model runner (GPU) | `worker_cls` | `v2_worker`, `speculator`, `draft_rows`, `last_layer` |
| verification (V2) | the runner's sampler | `verification` |
| V1 model runner (CPU) | `worker_cls` | `workers`, `coupling` (sampling), `cpu_drafting` |
| both, remote drafter | `worker_cls` | `remote`, `remote_speculator` (V2), `remote_cpu` (V1) |
| client (`AsyncLLM`) | wrapped methods | `limits`, `grammar_checker`, `rendering`, `recorder`, `clients` (several) |

`request_args` reads what a request asks for, `step_notes` holds what travels with a step, `fork_server` starts engines.
`compat` refuses another vLLM version; `tests/unit/vllm/test_vllm_names.py` lists the private names in use.
"""
