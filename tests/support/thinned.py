"""Products of parameters, of which a part runs always and the rest with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], keep: int) -> list[Any]:
    """All cases of a product; those whose indices do not add up to a multiple of `keep` are slow.

    A case that always runs can be found for any values of all axes but one, if that one has at least `keep`
    values. A single axis keeps every `keep`-th of its values.
    """
    cases = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=[pytest.mark.slow] if sum(index for index, _ in case) % keep else [],
        )
        for case in cases
    ]
