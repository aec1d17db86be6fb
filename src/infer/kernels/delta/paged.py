"""The gated delta rule for a ragged batch whose block tables are on the device.

    tokens      A B | C C C C | D D            first the decoding rows, then the chunks of prompts

Only the device knows the decoding rows; the host also knows the chunks (kernels/attention/prefill.py).
The specification is in reference.py.

Shapes:  T tokens, S decoding rows, R rows of tables, B blocks of each, C channels of q, k and v, V heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from infer.kernels.attention.prefill import PrefillChunks
from infer.kernels.delta.kernels import recur_runs
from infer.kernels.delta.reference import DeltaRule, StateCache, StateSpan, pieces_of, run_spans
from infer.kernels.runtime.dispatch import use_triton


def recur_paged(
    rule: DeltaRule, cache: StateCache, tables_RB: torch.Tensor, block_size: int,
    decoding: tuple[torch.Tensor, torch.Tensor], runs_S4: torch.Tensor, chunks: PrefillChunks | None,
    qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Advance the states of all rows over their tokens; returns [T, V, H].

    `decoding` has the decoding rows and their lengths including this token, 0: padding; `runs_S4` has the
    same rows as chunks of one token each.
    """
    if use_triton(qkv_TC):
        out_TVH = qkv_TC.new_zeros((*b_TV.shape, rule.value_dim))
        mixed_TC = torch.empty(qkv_TC.shape, dtype=qkv_TC.dtype, device=qkv_TC.device)
        whole_C4, drafts_C4 = (None, None) if chunks is None else (chunks.whole_C4, chunks.drafts_C4)
        for runs_U4 in (runs_S4, whole_C4, drafts_C4):  # drafts read the states after the tokens before them
            if runs_U4 is not None and len(runs_U4):
                recur_runs(
                    rule, cache, tables_RB, block_size, runs_U4, qkv_TC, b_TV, a_TV, mixed_TC, out_TVH,
                    are_tokens=runs_U4 is runs_S4, are_drafts=runs_U4 is drafts_C4,
                )  # fmt: skip
        return out_TVH
    spans = list(_spans(tables_RB, block_size, decoding, chunks))
    return run_spans(rule, cache, spans, qkv_TC, b_TV, a_TV)


def _spans(
    tables_RB: torch.Tensor,
    block_size: int,
    decoding: tuple[torch.Tensor, torch.Tensor],
    chunks: PrefillChunks | None,
) -> Iterator[StateSpan]:
    """Yield the spans that the reference computes, in order."""

    def span(tokens: slice | torch.Tensor, rows_S: torch.Tensor, starts_S: torch.Tensor) -> StateSpan:
        reads_S = tables_RB[rows_S, (starts_S - 1).clamp(min=0) // block_size].long()
        reads_S = torch.where(starts_S > 0, reads_S, -1)
        return StateSpan(tokens, reads_S, tables_RB[rows_S, starts_S // block_size].long())

    rows_S, lens_S = decoding
    (places_S,) = (lens_S > 0).nonzero(as_tuple=True)
    if len(places_S):
        yield span(places_S, rows_S[places_S].long(), lens_S[places_S].long() - 1)
    for number, (first, num, row, start) in enumerate(chunks.chunks if chunks is not None else ()):
        num_drafts = chunks.num_drafts[number] if chunks is not None and chunks.num_drafts else 0
        place, known = first - start, start + num - num_drafts
        row_1 = torch.tensor([row], device=tables_RB.device)
        for begin, end in pieces_of(start, known, block_size):
            begin_1 = torch.tensor([begin], device=tables_RB.device)
            yield span(slice(place + begin, place + end), row_1, begin_1)
        if num_drafts:
            known_1 = torch.tensor([known], device=tables_RB.device)
            yield span(slice(place + known, first + num), row_1, known_1)._replace(writes_S=None)
