"""Compare two reports, and decide if a difference is more than noise.

    change = after / before - 1
    band   = the larger spread of the two, (high - low) / median / 2, and never less than the least band
    worse or better only if the change leaves the band; otherwise "same"

A time that changed by less than a tenth of a millisecond counts as the same, whatever the relative change. A
single repeat has no spread, so it gets a wider band: one run can be off by that much on a busy machine.
Figures with no better direction (counts of requested tokens, sizes set by a knob) are not judged.
Differences in machine, model, config or seed are listed, because they may explain the result. So may two
things that no setting shows: a prefix cache that already held one report's prompts, which shows in the share
of prompt tokens that were cached; and a machine of the same name that was slower that day, which shows in
the ceilings that were measured with the rows.
Comparing reports without a common figure that has a direction is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infer.bench.metrics import CEILINGS, MEASURES, show
from infer.bench.report import Figure, Report, Row
from infer.errors import ConfigError

LEAST_BAND = 0.02
SINGLE_BAND = 0.08  # band if one of the two has only one repeat
CACHED_BAND = 0.10  # difference in cached share of prompt tokens that is listed
LEAST_SECONDS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One figure of one row in both reports."""

    row: str
    figure: str
    before: float
    after: float
    change: float  # relative change; +0.1: ten per cent more
    band: float
    verdict: str  # "better", "worse" or "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdicts on all figures that two reports share, and the rows and settings that differ."""

    verdicts: list[Verdict]
    only_before: list[str]  # rows of the first report alone
    only_after: list[str]
    differences: list[str]  # differences in machine, model, seed: reasons to doubt the verdicts

    @property
    def worse(self) -> list[Verdict]:
        """The verdicts that are `worse`."""
        return [verdict for verdict in self.verdicts if verdict.verdict == "worse"]


def compare(before: Report, after: Report, *, least_band: float = LEAST_BAND) -> Comparison:
    """Return a verdict on every common figure that has a direction; raises an error if there is none."""
    old = {row.name: row for row in before.rows if row.figures}
    new = {row.name: row for row in after.rows if row.figures}
    verdicts = []
    for name, row in old.items():
        if name not in new:
            continue
        for figure, value in row.figures.items():
            measure, other = MEASURES.get(figure), new[name].figures.get(figure)
            if measure is not None and measure.better and other is not None:
                verdicts.append(_judge(name, figure, measure.better, value, other, least_band))
    if not verdicts:
        raise ConfigError(
            f"nothing to compare: the first is {_describe(before)}, the second {_describe(after)}, "
            "and no row has the same name and a figure that both measured"
        )
    return Comparison(
        verdicts=verdicts,
        only_before=[name for name in old if name not in new],
        only_after=[name for name in new if name not in old],
        differences=_differences(before, after, least_band),
    )


def spread(figure: Figure) -> float:
    """Return half the distance between the extremes of the repeats, relative to their median."""
    return (figure.high - figure.low) / abs(figure.median) / 2 if figure.median else 0.0


def _describe(report: Report) -> str:
    """Return the kind and the first rows of a report."""
    names = [row.name for row in report.rows if row.figures]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"a report of {report.kind!r} on {', '.join(names[:3]) or 'nothing'}{more}"


def _judge(row: str, name: str, better: str, before: Figure, after: Figure, least: float) -> Verdict:
    is_single = min(len(before.values), len(after.values)) == 1
    band = max(least, SINGLE_BAND if is_single else 0.0, spread(before), spread(after))
    change = _change(before.median, after.median)
    is_better = (change > 0) == (better == "higher")
    is_short = MEASURES[name].unit == "ms" and abs(after.median - before.median) < LEAST_SECONDS
    verdict = "same" if is_short or abs(change) <= band else "better" if is_better else "worse"
    return Verdict(
        row=row,
        figure=name,
        before=before.median,
        after=after.median,
        change=change,
        band=band,
        verdict=verdict,
    )


def _change(before: float, after: float) -> float:
    if before:
        return after / before - 1
    return math.inf if after else 0.0


def _differences(before: Report, after: Report, least_band: float) -> list[str]:
    found = []
    if before.kind != after.kind:
        found.append(f"kind: {before.kind} and {after.kind}")
    for title, old, new in (
        ("machine", before.machine, after.machine),
        ("model", before.model, after.model),
        ("config", before.config, after.config),
    ):
        # a server's config comes from the labels of a metric, where every number is text
        found += [
            f"{title} {name}: {old[name]} and {new[name]}"
            for name in old
            if name in new and str(old[name]) != str(new[name])
        ]
    if before.seed != after.seed and before.machine and after.machine:
        found.append(f"seed: {before.seed} and {after.seed}")
    found += _other_speeds(before, after, max(least_band, SINGLE_BAND)) + _warm_caches(before, after)
    cut = [title for title, report in (("first", before), ("second", after)) if report.is_partial]
    return found + [f"completeness: the {title} was interrupted" for title in cut]


def _other_speeds(before: Report, after: Report, band: float) -> list[str]:
    """Return a sentence for each ceiling that differs; a report measures them once, for all its rows."""
    found = []
    for name in CEILINGS:
        old, new = (
            next((row.figures[name].median for row in report.rows if name in row.figures), None)
            for report in (before, after)
        )
        if old and new and abs(_change(old, new)) > band:
            found.append(
                f"measured ceiling, {MEASURES[name].title}: {show(name, old)} and {show(name, new)}; "
                f"the machine itself was {'faster' if new > old else 'slower'} in the second, "
                "which may be the whole reason why figures are better or worse"
            )
    return found


def _warm_caches(before: Report, after: Report) -> list[str]:
    """Return a sentence for each row whose prompts were cached to a different extent."""
    new = {row.name: row for row in after.rows}
    found = []
    for row in before.rows:
        shares = [_cached_share(each) for each in (row, new.get(row.name)) if each is not None]
        known = [share for share in shares if share is not None]
        if len(known) == 2 and abs(known[0] - known[1]) > CACHED_BAND:
            found.append(
                f"cached share of prompt tokens of {row.name}: {show('cached_share', known[0])} and "
                f"{show('cached_share', known[1])}; one may have hit a warm prefix cache"
            )
    return found


def _cached_share(row: Row) -> float | None:
    """Return the recorded share, or compute it from the counts if the report is too old to have it."""
    if "cached_share" in row.figures:
        return row.figures["cached_share"].median
    counts = [row.figures.get(name) for name in ("num_cached_tokens", "num_prompt_tokens")]
    cached, prompt = (0.0 if count is None else count.median for count in counts)
    return cached / prompt if prompt else None
