"""Every toggle of the engine against every other: a pairwise covering array.

All combinations of all settings are millions of runs. Most faults need only two settings to meet, so
it is enough that each *pair* of settings occurs in some row:

    backend    policy    chunked          the pair (paged, no) and the pair (fcfs, no) share row 2;
    paged      fcfs      yes              rows are added until no pair that may occur is missing
    paged      fcfs      no

Settings that EngineConfig refuses together never share a row. `python -m tests.support.toggles` writes
docs/toggle-matrix.md; a test fails when that page is stale.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.errors import ConfigError

CONTEXT_LEN = 60  # of the models and oracles that run the rows
PAGE = Path(__file__).resolve().parents[2] / "docs" / "toggle-matrix.md"

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

TOGGLES: dict[str, tuple[Any, ...]] = {
    "kv_cache_backend": ("paged", "contiguous", "naive"),
    "block_size": (1, 2, 4, 16),
    "cache_tokens": (64, 128, 512),  # num_blocks is this many tokens
    "swap_blocks": (0, 6, 64),
    "use_prefix_caching": (True, False),
    "attention_backend": ("sdpa", "naive"),
    "batching_mode": ("continuous", "static"),
    "scheduler_policy": ("fcfs", "prefill_first", "decode_round_robin", "priority", "deadline"),
    "max_batch_size": (1, 4, 8),
    "max_num_batched_tokens": (8, 64),
    "use_chunked_prefill": (True, False),
    "prefill_chunk_size": (1, 7, 512),
    "preemption": ("recompute", "swap", "auto"),
    "max_wait_steps": (3, 1000),
    "max_decode_gap": (1, 8),
}
# Only these can be refused because of each other; asking about few settings at a time keeps it fast.
CONSTRAINED = (
    "kv_cache_backend",
    "batching_mode",
    "swap_blocks",
    "preemption",
    "use_chunked_prefill",
    "max_num_batched_tokens",
    "max_batch_size",
)


def engine_knobs(row: Row) -> Row:
    """A row as knobs of EngineConfig."""
    knobs = dict(row)
    return knobs | {"num_blocks": knobs.pop("cache_tokens") // row["block_size"]}


def is_possible(row: Row) -> bool:
    """Whether a row with these settings exists that EngineConfig accepts."""
    return _is_accepted(tuple((name, row[name]) for name in CONSTRAINED if name in row))


@functools.cache
def _is_accepted(settings: tuple[tuple[str, Any], ...]) -> bool:
    harmless: Row = {"max_num_batched_tokens": 64, "max_batch_size": 1, "swap_blocks": 64}
    try:
        resolve_scheduler(EngineConfig.from_knobs(**(harmless | dict(settings))), CONTEXT_LEN)
    except ConfigError:
        return False
    return True


def all_pairs() -> Iterator[Pair]:
    """Every two settings of different toggles that may occur together."""
    for (first, its_values), (second, other_values) in itertools.combinations(TOGGLES.items(), 2):
        for a, b in itertools.product(its_values, other_values):
            if is_possible({first: a, second: b}):
                yield (first, a), (second, b)


def pairs_of(row: Row) -> set[Pair]:
    """The pairs a row covers."""
    return set(itertools.combinations(row.items(), 2))


@functools.cache
def pairwise_rows(candidates: int = 12, seed: int = 1) -> tuple[Row, ...]:
    """Rows until every pair is covered, each the best of some random tries that start from a missing pair."""
    rng = random.Random(seed)
    missing = dict.fromkeys(all_pairs())
    rows: list[Row] = []
    while missing:
        tries = [_try_row(next(iter(missing)), missing, rng) for _ in range(candidates)]
        best = max(tries, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        rows.append(best)
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return tuple(rows)


def _try_row(start: Pair, missing: dict[Pair, None], rng: random.Random) -> Row:
    """Set one toggle after the other to what covers most missing pairs with those already set."""
    row: Row = dict(start)
    for name in rng.sample(list(TOGGLES), len(TOGGLES)):
        if name not in row:
            allowed = [value for value in TOGGLES[name] if is_possible(row | {name: value})]
            gains = {v: sum(_pair(name, v, *other) in missing for other in row.items()) for v in allowed}
            best = max(gains.values())
            row[name] = rng.choice([value for value, gain in gains.items() if gain == best])
    return {name: row[name] for name in TOGGLES}


def _pair(name: str, value: Any, other: str, other_value: Any) -> Pair:
    order = list(TOGGLES)
    one, two = (name, value), (other, other_value)
    return (one, two) if order.index(name) < order.index(other) else (two, one)


def page() -> str:
    """The matrix as a page of the documentation."""
    rows, pairs = pairwise_rows(), list(all_pairs())
    num_all = functools.reduce(lambda product, values: product * len(values), TOGGLES.values(), 1)
    lines = [
        "# Toggle matrix",
        "",
        "*Written by `python -m tests.support.toggles`; do not edit.*",
        "",
        f"Flipping a toggle changes timing, never tokens. There are {num_all:,} combinations of the settings "
        f"below; these {len(rows)} rows contain each of the {len(pairs)} pairs of settings that may occur "
        "together. `tests/stress/test_token_oracle.py` sends random requests through every row and checks "
        "every token against the token oracle; `tests/integration/test_engine_toggles.py` does the same with "
        "tiny models of every family, in float32, against the simple loop. `cache_tokens` is "
        "`num_blocks * block_size`.",
        "",
        "| # | " + " | ".join(f"`{name}`" for name in TOGGLES) + " |",
        "|---" * (len(TOGGLES) + 1) + "|",
    ]
    for number, row in enumerate(rows, start=1):
        cells = ["yes" if value is True else "no" if value is False else str(value) for value in row.values()]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
