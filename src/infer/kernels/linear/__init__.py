"""Matrix products of the network, with what stands before and after them fused in.

small.py           few tokens: chooses one of the kernels below, or cuBLAS
triton_kernels.py  the kernels in Triton; triton_configs.py has the measured tile sizes
pdl.py             up to 8 tokens of a small model, in CUDA C++ (pdl.cu): weights are loaded before
                   the kernel ahead has finished (programmatic dependent launch)
wgmma.py           2 to 128 tokens on Hopper, in CUDA C++ (wgmma.cu, wgmma.cuh): TMA and wgmma
prepared.py        compiles the CUDA C++ kernels that a model needs, before its first step
split.py           a hundred tokens or two: K split into a batch of products, added up by the norm behind
invariant.py       the same bits whatever the batch
residual.py        the residual stream as kernels pass it on
"""
