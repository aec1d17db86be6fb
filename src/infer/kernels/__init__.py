"""Pure functions of tensors: the arithmetic of the network, and nothing else.

Every file begins with a docstring: the formula and the shape legend. `rms_norm`, `rope` and
`gated_activation` then hold the same three things in the same order: the PyTorch *reference* (the
specification, and the production path on the CPU), the Triton kernel that must equal it, and the
launcher that callers import; `dispatch.py` alone decides which of the two runs. `attention`,
`paged_attention` and `sample` have no Triton kernel: they are PyTorch on every device.
"""
