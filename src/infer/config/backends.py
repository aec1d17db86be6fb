"""The backends that can compute an operation, by device: one table of the values of the `*_backend` knobs.

    attention_backend           attention of prompts, and of rows that decode unless the next knob differs
    decode_attention_backend    attention of rows that decode: sequences that compute one token in a step
    mlp_backend                 the feed-forward half of a block

`torch_ref` is the readable reference of each: plain PyTorch, nothing fused. `benchmarks/backends.py` compares
the references with the backends that `auto` chooses. Settings, `resolve.py` (which chooses and refuses),
`infer doctor` and the docs read this table.
"""

from __future__ import annotations

from typing import NamedTuple

AUTO, REFERENCE = "auto", "torch_ref"
OTHER_SPELLINGS = {"naive": REFERENCE}


class Backend(NamedTuple):
    """One way to compute one or several operations."""

    name: str
    devices: tuple[str, ...]  # "cpu", "gpu"
    operations: tuple[str, ...]  # the knobs, without `_backend`
    about: str


_BOTH, _ATTENTION = ("cpu", "gpu"), ("attention", "decode_attention")

BACKENDS = (
    Backend("c", ("cpu",), _ATTENTION, "the kernel in C, which reads the paged cache in float32"),
    Backend("triton", ("gpu",), _ATTENTION, "the kernels in Triton"),
    Backend("cuda", ("gpu",), _ATTENTION, "CUDA C++ for rows that decode, Triton for prompts"),
    Backend("flash", ("gpu",), ("attention",), "PyTorch's FlashAttention for prompts, Triton for the rest"),
    Backend("kernels", _BOTH, ("mlp",), "the kernels for the weights' quantization, fused where they can be"),
    Backend("sdpa", _BOTH, _ATTENTION, "PyTorch's fused attention"),
    Backend(REFERENCE, _BOTH, (*_ATTENTION, "mlp"), "the readable reference in PyTorch"),
)
OPERATIONS = ("attention", "decode_attention", "mlp")
PLAIN = ("sdpa", REFERENCE)  # PyTorch's own attention, on every device


class Chosen(NamedTuple):
    """The backend of each operation, in the order of `OPERATIONS`."""

    attention: str  # may be `auto` on a GPU: cuDNN and Triton; `invariant` with deterministic
    decode_attention: str  # may be `auto` on a GPU: CUDA C++ or Triton, by the number of rows
    mlp: str


def choices(operation: str) -> tuple[str, ...]:
    """Return every value that the knob of an operation takes, whatever the device, in its usual spelling."""
    return (AUTO, *(row.name for row in BACKENDS if operation in row.operations))


def available(operation: str, device: str) -> list[str]:
    """Return the backends that compute an operation on a "cpu" or a "gpu"."""
    return [row.name for row in BACKENDS if operation in row.operations and device in row.devices]
