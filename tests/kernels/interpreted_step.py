"""The contract of the step's kernels under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_step.py
"""

from __future__ import annotations

import os

import pytest

from tests.kernels.step_contract import StepContract


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities and on integers that wrap around
class TestInterpretedStep(StepContract):
    device = "cpu"
    vocab_size = 5003
    num_rows = int(
        os.environ.get("NUM_SAMPLED_ROWS", "6")
    )  # about a second each under load; hundreds by hand
