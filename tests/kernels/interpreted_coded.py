"""The contract of coded weights under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_coded.py
"""

from __future__ import annotations

from tests.kernels.coded_contract import CodedContract


class TestInterpretedCoded(CodedContract):
    device = "cpu"
