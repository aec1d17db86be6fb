"""The log-probabilities that the model gave to a token and to its alternatives.

Logprobs are taken from the model's own logits, before bias, penalties, temperature and filters: they
describe the model, not the request. The chosen token is reported along with the k likeliest, so a client
sees k or k + 1 different tokens.

A *table* holds these numbers for some rows. It is made on the device of the logits
(kernels/sampling/logprob_table.py) and read on the host.

Shapes:  S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.kernels.sampling.logprob_table import logprob_table
from infer.sampling.params import RowLogprobs


def top_logprobs(
    logits_SV: torch.Tensor, chosen: Sequence[int], num_logprobs: Sequence[int | None]
) -> list[RowLogprobs | None]:
    """Return the logprobs of the rows whose number is not None, computed together."""
    asking = [i for i, count in enumerate(num_logprobs) if count is not None]
    found: list[RowLogprobs | None] = [None] * len(chosen)
    if asking:
        ids, counts = [chosen[i] for i in asking], [num_logprobs[i] or 0 for i in asking]
        table = logprob_table(logits_SV[asking], torch.tensor(ids, device=logits_SV.device), max(counts))
        for i, row in zip(asking, read_logprobs(table, ids, counts), strict=True):
            found[i] = row
    return found


def read_logprobs(table: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[RowLogprobs]:
    """Read the rows of a table, each with its number of alternatives, on the host."""
    table = table.cpu()
    width = table.shape[1] // 2 - 1
    fractions = table.view(torch.float32)
    columns = zip(
        chosen,
        counts,
        fractions[:, 0].tolist(),
        table[:, 1].tolist(),
        table[:, 2 : 2 + width].tolist(),
        fractions[:, 2 + width :].tolist(),
        strict=True,
    )
    return [
        RowLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, count, logprob, rank, ids, values in columns
    ]
