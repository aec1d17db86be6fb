"""The kernel contract under Triton's interpreter; run by `test_triton.py` in a process of its own.

pytest does not collect this file by itself (its name does not begin with `test_`): the interpreter is
chosen when a kernel is *imported*, so one process can either interpret kernels or behave like a user's.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted.py
"""

from __future__ import annotations

from tests.unit.kernels.kernel_contract import KernelContract


class TestInterpretedKernels(KernelContract):
    device = "cpu"
