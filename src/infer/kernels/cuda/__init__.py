"""The decode attention kernel once more, in CUDA C++: what Triton's compiler does, written out by hand.

    paged_attention.cu   the kernel; its first comment explains blocks, warps, lanes and the online softmax
    build.py             compiles it for this GPU when it is first needed, and launches it
    paged_attention.py   checks the tensors, chooses the grid

`attention_backend=cuda` selects it. It needs a compiler at run time, NVRTC or nvcc.
"""
