"""The times of one answer, for a client that asks for them (`metrics`), with vLLM's names and some more.

Times are measured from the client's view: from the arrival of its HTTP request to the arrival of tokens from
the engine. A step may produce several tokens of a sequence, from drafts or when a constraint leaves no
choice; the gap before them counts once among the gaps, and the mean is per token.
"""

from __future__ import annotations

from array import array
from typing import Any

from infer.scheduling.request import StepOutput

MAX_GAPS = 65_536  # most gaps for percentiles; the mean has no limit


class AnswerTimes:
    """The times at which the tokens of an answer arrived."""

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._first_at = self._last_at = 0.0
        self._queue_s = 0.0
        self._last: dict[tuple[int, int], float] = {}  # time of the last token, by prompt and sequence
        self._gaps = array("d")
        self._gaps_s = 0.0
        self._num_later = 0  # tokens after their sequence's first output

    def take(self, where: int, output: StepOutput, now: float) -> None:
        """Record an output of a prompt that has just arrived."""
        count = len(output.token_ids)
        if not count:
            return
        key = where, output.index
        before = self._last.get(key)
        if before is None:
            self._queue_s = max(self._queue_s, output.queue_s)
            self._num_later += count - 1
        else:
            self._num_later += count
            self._gaps_s += now - before
            if len(self._gaps) < MAX_GAPS:
                self._gaps.append(now - before)
        self._last[key] = self._last_at = now
        self._first_at = self._first_at or now

    def to_wire(self, num_output: int, num_cached: int) -> dict[str, Any]:
        """Return the times of an answer in milliseconds; null if there is no value."""
        whole_s = self._last_at - self._arrived_at if self._last else 0.0
        return {
            "time_to_first_token_ms": _ms(self._first_at - self._arrived_at) if self._last else None,
            "queue_time_ms": _ms(self._queue_s),
            "generation_time_ms": _ms(whole_s),
            "mean_itl_ms": _ms(self._gaps_s / self._num_later) if self._num_later else None,
            "p99_itl_ms": _ms(percentile(self._gaps, 0.99)) if self._gaps else None,
            "tokens_per_second": round(num_output / whole_s, 3) if whole_s > 0 else None,
            "cached_tokens": num_cached,
        }


def percentile(values: array[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
