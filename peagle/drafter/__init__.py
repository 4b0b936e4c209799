"""The remote drafter: heads on GPUs of their own that draft for targets in other processes.

The way of one hidden row, from a target's step to the draft tokens, and the form that it has:

    peagle/vllm   EngineBatch   what the host knows of a step; `LinkPool` picks the requests' drafters
    client        StepPlan      announced by `Link.announce`
    peagle/vllm   SampledRows   the target's tapped hidden states after sampling; reduced by the head's `Reducer`,
                                handed over by `Link.send`
    mailbox                     through shared memory of one host, in the order of the GPU's stream,
    protocol                    or over TCP between hosts
    server        TargetStep    read and checked when it is ready, together with those of other targets
    engine        PassBatch     the request's cache blocks (`kvcache`), and the row's place in its payload
    graphs                      on a GPU: one copy of the integers, one CUDA graph
    parallel_pass Rows          the P-EAGLE pass: `rows` lays them out, `attention` reads and writes the paged cache
    engine        drafts [B, K] tokens with their chances (`drafts`), -1 where there is none; the same way back, to
                                `Link.wait` or `Link.enqueue_wait`

`serving` loads heads; `deployments.drafter` runs the server as Ray Serve replicas. Nothing here imports vLLM or Ray.
"""
