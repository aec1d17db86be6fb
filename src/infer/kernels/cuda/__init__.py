"""Kernels in CUDA C++, for what Triton's compiler does not make of its own accord.

    decode_attention.cu   attention of many rows that decode; its comment explains warps, lanes, fragments
    decode_parts.cuh      its pieces: what a warp does with 16 positions, how parts are put together
    decode_attention.py   checks the tensors, launches it
    linear_ahead.cu       linears of few tokens of small models; its comment explains loads before the wait
    linear_parts.cuh      its instructions
    linear_ahead.py       compiles what a model needs before its first step, checks the tensors, launches it
    ahead_configs.py      how it cuts a matrix
    build.py              compiles a file for this GPU when it is first needed, loads and launches it
    cache.py              keeps what was compiled

`attention_backend=auto` uses attention's for many rows where it can be had, `attention_backend=cuda` for all;
the linears are used where they can be had. Both need a compiler when they are first used: NVRTC, which comes
with PyTorch, or nvcc.
"""
