"""The fate of a model's likeliest tokens: whether each could be drawn, and why not.

A step reports the model's own probabilities of the likeliest tokens (sampling/logprobs.py). The request's
parameters are applied to them here, in the order of docs/features/sampling.md:

    bias, bans, mask ─ penalties ─ / temperature ─ top_k ─ top_p ─ min_p

Two facts are known about the tokens that are not reported, the *tail*: none of them is likelier than the last
reported one, and together they have the remaining probability. At another temperature these facts bound the
tail's mass on both sides:

    a = 1 / temperature, q = the last probability reported, R = the tail's probability, N = its tokens

    a >= 1    R^a / N^(a - 1)  <=  mass  <=  q^(a - 1) R
    a <  1    q^(a - 1) R      <=  mass  <=  R^a / N^(a - 1)

A fate that is the same for every mass within the bounds is reported; otherwise it is UNKNOWN, never a guess.
A repetition penalty scales logits, which cannot be recovered from probabilities, so with one the only known
fates are bans and masks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np

from infer.sampling.params import RowLogprobs, SamplingParams

KEPT, UNKNOWN = "", "?"
MASKED, BANNED = "the constraint forbids it", "banned before min_tokens"
CLOSE: Final = 0.005  # shares are reported if their total is known with a smaller error than this


class Candidate(NamedTuple):
    """One of the tokens that were most likely by the model."""

    token_id: int
    probability: float  # the model's own
    share: float | None  # probability among the remaining tokens; None: the token was removed, or unknown
    fate: str  # KEPT, UNKNOWN, or the filter that removed it
    note: str = ""  # adjustments of its logit


class DrawContext(NamedTuple):
    """The inputs of a draw besides the logits and the request's parameters."""

    tokens: Sequence[int]  # tokens before the drawn one, including the prompt
    num_prompt: int
    vocab_size: int
    banned: Collection[int] = ()  # ids that must not come yet
    mask_W: np.ndarray | None = None  # 32-bit words, a bit for each id: 1 where it may come

    def allows(self, token_id: int) -> bool:
        """True if the mask allows this id."""
        return self.mask_W is None or bool(int(self.mask_W[token_id >> 5]) >> (token_id & 31) & 1)


def weigh(row: RowLogprobs, params: SamplingParams, context: DrawContext) -> list[Candidate]:
    """Return the reported tokens in the model's order, each with its fate."""
    reported = dict(row.top)
    seen, made = set(context.tokens), Counter(context.tokens[context.num_prompt :])
    adjusted: dict[int, float] = {}  # logprobs of the tokens that are allowed
    fates: dict[int, str] = {}
    notes: dict[int, str] = {}
    for token_id, logprob in reported.items():
        shift = params.logit_bias.get(token_id, 0.0)
        if made[token_id]:
            shift -= params.presence_penalty + params.frequency_penalty * made[token_id]
        is_repeated = params.repetition_penalty != 1.0 and token_id in seen
        told = [f"logit {shift:+.4g}"] if shift else []
        told += [f"repetition_penalty {params.repetition_penalty:g}"] if is_repeated else []
        notes[token_id] = ", ".join(told)
        if token_id in context.banned:
            fates[token_id] = BANNED
        elif not context.allows(token_id):
            fates[token_id] = MASKED
        elif logprob > -math.inf:
            adjusted[token_id] = logprob + shift
    shares: dict[int, float] = {}
    if adjusted and params.repetition_penalty == 1.0 and not params.is_greedy:
        filtered = _filter(adjusted, reported, params, context)
        fates |= filtered[0]
        shares = filtered[1]
    elif not params.is_greedy:
        fates |= dict.fromkeys(adjusted, UNKNOWN)
    if fates.get(row.token_id) == UNKNOWN:
        fates[row.token_id] = KEPT  # it was drawn
    return [
        Candidate(
            token_id, math.exp(logprob), shares.get(token_id), fates.get(token_id, KEPT), notes[token_id]
        )
        for token_id, logprob in reported.items()
    ]


def _filter(
    adjusted: dict[int, float], reported: dict[int, float], params: SamplingParams, context: DrawContext
) -> tuple[dict[int, str], dict[int, float]]:
    """Return the fates of allowed tokens under the filters, and the shares of the remaining ones."""
    power = 1.0 / max(params.temperature, 1e-6)
    largest = max(adjusted.values())
    weights = {token_id: math.exp((value - largest) * power) for token_id, value in adjusted.items()}
    ranked = sorted(weights, key=lambda token_id: -weights[token_id])
    low, high = _tail(adjusted, reported, params, context, power, largest)
    edge = math.exp((min(reported.values()) - largest) * power)  # no token of the tail weighs more
    if _lifts_tail(reported, params, context):
        edge = high = math.inf
    fates = dict.fromkeys(ranked, KEPT)
    if 0 < params.top_k <= len(ranked):
        floor = weights[ranked[params.top_k - 1]]
        for token_id in ranked:
            if weights[token_id] < floor:
                fates[token_id] = f"top_k {params.top_k}"
            elif weights[token_id] < edge:  # tokens of the tail may be likelier
                fates[token_id] = UNKNOWN
        high = 0.0 if floor >= edge else high
    low = 0.0 if params.top_k > 0 else low
    if params.top_p < 1.0:
        left = [token_id for token_id in ranked if not fates[token_id].startswith("top_k")]
        total, above = sum(weights[token_id] for token_id in left), 0.0
        for token_id in left:
            if above >= params.top_p * (total + high):
                fates[token_id] = f"top_p {params.top_p:g}"
            elif above >= params.top_p * (total + low) or weights[token_id] < edge:
                fates[token_id] = UNKNOWN
            above += weights[token_id]
    for token_id in ranked:
        if weights[token_id] < params.min_p and fates[token_id] in (KEPT, UNKNOWN):
            fates[token_id] = f"min_p {params.min_p:g}"
    left = [token_id for token_id in ranked if fates[token_id] == KEPT]
    if UNKNOWN in fates.values():
        return fates, {}
    if len(left) < len(ranked) and weights[left[-1]] >= edge:  # the cut-off of a filter is above the tail
        low = high = 0.0
    total = sum(weights[token_id] for token_id in left)
    if high - low > CLOSE * (total + low):
        return fates, {}
    return fates, {token_id: weights[token_id] / (total + (low + high) / 2) for token_id in left}


def _tail(
    adjusted: dict[int, float],
    reported: dict[int, float],
    params: SamplingParams,
    context: DrawContext,
    power: float,
    largest: float,
) -> tuple[float, float]:
    """Return bounds on the total weight of all other tokens; the likeliest reported token weighs 1."""
    count = context.vocab_size - len(reported)
    if count <= 0:
        return 0.0, 0.0
    rest = math.log(max(1.0 - sum(map(math.exp, reported.values())), 1e-7))  # the precision of a float32 sum
    evenly = power * rest - (power - 1.0) * math.log(count)
    steeply = (power - 1.0) * min(reported.values()) + rest
    low, high = sorted((evenly - largest * power, steeply - largest * power))
    is_whole = context.mask_W is None and not (params.logit_bias or params.has_penalties or context.banned)
    return (math.exp(min(low, 700.0)) if is_whole else 0.0), math.exp(min(high, 700.0))


def _lifts_tail(reported: dict[int, float], params: SamplingParams, context: DrawContext) -> bool:
    """Return True if a token of the tail may have been made likelier."""
    if any(bias > 0 and token_id not in reported for token_id, bias in params.logit_bias.items()):
        return True
    return (
        min(params.presence_penalty, params.frequency_penalty) < 0
        and len(context.tokens) > context.num_prompt
    )
