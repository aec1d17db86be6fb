"""Kernels in CUDA C++, for what Triton's compiler does not make of its own accord.

    decode_attention.cu   attention of many rows that decode; its comment explains warps, lanes, fragments
    decode_projected.cu   attention of few, which takes the projection and fills the cache: its sequel
    decode_parts.cuh      their pieces: what a warp does with 16 positions, how parts are put together
    decode_attention.py   says what they need, checks the tensors, launches the first
    decode_projected.py   launches the second
    linear_ahead.cu       linears of few tokens of small models; its comment explains loads before the wait
    linear_parts.cuh      its instructions
    linear_ahead.py       checks the tensors, launches it
    ahead_configs.py      how it cuts a matrix
    linear_wgmma.cu       linears of more tokens of any model; its comment explains stages and their barriers
    wgmma_parts.cuh       its instructions
    linear_wgmma.py       launches it
    wgmma_configs.py      how it cuts a matrix
    tensor_map.py         what its copy engine must know of one
    prepared_linears.py   compiles the linears that a model needs, before its first step
    build.py              compiles a file for this GPU when it is first needed, loads and launches it
    cache.py              keeps what was compiled

`attention_backend=auto` uses attention's where they can be had, `attention_backend=cuda` insists on them; the
linears are used where they can be had. All need a compiler when they are first used: NVRTC, which comes with
PyTorch, or nvcc.
"""
