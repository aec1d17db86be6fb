"""The contracts of the attention kernels under Triton's interpreter, in a process of their own.

Run by `tests/kernels/test_triton_interpreter.py`, which says why.
By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/attention_interpreted.py
"""

from __future__ import annotations

import torch

from tests.kernels.attention_contract import DecodeContract, PrefillContract
from tests.kernels.projected_contract import ProjectedContract


class TestInterpretedDecode(DecodeContract):
    device = "cpu"
    half_precision = (torch.float16,)  # the interpreter multiplies the bits of bfloat16 as integers


class TestInterpretedProjected(ProjectedContract):
    device = "cpu"
    half_precision = (torch.float16,)


class TestInterpretedPrefill(PrefillContract):
    device = "cpu"
    half_precision = (torch.float16,)  # the interpreter multiplies the bits of bfloat16 as integers
