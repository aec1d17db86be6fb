"""Executes orders: makes tensors, runs the model, samples ids. Knows no requests and no sequences.

order.py           the order of one step for a device
device.py          the interface of a device, and its asynchronous result
torch_device.py    the device half in PyTorch or C, which samples on the host
layout.py          rows of an order as tensors
cpu_step.py        steps on a CPU with the C kernels
host_sampling.py   ids and logprobs, sampled on the host
row_book.py        facts about the rows of a device half's state
gpu/               the device half of a GPU: state on the device, CUDA graphs, late results
"""
