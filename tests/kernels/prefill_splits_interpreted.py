"""The contract of splits in attention of chunks under Triton's interpreter, in a process of its own.

Run by `tests/kernels/test_triton_interpreter.py`, which says why.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/prefill_splits_interpreted.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from infer.config.profiles.cpu import CPU
from infer.kernels.runtime.profiles import using_profile
from tests.kernels.prefill_splits_contract import SplitsContract


class TestInterpretedSplits(SplitsContract):
    device = "cpu"

    @pytest.fixture(autouse=True)
    def merge_many_rows_at_once(self) -> Iterator[None]:
        """An interpreted operation takes as long for few numbers as for many."""
        with using_profile(replace(CPU, attention=replace(CPU.attention, merge_rows=64))):
            yield
