"""Attention: each token's weighted sum over the values of its sequence, from queries and keys.

    reference.py       the formula over one sequence, in PyTorch
    paged.py           the paged cache as kernels read it, and decode attention over it in PyTorch
    dense.py           long prompts that start in this step, using cuDNN
    prefill.py         chunks of prompts over the paged cache (varlen), in Triton
    decode.py          one token per sequence, in Triton
    choice.py          the choice of the kernel
    decode_work.py     the work list of a decode step, its rows cut into splits, for Triton and CUDA
    decode_cuda.py     one token per sequence, in CUDA C++ (decode_attention.cu, decode_projected.cu)

A decode step has four kernels to choose from: Triton and CUDA C++, each over the cache alone or from the
fused projection. None is fastest everywhere: choice.py selects one by the number of rows and explains why.
`attention_backend=auto` uses the CUDA C++ kernels where they can be compiled, `attention_backend=cuda`
requires them. The compiler is NVRTC, which ships with PyTorch.
"""
