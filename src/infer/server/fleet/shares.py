"""Choose a model for an alias of several models, by weight.

    chat = v1: 90, v2: 10     hash(chat, asker, v1) ──► arrival of v1, of rate 90 ─┐
                              hash(chat, asker, v2) ──► arrival of v2, of rate 10 ─┴─► the earliest

Every model has an arrival time, derived from a hash of the asker: exponentially distributed, with the weight
as its rate. The earliest model wins, so each wins in proportion to its weight. An asker gets the same model
in every API process and after a restart. If weights change, or a model is added or removed, as few askers as
possible change their model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from infer.config.server import ModelShares

_DIGEST_BYTES = 8


def choose_model(weights: Mapping[str, float], alias: str, asker: str) -> str:
    """Return the name of the model that an asker gets for an alias."""

    def arrival(name: str) -> float:
        text = "\0".join((alias, asker, name)).encode()
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        share = (int.from_bytes(digest, "big") + 0.5) / 256**_DIGEST_BYTES  # a number in (0, 1)
        return -math.log(share) / weights[name]

    return min(weights, key=arrival)


def by_weight(weights: ModelShares) -> list[str]:
    """Return the names of the models, largest weights first."""
    return sorted(weights, key=lambda name: -weights[name])
