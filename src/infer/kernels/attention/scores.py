"""Soft caps and sinks, by which some families change the scores, for this folder's Triton kernels.

    soft cap    s becomes c tanh(s / c)                                  Gemma 2
    sink        one more score of each head, which has no value          gpt-oss

Kernels compute softmax with powers of two, so scores and caps are multiplied by log2(e) here. A sink affects
only the denominator: the program that writes the output adds it before the division, and splits of the keys
ignore it. A sink far above all scores makes the sum as large as a float can be, and the output as small as it
should be.
"""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, tl


def cap_constant(softcap: float | None) -> int:
    """The cap of a layer in thousandths; 0: no cap.

    An integer, because launches are cached by their constants, and a float could be mistaken for one.
    """
    return 0 if softcap is None else max(1, round(softcap * 1000))


@jit
def cap_scores(scores, CAP: tl.constexpr):
    """Return c tanh(scores / c), computed as 1 - 2 / (1 + e^2x), which is 1 for a large x."""
    c: tl.constexpr = CAP * 0.0014426950408889634  # log2(e) / 1000
    return c - 2.0 * c / (1.0 + tl.exp2(tl.minimum(scores * (2.8853900817779268 / c), 126.0)))


@jit
def sink_weights(sinks_ptr, heads, exists, maximum):
    """The terms that the sinks of some heads add to their denominators, relative to 2^maximum."""
    sink = tl.load(sinks_ptr + heads, mask=exists, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    return tl.exp2(tl.minimum(sink - tl.where(maximum == float("-inf"), 0.0, maximum), 126.0))
