"""Sampling settings of each row of state, stored on the device: a captured step reads them in every replay.

A row has a *line* of twelve numbers, entered when its sequence arrives, and more state if it needs it:

    line     a flag for uses, top-k, seed, end of bans, number of biased ids, temperature, top-p, ...
    uses     for every id of the vocabulary: its count in the output, a flag if the prompt has it, and a flag
             if it is banned before `min_tokens` (16 bits); updated by `advance_rows` as tokens are sampled,
             so a penalty counts tokens that the host has not seen yet
    biases   the ids of a logit bias, and the amount that is added to each
    mask     a bit for every id of the vocabulary, 1: allowed. Masks have separate lines, because few rows
             have one and it changes with every token; `mask_row_R` maps rows to these lines. The lines are
             in pinned memory of the host: the sampler fetches them itself, and no copy has to be launched.

Settings that a row does not use are never read: without uses, biases and a mask, it is sampled directly from
the model's logits.

Shapes:  R rows of state, F fields of a line, V vocabulary, E ids of a bias, W words of a mask, K entries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from infer.kernels.runtime.dispatch import is_gpu, jit, next_power_of_two, tl, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine

MAX_BIASED = 1024  # ids of one logit bias
IN_PROMPT, IS_BANNED, MAX_COUNT = 1 << 14, -1 << 15, (1 << 14) - 1  # parts of a use; counts stop at MAX_COUNT


def constant(value: float) -> Any:
    """Make a global that kernels may read."""
    return value if tl is None else tl.constexpr(value)


def field(name: str) -> Any:
    """The index of a field in a line, for kernels."""
    return constant(SampleLine._fields.index(name))


@dataclass(frozen=True, slots=True)
class SampleState:
    """The sampling settings of each row of state; see the module's docstring."""

    lines_RF: torch.Tensor  # int64; the last fields are float64
    mask_row_R: torch.Tensor  # int32: line of the row in `masks_RW`; -1: none
    uses_RV: torch.Tensor  # int16
    biases_R2E: torch.Tensor  # int32: ids, and the bits of float32 amounts
    masks_RW: torch.Tensor  # int32, on the host

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str, vocab_size: int = 0) -> SampleState:
        """State of `num_rows` rows, all greedy; without a vocabulary, rows cannot have uses or biases."""
        num_biased = MAX_BIASED if vocab_size else 0
        greedy = torch.frombuffer(bytearray(SampleLine(0).pack()), dtype=torch.int64)
        return cls(
            greedy.to(device).repeat(num_rows, 1),
            torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            torch.zeros((num_rows, vocab_size), dtype=torch.int16, device=device),
            torch.zeros((num_rows, 2, num_biased), dtype=torch.int32, device=device),
            torch.zeros(
                (num_rows, num_mask_words(vocab_size)),
                dtype=torch.int32,
                pin_memory=is_gpu(torch.device(device)),
            ),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the order of the kernels' arguments."""
        return self.lines_RF, self.mask_row_R, self.uses_RV, self.biases_R2E, self.masks_RW

    def line(self, row: int) -> SampleLine:
        """The line of a row, read from the device."""
        return SampleLine.unpack(self.lines_RF[row].cpu().numpy().tobytes())


def num_mask_words(vocab_size: int) -> int:
    """The number of 32-bit words of a mask, rounded up."""
    return -(-vocab_size // 32)


def count_uses(
    vocab_size: int, prompt: Sequence[int] | np.ndarray, output: Sequence[int] | np.ndarray,
    banned: Collection[int],
) -> np.ndarray:  # fmt: skip
    """The uses of a row that arrives. Ids without a logit, which may have an embedding, are not counted."""
    prompt_ids, output_ids = np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)
    counts = np.bincount(output_ids[output_ids < vocab_size], minlength=vocab_size)
    uses = np.minimum(counts, MAX_COUNT).astype(np.int16)
    uses[prompt_ids[prompt_ids < vocab_size]] |= IN_PROMPT
    uses[list(banned)] |= IS_BANNED
    return uses


def pack_biases(biases: dict[int, float]) -> np.ndarray:
    """Pack the ids and amounts of a logit bias as a row of `biases_R2E`."""
    assert len(biases) <= MAX_BIASED, f"{len(biases)} biased ids, at most {MAX_BIASED} fit"
    packed_2E = np.zeros((2, MAX_BIASED), dtype=np.int32)
    packed_2E[0, : len(biases)] = list(biases)
    packed_2E[1, : len(biases)] = np.array(list(biases.values()), dtype=np.float32).view(np.int32)
    return packed_2E


def enter_rows_reference(state: SampleState, entries_KF: torch.Tensor) -> None:
    """The specification of `enter_rows`."""
    entries_KF = entries_KF[entries_KF[:, 0] >= 0]
    state.lines_RF[entries_KF[:, 0]] = entries_KF
    state.mask_row_R[entries_KF[:, 0]] = -1


@jit
def _enter_rows_kernel(
    entries_ptr, lines_ptr, mask_row_ptr, NUM_FIELDS: tl.constexpr, BLOCK_FIELDS: tl.constexpr,
):  # fmt: skip
    entry_ptr = entries_ptr + tl.program_id(0) * NUM_FIELDS
    row = tl.load(entry_ptr)
    fields = tl.arange(0, BLOCK_FIELDS)
    values = tl.load(entry_ptr + fields, mask=fields < NUM_FIELDS, other=0)
    tl.store(lines_ptr + row * NUM_FIELDS + fields, values, mask=(fields < NUM_FIELDS) & (row >= 0))
    tl.store(mask_row_ptr + row, tl.full((), -1, tl.int32), mask=row >= 0)


def enter_rows(state: SampleState, entries_KF: torch.Tensor) -> None:
    """Set the sampling settings of rows from packed lines; rows must be distinct, -1: nothing."""
    if not use_triton(entries_KF):
        enter_rows_reference(state, entries_KF)
    elif entries_KF.shape[0]:
        assert entries_KF.is_contiguous(), "entries must be contiguous"
        launch_triton(
            _enter_rows_kernel, (entries_KF.shape[0],), (entries_KF, state.lines_RF, state.mask_row_R), (),
            NUM_FIELDS=NUM_FIELDS, BLOCK_FIELDS=next_power_of_two(NUM_FIELDS), num_warps=1,
        )  # fmt: skip
