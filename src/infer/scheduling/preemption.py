"""The choice between swapping and recomputing a preempted sequence.

    swap        its keys and values are copied to host memory and back:   2 * num_computed * swap_seconds
    recompute   its tokens run through the model again:                   num_computed * recompute_seconds

Both costs grow with the length, so the ratio of the seconds per token decides, and it depends on the machine.
The engine measures both once, before the first request, so that equal queues give equal plans.

An evicted prefix leaves a copy in host memory if copying it back is cheaper than computing it again. The copy
is made while steps run, and is copied back only when a prompt needs the prefix again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Seconds per token of swapping and recomputing; the defaults prefer recomputing."""

    swap_seconds: float = 1.0
    recompute_seconds: float = 1.0

    @property
    def favors_host(self) -> bool:
        """True if copying a token from host memory takes less time than computing it."""
        return self.swap_seconds < self.recompute_seconds

    def prefers_swap(self, mode: str, num_computed: int) -> bool:
        """Return True if this mode swaps a sequence with `num_computed` tokens."""
        if mode == "auto":
            return num_computed > 0 and 2 * self.swap_seconds < self.recompute_seconds
        return mode == "swap"
