"""Measures at the start how many prompt tokens fit into a step that also decodes.

A decoding sequence gets its next token when the step is over, and the prompt tokens in a step decide how long
it takes. So a target for the inter-token latency becomes a limit for prompt tokens:

    tokens of prompts    16    32    64   128   256   512  1024
    milliseconds        1.1   1.2   1.4   1.9   2.4   3.4   4.6      of a target of 4, 3 may be used: 256

A quarter of the target is left for reading the keys of long sequences, which is not measured. The times are
measured once, before the first request, so that equal queues give equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16  # minimum of prompt tokens in a step, so that prompts make progress with any target
SHARE = 0.75  # share of the target that a step may take


def prompt_tokens_within(target_ms: float, seconds_of: Callable[[int], float], *, max_tokens: int) -> int:
    """Return the most prompt tokens, a power of two, whose step stays within the target.

    `seconds_of` returns the seconds of a step with a given number of prompt tokens.
    """
    num_tokens = fitting = min(LEAST_TOKENS, max_tokens)
    measured_ms = took_ms = 0.0
    while num_tokens <= max_tokens:
        took_ms = seconds_of(num_tokens) * 1e3
        if took_ms > SHARE * target_ms:
            break
        fitting, measured_ms = num_tokens, took_ms
        num_tokens *= 2
    if measured_ms:
        logger.info(
            "inter-token latency target_ms=%g prompt_tokens_per_step=%d measured_ms=%.2f",
            target_ms,
            fitting,
            measured_ms,
        )
    else:
        logger.warning(
            "inter-token latency target cannot be met target_ms=%g of_which_for_prompts_ms=%g "
            "prompt_tokens_per_step=%d measured_ms=%.2f",
            target_ms,
            SHARE * target_ms,
            fitting,
            took_ms,
        )
    return fitting
