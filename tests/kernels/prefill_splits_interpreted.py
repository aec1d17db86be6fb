"""The contract of splits in attention of chunks under Triton's interpreter, in a process of its own.

Run by `tests/kernels/test_triton_interpreter.py`, which says why.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/prefill_splits_interpreted.py
"""

from __future__ import annotations

import pytest

from infer.kernels.attention import prefill as attention_prefill
from tests.kernels.prefill_splits_contract import SplitsContract


class TestInterpretedSplits(SplitsContract):
    device = "cpu"

    @pytest.fixture(autouse=True)
    def merge_many_rows_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interpreted operation takes as long for few numbers as for many."""
        monkeypatch.setattr(attention_prefill, "_MERGE_ROWS", 64)
