"""How likely the model thought a token was, and what it thought of the alternatives.

Logprobs are taken from the model's own logits, before bias, penalties, temperature and filters: they
describe the model, not the request. The chosen token is reported beside the k likeliest, so a client sees
k or k + 1 different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.sampling.params import RowLogprobs


def top_logprobs(
    logits_SV: torch.Tensor, chosen: Sequence[int], num_logprobs: Sequence[int | None]
) -> list[RowLogprobs | None]:
    """Logprobs for the rows that ask (an entry that is not None), computed together."""
    asking = [i for i, count in enumerate(num_logprobs) if count is not None]
    found: list[RowLogprobs | None] = [None] * len(chosen)
    if not asking:
        return found
    logprobs = torch.log_softmax(logits_SV[asking].float(), dim=-1)
    ids = torch.tensor([chosen[i] for i in asking], device=logprobs.device)
    own = logprobs.gather(1, ids.unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    width = max(count for count in num_logprobs if count is not None)
    values, top_ids = torch.topk(logprobs, min(width, logprobs.shape[1]), dim=-1)
    table = zip(
        asking, own.squeeze(1).tolist(), ranks.tolist(), top_ids.tolist(), values.tolist(), strict=True
    )
    for i, logprob, rank, row_ids, row_values in table:
        count = num_logprobs[i] or 0
        top = tuple(zip(row_ids[:count], row_values[:count], strict=True))
        found[i] = RowLogprobs(chosen[i], logprob, rank, top)
    return found
