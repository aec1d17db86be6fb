"""How many tokens of prompts fit into a step beside sequences that decode, measured when an engine starts.

A sequence that decodes gets its next token when the step is over, and a step is as long as the tokens of
prompts in it make it. So a target for the time between tokens is a limit for those tokens:

    tokens of prompts    16    32    64   128   256   512  1024
    milliseconds        1.1   1.2   1.4   1.9   2.4   3.4   4.6      of a target of 4, 3 may be used: 256

A quarter of the target is left for what was not there to be measured: reading the keys of long sequences. It
is measured once, before the first request, so that equal queues give equal plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16  # of prompts in a step, whatever the target: they must get on
SHARE = 0.75  # of the target


def prompt_tokens_within(target_ms: float, seconds_of: Callable[[int], float], *, max_tokens: int) -> int:
    """The most tokens of prompts, a power of two, whose step takes no longer than the target allows.

    `seconds_of` returns how long a step with so many tokens of prompts takes.
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
            "inter-token latency cannot be kept target_ms=%g of_which_for_prompts_ms=%g "
            "prompt_tokens_per_step=%d measured_ms=%.2f",
            target_ms,
            SHARE * target_ms,
            fitting,
            took_ms,
        )
    return fitting
