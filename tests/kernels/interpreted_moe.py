"""The contract of the expert kernels under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_moe.py
"""

from __future__ import annotations

from tests.kernels.moe_contract import MoeContract


class TestInterpretedExperts(MoeContract):
    device = "cpu"
