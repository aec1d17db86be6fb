"""Attention: what each token sees of its sequence, from queries, keys and values.

    reference.py             the formula over one sequence, and the choice of a backend
    paged.py                 the same over the paged cache, in PyTorch
    dense.py                 long prompts that start in this step, through PyTorch's fused attention
    prefill.py               chunks of prompts over the paged cache, in Triton (prefill_kernels.py)
    decode.py                one token per sequence, in Triton (decode_kernels, decode_parts, decode_plan)
    decode_cuda.py           the same in CUDA C++ (decode_attention.cu, decode.cuh): many sequences
    decode_projected.py      few sequences: takes the projection, fills the cache (decode_projected.cu)

`attention_backend=auto` uses the CUDA C++ kernels where they can be compiled, `attention_backend=cuda`
insists on them. The compiler is NVRTC, which comes with PyTorch, or nvcc.
"""
