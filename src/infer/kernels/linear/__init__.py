"""Matrix products of the network, with their prologues and epilogues.

small.py           few tokens: chooses one of the kernels below, or cuBLAS
triton_kernels.py  the kernels in Triton; triton_configs.py has the measured tile sizes
compiled.py        the kernels in CUDA C++ that a model's projections need, compiled before its first step
pdl.py             up to 8 tokens of a small model (pdl.cu): weights are loaded before the wait of a
                   programmatic dependent launch (PDL)
wgmma.py           2 to 128 tokens on Hopper, 512 with codes (wgmma.cu, wgmma.cuh): TMA and wgmma
cuda.py            the common parts of pdl.py and wgmma.py
split.py           100 to 200 tokens: K split into a batch of products, which the next norm adds up
invariant.py       batch-invariant products: a row has the same bits in any batch
coded.py           the layout of weights of 8 or 4 bits
problems.py        the sizes and facts that decide which kernel runs
residual.py        the residual stream, in the form that kernels pass on
"""
