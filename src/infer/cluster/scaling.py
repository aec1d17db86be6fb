"""The right number of replicas: more while requests wait everywhere, fewer when they fit on fewer.

    queue time of a replica    the mean over requests that started since the last look, or, if longer, the
                               time for which sequences have been waiting there without a break
    one more                   the shortest queue time of all replicas is above the target, twice in a row
    one less                   nothing waited anywhere for `scale_down_after` s, and all requests would fit on
                               one replica fewer; a replica's capacity is what ran on it while others waited

The number changes by one at a time: while a replica is being started or ended, nothing is decided. A replica
that waits for a place in a full cluster counts as an idle one: none is added, but it may be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NUM_LOOKS = 2  # looks with long queues before a replica is added


class LoadReport(NamedTuple):
    """The load of a replica, from its metrics."""

    number: int
    num_running: float
    num_waiting: float
    queue_s: float  # total seconds in the queue, of all requests that have started
    num_queued: float  # number of requests that have started


def read_load(number: int, page: bytes) -> LoadReport:
    """Read the load from a page of metrics; several models and engines are added up."""
    names = {
        b"infer_num_requests_running": 0,
        b"infer_num_requests_waiting": 1,
        b"infer_request_queue_time_seconds_sum": 2,
        b"infer_request_queue_time_seconds_count": 3,
    }
    sums = [0.0, 0.0, 0.0, 0.0]
    for line in page.splitlines():
        where = names.get(line.partition(b"{")[0])
        if where is not None:
            sums[where] += float(line.rpartition(b" ")[2])
    return LoadReport(number, *sums)


@dataclass(slots=True)
class Scaler:
    """Decides the number of replicas from reports; `now` is any clock that counts seconds."""

    lowest: int
    highest: int
    target_s: float
    scale_down_after: float
    _before: dict[int, LoadReport] = field(default_factory=dict)
    _waiting_since: dict[int, float] = field(default_factory=dict)
    _num_long: int = 0
    _calm_since: float | None = None
    _busiest: float = 0.0  # most sequences at once since the queues are empty
    _capacity: float | None = None  # most sequences that ran on one replica while others waited there

    def decide(self, reports: Sequence[LoadReport], now: float, num_unplaced: int = 0) -> int:
        """Return the number of replicas that there should be; it changes by at most one."""
        queues = [self._queue_s(report, now) for report in reports]
        self._before = {report.number: report for report in reports}
        for report in reports:
            if report.num_waiting:
                self._capacity = max(self._capacity or 0.0, report.num_running)
        count = len(reports) + num_unplaced
        if not reports:
            return count
        self._num_long = self._num_long + 1 if min(queues) > self.target_s else 0
        if self._num_long >= NUM_LOOKS and count < self.highest and not num_unplaced:
            self._num_long, self._calm_since = 0, None
            return count + 1
        running = sum(report.num_running for report in reports)
        if any(report.num_waiting for report in reports) or self._calm_since is None:
            self._calm_since, self._busiest = now, running
        self._busiest = max(self._busiest, running)
        fits = self._capacity is None or self._busiest <= (count - 1) * self._capacity
        if not fits:
            self._calm_since = None
        elif count > self.lowest and now - self._calm_since >= self.scale_down_after:
            self._calm_since = None
            return count - 1
        return count

    def _queue_s(self, report: LoadReport, now: float) -> float:
        if report.num_waiting:
            waited = now - self._waiting_since.setdefault(report.number, now)
        else:
            self._waiting_since.pop(report.number, None)
            waited = 0.0
        before = self._before.get(report.number, LoadReport(report.number, 0, 0, 0, 0))
        started = report.num_queued - before.num_queued
        if started <= 0:  # none started, or the replica was restarted
            return waited
        return max(waited, (report.queue_s - before.queue_s) / started)
