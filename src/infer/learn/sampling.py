"""Lesson 8: filters that select the tokens that may be drawn."""

from __future__ import annotations

import numpy as np
import torch

from infer.learn.student import Student, Wrong, expect
from infer.sampling.filters import filter_rows
from infer.sampling.params import SamplingParams

TITLE = "Sampling"
STARTER = '''\
"""Lesson 8: from logits to the probabilities with which tokens are drawn."""

import numpy as np


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the probability of each token, in the order of the logits.

    temperature 0: the largest logit has probability 1. Otherwise logits are first divided by it. Then these
    filters apply in order:
      top_k   keep the k likeliest (0: all; tokens as likely as the k-th are kept too)
      top_p   keep the likeliest tokens until their probabilities, rescaled after top_k, reach p
      min_p   keep tokens that are at least min_p times as likely as the likeliest
    The remaining probabilities are scaled to the sum 1.
    """
    raise NotImplementedError
'''

TOLERANCE = 1e-4


def check(student: Student) -> None:
    """Compare with the engine's filters, one at a time and together."""
    probabilities, rng = student.get("probabilities"), np.random.default_rng(3)
    cases: list[dict[str, float]] = [
        {},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ]
    for case in cases:
        for _ in range(5):
            logits = (2.5 * rng.standard_normal(60)).astype(np.float32)
            given = ", ".join(f"{name}={value}" for name, value in case.items()) or "nothing else"
            student.doing = f"calling probabilities of 60 logits with {given}"
            try:
                got = np.asarray(probabilities(logits.tolist(), **case), dtype=np.float64)
            except (TypeError, ValueError) as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise
                raise Wrong(f"probabilities must return 60 numbers ({error})") from None
            _compare(got, _right(logits, case), given)


def _right(logits: np.ndarray, case: dict[str, float]) -> np.ndarray:
    params = SamplingParams(**({"temperature": 1.0} | case))  # type: ignore[arg-type]  # top_k is whole
    if not params.temperature:
        greedy = np.zeros(len(logits))
        greedy[logits.argmax()] = 1.0
        return greedy
    scaled = torch.from_numpy(logits) / params.temperature
    kept = filter_rows((scaled - scaled.max())[None], [params])
    result: np.ndarray = torch.softmax(kept[0].double(), 0).numpy()
    return result


def _compare(got: np.ndarray, right: np.ndarray, given: str) -> None:
    expect(
        got.shape == right.shape,
        f"with {given} there are {right.size} probabilities, got the shape {got.shape}",
    )
    kept, should = set(np.flatnonzero(got > 0).tolist()), set(np.flatnonzero(right > 0).tolist())
    expect(
        kept == should,
        f"with {given} the number of tokens that can be drawn is {len(kept)} instead of {len(should)}; "
        f"look at token {min(kept ^ should, default=0)}",
    )
    expect(
        abs(got.sum() - 1) < TOLERANCE, f"with {given} the probabilities sum up to {got.sum():.4f}, not to 1"
    )
    worst = int(np.abs(got - right).argmax())
    expect(
        abs(got[worst] - right[worst]) < TOLERANCE,
        f"with {given} token {worst} has the probability {got[worst]:.5f} instead of {right[worst]:.5f}",
    )
