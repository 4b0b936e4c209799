"""Triton kernels of the remote drafter's pass, each beside a plain torch twin of the same signature.

The public functions take the twin on CPU tensors and the kernel on a GPU. With `TRITON_INTERPRET=1` in the environment
before Triton is imported, the kernels run on CPU tensors too, slowly: that is how they are tested without a GPU.

No function here waits for the device, and no launch depends on a value that only the device knows: all of them may be
captured in CUDA graphs.
"""
