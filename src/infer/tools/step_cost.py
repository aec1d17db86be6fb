"""The time of a step as a formula, which a simulation uses in place of a model.

    seconds = base + per_token * tokens + per_kv_token * KV tokens read + per_block * blocks moved

`base` is the fixed cost of a step (reading all weights once), `per_token` the cost of each computed token,
and `per_kv_token` the cost of attention: each chunk reads the keys and values of its sequence up to its end.
The formula is crude, but sufficient: it ranks policies, it does not predict milliseconds.

N ranks that share a model compute faster, but spend time on communication (`Ranks`). Each rank reads 1/N
of the weights and computes 1/N of a step; keys and values are divided by heads, so by N or by the
number of heads, whichever is less. Twice in each layer the ranks add up their partial sums, a row of numbers
for each token:

    bytes       = tokens * hidden size * bytes of a number
    one shot    = latency + (N - 1) * bytes / bandwidth              every rank reads all others' sums
    ring        = 2 (N - 1) * (latency + bytes / N / bandwidth)      reduce-scatter, then all-gather
    all ranks   = 2 * layers * the smaller of the two

The defaults were fitted to recorded runs of the default model in int4 (docs/features/simulator.md says how).
The cost on another machine is fitted to a record made there, which has the plan and time of every step.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from infer.errors import ConfigError
from infer.tools.record import Masked, Ordered, Ran, Record
from infer.tools.typed_json import read_json

MIN_STEPS = 20  # fewest steps of a record for fitting four numbers


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds that each part of a step takes."""

    base: Seconds = 0.0022
    per_token: Seconds = 0.00089
    per_kv_token: Seconds = 0.0000035
    per_block: Seconds = 0.00013

    def __post_init__(self) -> None:
        if self.base + self.per_token == 0:
            raise ValueError("a step must take time; base or per_token must be more than 0")

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_transfers: int) -> float:
        """Return the seconds of a step with these computed tokens, KV tokens read, and blocks moved."""
        return (
            self.base
            + self.per_token * num_tokens
            + self.per_kv_token * num_kv_tokens
            + self.per_block * num_transfers
        )


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that share a model, the links between them, and the shape of the model."""

    size: int
    bandwidth: float  # bytes per second that a rank reads from others
    latency: float  # seconds of one message
    num_layers: int
    num_kv_heads: int
    row_bytes: int  # bytes of a token between two layers

    def divide(self, cost: StepCost) -> StepCost:
        """Return the cost of a step on each rank, without communication."""
        heads = min(self.size, self.num_kv_heads)
        return StepCost(
            base=cost.base / self.size,
            per_token=cost.per_token / self.size,
            per_kv_token=cost.per_kv_token / heads,
            per_block=cost.per_block / heads,
        )

    def communication_s(self, num_tokens: int) -> float:
        """Return the seconds that the ranks spend on communication in a step."""
        num_bytes, others = num_tokens * self.row_bytes, self.size - 1
        one_shot = self.latency + others * num_bytes / self.bandwidth
        ring = 2 * others * (self.latency + num_bytes / self.size / self.bandwidth)
        return 2 * self.num_layers * min(one_shot, ring) if others else 0.0


def read_cost(text: str) -> StepCost:
    """Return the cost from JSON or a JSON file, or fit it to the timings of a record."""
    if not text.lstrip().startswith("{"):
        path = Path(text)
        try:
            with open(path, encoding="utf-8") as handle:
                first_line = handle.readline(1 << 16)
                if '"header"' in first_line:
                    return fit_cost(Record(path))
                text = first_line + handle.read(1 << 16)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--cost is neither JSON nor a readable file: {error}") from None
    return read_json(text.encode(), msgspec.json.Decoder(StepCost), "the cost")


def fit_cost(record: Record) -> StepCost:
    """Return the cost that fits a recorded run best: least squares of relative errors, no negative terms.

    A step's time starts at the event before it, so time without requests does not count.
    """
    import numpy as np

    rows, seconds = [], []
    events = (event for event in record.events() if not isinstance(event, Ordered | Masked))
    for before, event in pairwise(events):
        if isinstance(event, Ran) and event.seconds > before.seconds:
            plan = event.plan
            rows.append(
                [1, plan.chunks.num_tokens, sum(chunk.stop for chunk in plan.chunks), len(plan.transfers)]
            )
            seconds.append(event.seconds - before.seconds)
    if len(rows) < MIN_STEPS:
        raise ConfigError(f"{record.path} has {len(rows)} timed steps; fitting a cost needs {MIN_STEPS}")
    weights = 1 / np.array(seconds)
    matrix = np.array(rows, dtype=float) * weights[:, None]
    kept = [0, 1, 2, 3]
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(kept[int(found.argmin())])  # a term that would make a step faster is noise
    names = StepCost.__struct_fields__
    fitted = {names[column]: float(value) for column, value in zip(kept, found, strict=True)}
    return StepCost(**dict.fromkeys(names, 0.0) | fitted)
