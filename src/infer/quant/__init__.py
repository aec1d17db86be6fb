"""Projections: the weights of a linear layer, and every way to multiply with them.

projection.py   the contract: allocate, fill, num_bytes, prepare, multiply, project, add_to
registry.py     one row for each scheme
residual.py     the residual stream, and where a projection is fused with it
dense.py        plain matrices in the dtype of the model; fast, or batch-invariant
coded.py        rows of a quantized file, as its format stores them
gpu_schemes.py  fp8, int8 and int4 on a GPU (kernels/linear/coded.py): codes of a file, or rounded on loading
rounding.py     rounding of weights to codes
packed.py       int8 or int4 in groups of 32, for the kernels of kernels/cpu
memory.py       large pages for packed weights

`loader/weight_plan.py` decides which scheme and form a layer gets, `layers/bind.py` prepares them all.
"""
