"""The remote drafter: heads on GPUs of their own that draft for targets in other processes.

The way of one hidden row, from a target's step to the draft tokens, and the form that it has:

    peagle/vllm     EngineStep  what vLLM's runner has after sampling; `pool` picks the drafter of each request
    projection      [R, H]      auxiliary hidden states become the row, of the drafter's width
    client          Slot        `Link.send` writes descriptor and tensors into a ring (`shared_memory`), which both
                                processes share; between hosts the same is carried over TCP
    server          Step        read and checked when it is ready, together with those of other targets
    engine          PassBatch   the request's cache blocks (`kvcache`), and the address of each row
    parallel_pass   Rows        on a GPU in a CUDA graph (`graphs`): `rows` lays the pass out and picks the drafts,
                                `peagle.model` is the network, `attention` reads and writes the paged cache
    server          int32       [B, K] tokens, -1 where there is none, into the slot;
                                `Link.wait` reads them, or goes on without when they are late

`serving` loads heads; `deployments.drafter` runs the server as Ray Serve replicas. Nothing here imports vLLM or Ray.
"""
