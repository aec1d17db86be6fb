"""The time of a step as a formula, which a simulation uses in place of a model.

    seconds = base + per_token * tokens + per_kv_token * KV tokens read + per_block * blocks moved

`base` is the cost of a step of one token (reading all weights once), `per_token` the cost of each further
token, `per_kv_token` the cost of looking back: each chunk reads the keys and values of its sequence up to
its end. The formula is crude and that is enough: it ranks policies, it does not predict milliseconds.

N ranks that share a model compute faster, but spend time on communication (`Ranks`). Each rank reads 1/N
of the weights and computes 1/N of a step; keys and values are divided by heads, so by N or by the
number of heads, whichever is less. Twice in each layer the ranks add up what they have, a row of numbers
for each token:

    bytes       = tokens * hidden size * bytes of a number
    one shot    = latency + (N - 1) * bytes / bandwidth              every rank reads what all others have
    ring        = 2 (N - 1) * (latency + bytes / N / bandwidth)      parts go round twice: to add, to share
    all ranks   = 2 * layers * the lesser of the two

The defaults were fitted to recorded runs of the default model in int4 (docs/features/simulator.md says how).
The cost of another machine is fitted to a record from it, which has the plan and time of every step.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from infer.errors import ConfigError
from infer.tools.record import Masked, Ordered, Ran, Record
from infer.tools.typed_json import read_json

MIN_STEPS = 20  # steps of a record that are needed to fit four numbers


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds that a step takes for each thing it does."""

    base: Seconds = 0.0022
    per_token: Seconds = 0.00089
    per_kv_token: Seconds = 0.0000035
    per_block: Seconds = 0.00013

    def __post_init__(self) -> None:
        if self.base + self.per_token == 0:
            raise ValueError("a step must take time; base or per_token must be more than 0")

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_transfers: int) -> float:
        """Return the seconds of a step: tokens it computes, tokens these attend to, blocks it moves."""
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
    latency: float  # seconds
    num_layers: int
    num_kv_heads: int
    row_bytes: int  # bytes of a token between two layers

    def divide(self, cost: StepCost) -> StepCost:
        """Return what a step costs each rank, without communication."""
        heads = min(self.size, self.num_kv_heads)
        return StepCost(
            base=cost.base / self.size,
            per_token=cost.per_token / self.size,
            per_kv_token=cost.per_kv_token / heads,
            per_block=cost.per_block / heads,
        )

    def communication_s(self, num_tokens: int) -> float:
        """Return the seconds in which the ranks of a step wait for each other's numbers."""
        num_bytes, others = num_tokens * self.row_bytes, self.size - 1
        one_shot = self.latency + others * num_bytes / self.bandwidth
        ring = 2 * others * (self.latency + num_bytes / self.size / self.bandwidth)
        return 2 * self.num_layers * min(one_shot, ring) if others else 0.0


def read_cost(text: str) -> StepCost:
    """Return the cost from JSON or a JSON file, or the one fitted to the timings of a record."""
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
    """Return the cost that explains a recorded run best: least squares of relative errors, none negative.

    A step begins when the event before it was written, so time without requests does not count.
    """
    import numpy as np

    rows, seconds = [], []
    events = (event for event in record.events() if not isinstance(event, Ordered | Masked))
    for before, event in pairwise(events):
        if isinstance(event, Ran) and event.seconds > before.seconds:
            plan = event.plan
            rows.append([1, plan.num_tokens, sum(chunk.stop for chunk in plan.chunks), len(plan.transfers)])
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
