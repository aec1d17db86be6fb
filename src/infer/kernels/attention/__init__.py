"""Attention: what each token sees of its sequence, from queries, keys and values.

    reference.py       the formula over one sequence, in PyTorch
    paged.py           the paged cache as attention reads it; one query per sequence over it, in PyTorch
    dense.py           long prompts that start in this step, through cuDNN
    prefill.py         chunks of prompts over the paged cache (varlen), in Triton
    decode.py          one token per sequence, in Triton
    choice.py          which kernel runs
    decode_work.py     how the rows of a decode step are cut into splits, for both
    decode_cuda.py     the same in CUDA C++: decode_attention.cu, decode_projected.cu, decode.cuh

A decode step has four kernels to choose from: in Triton and in CUDA C++, each over the cache alone and from
the fused projection. None is fastest everywhere: choice.py says which runs for how many rows, and why.
`attention_backend=auto` uses the CUDA C++ kernels where they can be compiled, `attention_backend=cuda`
insists on them. The compiler is NVRTC, which comes with PyTorch.
"""
