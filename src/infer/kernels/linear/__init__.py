"""Matrix products of the network, with their prologues and epilogues.

small.py           few tokens: chooses one of the kernels below, or cuBLAS
triton_kernels.py  the kernels in Triton; triton_configs.py has the measured tile sizes
compiled.py        the kernels in CUDA C++ that a model's projections ask for, compiled before its first step
pdl.py             up to 8 tokens of a small model (pdl.cu): weights are loaded before the wait of a
                   programmatic dependent launch (PDL)
wgmma.py           2 to 128 tokens on Hopper, 512 with codes (wgmma.cu, wgmma.cuh): TMA and wgmma
cuda.py            what these two share
split.py           a hundred tokens or two: K split into a batch of products, added up by the next norm
invariant.py       the same bits whatever the batch
coded.py           weights of 8 or 4 bits: their layout
problems.py        the numbers that a kernel is chosen by
residual.py        the residual stream as kernels pass it on
"""
