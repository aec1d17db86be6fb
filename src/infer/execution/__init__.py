"""A plan becomes tensors, the model runs, tokens are sampled.

runner.py     any device, sampling on the host
batch.py      chunks to tensors
cpu_step.py   decode steps on a CPU with the C kernels
gpu/          state on the device, CUDA graphs, results one step late
"""
