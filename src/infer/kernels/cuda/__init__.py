"""Kernels in CUDA C++, for what Triton's compiler does not make of its own accord.

    decode_attention.cu   attention of many rows that decode; its first comment explains warps, lanes, fragments
    decode_parts.cuh      its pieces: what a warp does with 16 positions, how parts are put together
    decode_attention.py   checks the tensors, launches it
    build.py              compiles a file for this GPU when it is first needed, loads it, launches what is in it
    cache.py              keeps what was compiled

`attention_backend=auto` uses it for many rows where it can be had, `attention_backend=cuda` for all. It needs a
compiler when it is first used: NVRTC, which comes with PyTorch, or nvcc.
"""
