"""The kernel contract under Triton's interpreter; in a process of its own.

Run by `tests/integration/test_interpreted_kernels.py`, which says why.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted.py
"""

from __future__ import annotations

from tests.unit.kernels.kernel_contract import KernelContract


class TestInterpretedKernels(KernelContract):
    device = "cpu"
