"""The contract of the delta-rule kernels under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_delta.py
"""

from __future__ import annotations

from tests.kernels.delta_contract import DeltaContract


class TestInterpretedDeltaRule(DeltaContract):
    device = "cpu"
