"""The contract of the linears under Triton's interpreter; run by `test_linear_small.py`, in its own process.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted_linear.py
"""

from __future__ import annotations

from tests.unit.kernels.added_contract import AddedContract
from tests.unit.kernels.linear_contract import LinearContract


class TestInterpretedLinears(LinearContract):
    device = "cpu"


class TestInterpretedPairs(AddedContract):
    device = "cpu"
