"""Measure rows one after the other, so that Ctrl-C loses only the current repeat.

    rows       row ──► row ──► row ✗ Ctrl-C             the rest are skipped, with the reason
    repeats    repeat ──► repeat ──► repeat ✗           complete repeats are kept, and the row says how many

An interrupted repeat is dropped, because half a workload is a different load.
A row that cannot be measured is skipped with its reason, and the others continue; it is an error if all fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from infer.bench.report import Report, Row, make_report, make_row, skip_row
from infer.errors import InferError

if TYPE_CHECKING:
    from infer.bench.target import BenchTarget

INTERRUPTED = "interrupted"
SHARE = "roofline_share"

Tell = Callable[[str], None]  # gets a line for each repeat as it ends


class RowJob(NamedTuple):
    """A row to measure: its description, and a function that runs a repeat and returns its figures."""

    about: str
    measure: Callable[[int], Mapping[str, float]]
    settings: Mapping[str, Any] | None = None


Jobs = Mapping[str, Callable[[], RowJob | Row]]  # jobs by the name of the row


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """The input of every engine benchmark: a model, the seed of the prompts, the number of repeats."""

    target: BenchTarget
    seed: int
    repeats: int
    tell: Tell

    def report(
        self,
        kind: str,
        jobs: Jobs,
        *,
        warmup: int,
        config: Mapping[str, Any] | None = None,
        notes: Callable[[Sequence[Row]], list[str]] = lambda rows: [],
    ) -> Report:
        """Measure all rows and report them with `config`, which defaults to the engine's knobs."""
        rows, is_partial = run_rows(jobs, self.repeats)
        return make_report(
            kind,
            rows,
            model=self.target.facts(),
            config=self.target.knobs() if config is None else config,
            seed=self.seed,
            repeats=self.repeats,
            warmup=warmup,
            notes=notes(rows),
            is_partial=is_partial,
        )


def run_rows(jobs: Jobs, repeats: int = 1) -> tuple[list[Row], bool]:
    """Return the row of every job, and whether repeats or rows are missing because of Ctrl-C."""
    rows: list[Row] = []
    errors: list[InferError] = []
    for name, prepare in jobs.items():
        job: RowJob | None = None
        runs: list[Mapping[str, float]] = []
        try:
            made = prepare()
            if isinstance(made, RowJob):
                job = made
                for repeat in range(repeats):
                    runs.append(job.measure(repeat))
                made = make_row(name, job.about, runs, settings=job.settings)
            rows.append(made)
        except InferError as error:
            errors.append(error)
            rows.append(skip_row(name, "", f"failed: {error}"))
        except KeyboardInterrupt:
            rows.append(_cut_row(name, job, runs, repeats))
            return rows + [skip_row(rest, "", INTERRUPTED) for rest in list(jobs)[len(rows) :]], True
    if errors and not any(row.figures for row in rows):
        raise errors[0]
    return rows, False


def _cut_row(name: str, job: RowJob | None, runs: Sequence[Mapping[str, float]], repeats: int) -> Row:
    """Return the row of a job that Ctrl-C interrupted: its complete repeats, if there are any."""
    if job is None:
        return skip_row(name, "", INTERRUPTED)
    if not runs:
        return skip_row(name, job.about, INTERRUPTED, job.settings)
    note = f"interrupted after {len(runs)} of {repeats} repeats"
    return make_row(name, job.about, runs, settings=job.settings, note=note)


def beyond_roofline(rows: Sequence[Row]) -> list[str]:
    """Return a note that explains how a row can be above 100 % of its roofline, if one is."""
    names = [row.name for row in rows if SHARE in row.figures and row.figures[SHARE].median > 1]
    if not names:
        return []
    return [
        f"above 100 % of the roofline ({'; '.join(names)}) does not mean faster than possible: a roofline is "
        "computed from the copy and matmul rates of this run. What stays in the processor's caches is read "
        "faster than a copy from memory, integers are multiplied faster than the floats of the matmul, and a "
        "rate that other programs disturbed, or measured before a burst of the clock, is too low. Read it as "
        "'at the ceiling', and on a machine that was busy measure again"
    ]
