"""The contract of the kernels of LoRA adapters under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_low_rank.py
"""

from __future__ import annotations

from tests.kernels.low_rank_contract import LowRankContract


class TestInterpretedLowRank(LowRankContract):
    device = "cpu"
