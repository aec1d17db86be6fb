"""The machinery that chooses, compiles and launches kernels.

dispatch.py        picks the implementation (reference, C, Triton) and describes the device
launch.py          launches a Triton kernel again without Triton's argument analysis
cuda_build.py      compiles CUDA C++ at run time (NVRTC) and launches it; cubin_cache.py stores the cubins
tensor_map.py      TMA descriptors
ptx.py             PTX instructions that Triton does not expose
torch_threads.py   the number of threads of PyTorch's small CPU operations
"""
