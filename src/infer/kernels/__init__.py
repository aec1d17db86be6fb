"""Pure functions of tensors: the arithmetic of the network, and nothing else.

Every file holds the same four things in the same order: a docstring with the formula and the shape
legend, the PyTorch *reference* (the specification, and the production path on the CPU), the Triton
kernel that must equal it, and the launcher that callers import. `dispatch.py` alone decides which of
the two runs.
"""
