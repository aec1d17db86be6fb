"""Orders become tensors, the model runs, ids are sampled. Nothing here knows requests or sequences.

order.py           the order that a device gets for one step
device.py          the interface of a device, and the result that arrives later
torch_device.py    the device half of any device, sampling on the host
layout.py          rows of an order to tensors
cpu_step.py        steps on a CPU with the C kernels
host_sampling.py   ids and logprobs, drawn on the host
row_book.py        what a device half remembers about its rows
gpu/               state on the device, CUDA graphs, results one step late
"""
