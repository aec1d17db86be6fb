"""The contract of coded experts under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_coded_moe.py
"""

from __future__ import annotations

from tests.kernels.coded_moe_contract import CodedMoeContract


class TestInterpretedCodedExperts(CodedMoeContract):
    device = "cpu"
