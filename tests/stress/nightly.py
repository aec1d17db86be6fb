"""A million random requests through the scheduler, the cache and the engine loop: `make nightly`.

    python -m tests.stress.nightly --requests 1000000 --jobs 2     # the time decides the first seed
    python -m tests.stress.nightly --journal night.jsonl           # the same command again goes on from there
    python -m tests.stress.nightly --seed 4711                     # one case, a few seconds
    python -m tests.stress.nightly --seed 4711 --size 20 --without beams,drafts

A *case* is a world and its traffic, made from a seed: a row of the toggle matrix (every policy, cache and
kind of preemption), squeezed or not, with or without windows, drafts, steps under way and steps that raise.
Drafts come from outside before any step that can take some, or from the engine's own speculation.
Every token is checked against the oracle, every book after every step.

A case that fails is made smaller as long as it still fails: fewer requests, then one feature less at a time.
What is left is printed as a command that repeats it. Exit code 1: some case failed; 130: Ctrl-C.

A journal has a line for each case that has ended. A run that finds one does not repeat those cases, and
counts them; its seeds and its number of requests are those of the first run.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.scheduling.request import StepOutput
from tests.stress.test_drafts import Speculation
from tests.stress.test_token_oracle import SQUEEZED, Traffic, make_world
from tests.support.oracle import OracleWorld
from tests.support.oracle_drafts import KINDS, speculation_of
from tests.support.toggles import pairwise_rows

SIZE = 300  # requests of a case
WINDOWS: tuple[tuple[int | None, ...], ...] = ((7,), (None, 6, 6), (5, 12), (None, None, 1))
OF_REQUESTS = ("beams", "forks", "embeddings", "salts", "priorities", "aborts", "resets")
OF_WORLDS = ("drafts", "speculation", "ahead", "faults", "windows", "placement", "squeeze")
FEATURES = (*OF_WORLDS, *OF_REQUESTS)
FAULT_EVERY = 61  # steps
SHRINK_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """A seed, the number of its requests, and the features it does without."""

    seed: int
    size: int = SIZE
    without: frozenset[str] = field(default_factory=frozenset)

    @property
    def command(self) -> str:
        """What repeats this case."""
        parts = [f"python -m tests.stress.nightly --seed {self.seed}"]
        if self.size != SIZE:
            parts.append(f"--size {self.size}")
        if self.without:
            parts.append("--without " + ",".join(sorted(self.without)))
        return " ".join(parts)

    def has(self, feature: str, share: float, rng: random.Random) -> bool:
        """True where the seed chooses a feature; the draws are the same whether it is used or not."""
        return rng.random() < share and feature not in self.without


def run_case(case: Case) -> Counter[str]:
    """Run a case and check all of it; returns what happened."""
    logging.getLogger("infer").setLevel(logging.CRITICAL)  # steps that were told to raise are logged
    rng = random.Random(f"nightly {case.seed}")
    row: dict[str, Any] = dict(rng.choice(pairwise_rows()))
    changes: dict[str, Any] = {}
    if case.has("squeeze", 0.6, rng):
        row |= SQUEEZED
    windows, placement, ahead = rng.choice(WINDOWS), rng.randrange(1000), rng.choice((1, 2, 3))
    if case.has("windows", 0.25, rng) and row["kv_cache_backend"] == "paged":
        changes["windows"] = windows
        changes["num_blocks"] = row["cache_tokens"] // row["block_size"] * len(windows)
    if case.has("placement", 0.5, rng):
        changes["placement_seed"] = placement
    has_drafts = case.has("drafts", 0.3, rng) and row["kv_cache_backend"] != "naive"
    speculates = case.has("speculation", 0.7, rng) and not has_drafts
    make_speculation = speculation_of(
        rng.choice(KINDS), seed=case.seed, share=rng.choice((0.3, 0.7, 0.95)), is_adaptive=rng.random() < 0.5,
        max_drafts=rng.randint(1, 8),
    )  # fmt: skip
    if speculates:
        changes["speculation"] = make_speculation
    if case.has("ahead", 0.5, rng) and not has_drafts:
        changes["steps_ahead"] = ahead
    has_faults = case.has("faults", 0.15, rng)
    world = make_world(row, **changes)
    failed = break_steps(world, fails_early=rng.random() < 0.5) if has_faults else set[str]()
    speculation = Speculation(world, case.seed, max_drafts=rng.randint(1, 6)) if has_drafts else None
    traffic = Traffic(
        world, case.seed, case.size, without=case.without, plain_share=rng.choice((0.0, 0.6, 0.95, 1.0)),
        pace=rng.choice((0.05, 0.1, 0.3) if speculates else (0.1, 0.4, 0.8)),  # drafts are for quiet moments
    )  # fmt: skip
    traffic.run()
    world.aborted |= failed  # they have no tokens to check
    events = Counter(checked=world.verify())
    world.check_idle()
    usage = world.pool.usage()
    events.update(
        {
            "requests": traffic.num_sent, "refused": traffic.num_refused,
            "aborted": len(world.aborted - failed),
            "ended by failed steps": len(failed), "steps": world.runner.num_steps,
            "preempted": world.scheduler.num_preemptions, "hit tokens": usage.num_hit_tokens,
            "evicted blocks": usage.num_evicted_blocks,
            f"policy {row['scheduler_policy']}": traffic.num_sent,
            f"cache {row['kv_cache_backend']}": traffic.num_sent,
        }
    )  # fmt: skip
    events.update(world.runner.num_transfers)
    events["beam searches"] += sum(request.params.use_beam_search for request in world.requests.values())
    events["embeddings"] += sum(request.pooling is not None for request in world.requests.values())
    events["several steps under way"] += world.most_late > 1
    if speculation is not None:
        events["drafts from outside"] += speculation.events["drafts"]
        events["requests with drafts from outside"] += traffic.num_sent
    if (own := world.engine.speculation) is not None:
        assert not (own._limits or own._lengths._known), "sequences that have ended are remembered"
        events.update({"drafts": own.totals.num_drafts, "drafts kept": own.totals.num_accepted})
        events["requests with speculation"] += traffic.num_sent
    return events


def break_steps(world: OracleWorld, *, fails_early: bool) -> set[str]:
    """Let a step raise now and then; returns the set that its requests will be in."""
    failed: set[str] = set()
    step = world.engine.step
    world.runner.fails_early = fails_early

    def step_and_note_failures() -> list[StepOutput]:
        if world.runner.num_steps % FAULT_EVERY == 5:
            world.runner.fail_at = world.runner.num_steps + 1
        outputs = step()
        failed.update(output.request_id for output in outputs if output.finish_reason == "error")
        return outputs

    world.engine.step = step_and_note_failures  # type: ignore[method-assign]
    return failed


def fault_of(case: Case) -> str | None:
    """What is wrong with a case, in a few lines; None: nothing."""
    try:
        run_case(case)
    except Exception:
        return traceback.format_exc(limit=-3)
    return None


def smaller(case: Case) -> Iterator[Case]:
    """The cases to try next, those that save most first."""
    for size in (case.size // 4, case.size // 2, case.size * 3 // 4, case.size - 1):
        if 0 < size < case.size:
            yield replace(case, size=size)
    for feature in FEATURES:
        if feature not in case.without:
            yield replace(case, without=case.without | {feature})


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case found in SHRINK_S seconds which still fails."""
    give_up_at = time.monotonic() + SHRINK_S
    while time.monotonic() < give_up_at:
        for candidate in smaller(case):
            if fails(candidate):
                case = candidate
                break
        else:
            return case
    return case


def run_seed(seed: int) -> tuple[int, Counter[str], str | None]:
    """Run the whole case of a seed: what happened, or a report of what is wrong."""
    case = Case(seed)
    try:
        return seed, run_case(case), None
    except Exception:
        fault = traceback.format_exc(limit=-3)
    least = shrink(case, lambda candidate: fault_of(candidate) is not None)
    return (
        seed,
        Counter(),
        f"seed {seed} failed:\n{fault}{fault_of(least) or ''}\nrepeat it with: {least.command}",
    )


class Journal:
    """The cases that have ended, in a file or nowhere; what an interrupted run has written is read again."""

    def __init__(self, path: Path | None, num_requests: int, first_seed: int) -> None:
        self.num_requests, self.first_seed = num_requests, first_seed
        self.ended: set[int] = set()
        self.totals: Counter[str] = Counter()
        self.num_failed = 0
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path and path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # it was being written
            lines.pop()
        if not lines:
            self._write({"requests": num_requests, "first_seed": first_seed}, "w")
            return
        begun = json.loads(lines[0])
        self.num_requests, self.first_seed = begun["requests"], begun["first_seed"]
        assert path is not None
        path.write_text("".join(lines), encoding="utf-8")
        for line in lines[1:]:
            self._count(**json.loads(line))

    @property
    def seeds(self) -> range:
        """The seeds of all cases."""
        return range(self.first_seed, self.first_seed + -(-self.num_requests // SIZE))

    @property
    def resume(self) -> str:
        """How a run that was interrupted goes on."""
        if self._path is None:
            return (
                f"begin again with --first-seed {self.first_seed}, and with --journal FILE to go on next time"
            )
        return f"go on with: python -m tests.stress.nightly --journal {self._path}"

    def add(self, seed: int, events: Counter[str], report: str | None) -> None:
        """Note a case that has ended."""
        self._count(seed, events, report)
        self._write({"seed": seed, "events": events, "report": report}, "a")

    def summary(self) -> str:
        """What has happened in all cases that have ended, an event per line."""
        return "".join(f"{self.totals[name]:12,} {name}\n" for name in sorted(self.totals))

    def _count(self, seed: int, events: dict[str, int], report: str | None) -> None:
        self.ended.add(seed)
        self.totals.update(events)
        self.num_failed += report is not None

    def _write(self, line: dict[str, Any], mode: str) -> None:
        if self._path is not None:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def progress(taken: float, num_ended: int, num_here: int, num_cases: int, num_failed: int) -> str:
    """A line about a run: how far it is, how fast, and how long it will take."""
    rate = num_here * SIZE / max(taken, 1e-9)
    left = round((num_cases - num_ended) * SIZE / max(rate, 1e-9))
    return (
        f"{taken:6.0f} s: {num_ended} of {num_cases} cases, {num_failed} failed, {rate:.0f} requests/s, "
        f"{left // 3600} h {left % 3600 // 60:02} min left"
    )


def run_many(journal: Journal, jobs: int) -> int:
    """Run cases until all requests were sent; returns how many failed."""
    seeds = journal.seeds
    todo = [seed for seed in seeds if seed not in journal.ended]
    print(f"seeds {seeds[0]} to {seeds[-1]}, {SIZE} requests each, {jobs} processes", flush=True)
    if journal.ended:
        print(f"going on after {len(journal.ended)} cases, {journal.num_failed} of them failed", flush=True)
    started, told_at = time.monotonic(), 0.0
    # Ctrl-C is for this process
    ignore: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=200, **ignore) as pool:
        for number, (seed, events, report) in enumerate(pool.imap_unordered(run_seed, todo), start=1):
            journal.add(seed, events, report)
            if report is not None:
                print(report, flush=True)
            if time.monotonic() - told_at > 30 or number == len(todo):
                told_at = time.monotonic()
                counts = len(journal.ended), number, len(seeds), journal.num_failed
                print(progress(told_at - started, *counts), flush=True)
    return journal.num_failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run many cases, or one again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first-seed", type=int, help="default: from the clock, so that nights differ")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="note what has ended, or go on from there"
    )
    parser.add_argument("--seed", type=int, help="run this case alone")
    parser.add_argument("--size", type=int, default=SIZE, help="requests of that case")
    parser.add_argument("--without", default="", help=f"of that case, with commas: {', '.join(FEATURES)}")
    args = parser.parse_args(argv)
    without = frozenset(filter(None, args.without.split(",")))
    if unknown := without - set(FEATURES):
        parser.error(f"--without {','.join(sorted(unknown))}: not among {', '.join(FEATURES)}")
    if args.seed is None:
        first_seed = int(time.time()) if args.first_seed is None else args.first_seed
        journal = Journal(args.journal, args.requests, first_seed)
        try:
            return 1 if run_many(journal, args.jobs) else 0
        except KeyboardInterrupt:
            print(f"\ninterrupted after {len(journal.ended)} of {len(journal.seeds)} cases; {journal.resume}")
            return 130
        finally:
            print(journal.summary(), end="")
    case = Case(args.seed, args.size, without)
    fault = fault_of(case)
    print(f"{case.command}: {fault or 'passed'}")
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
