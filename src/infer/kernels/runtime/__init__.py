"""The machinery that chooses, compiles and launches kernels.

dispatch.py        which implementation runs: reference, C, Triton; which device this is
launch.py          launches a Triton kernel again without Triton's argument analysis
cuda_build.py      compiles CUDA C++ at run time (NVRTC), launches it; cubin_cache.py keeps it
tensor_map.py      TMA descriptors
ptx.py             instructions that Triton has no function for
torch_threads.py   the number of threads of PyTorch's small CPU operations
"""
