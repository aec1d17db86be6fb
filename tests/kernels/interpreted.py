"""The kernel contract under Triton's interpreter; in a process of its own.

Run by `tests/kernels/test_triton_interpreter.py`, which says why.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted.py
"""

from __future__ import annotations

from tests.kernels.kernel_contract import KernelContract


class TestInterpretedKernels(KernelContract):
    device = "cpu"
