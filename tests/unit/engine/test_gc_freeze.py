"""What an engine is made of is out of the collector's sight while the engine is there, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from infer.engine.gc_freeze import freeze_with, freezing
from tests.support.tiny import make_engine


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as it was before: the collector would walk through all tests whenever an engine goes


def num_frozen() -> int:
    """Without Python's own immortal objects: from 3.12 on a collection puts a few hundred of them there."""
    count = gc.get_freeze_count()
    return count if count > 1000 else 0


class Circle:
    """Refers to itself, as a device half does through its graphs."""

    def __init__(self) -> None:
        self.again = self.run

    def run(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.part = Circle()


def test_what_was_built_is_frozen_as_long_as_its_owner_lives() -> None:
    owner = Owner()
    freeze_with(owner)
    assert num_frozen() > 0
    part = weakref.ref(owner.part)

    del owner
    assert num_frozen() == 0
    gc.collect()
    assert part() is None


def test_an_engine_that_goes_takes_all_its_parts_along() -> None:
    engine = make_engine()
    freeze_with(engine)
    device: Any = engine._device
    parts = [weakref.ref(part) for part in (device, device.store, engine.scheduler)]

    del engine, device
    gc.collect()
    assert [part() for part in parts] == [None, None, None]
    assert num_frozen() == 0


def test_many_engines_leave_nothing_behind() -> None:
    parts = []
    for _ in range(3):
        owner = Owner()
        freeze_with(owner)
        parts.append(weakref.ref(owner.part))
    assert [part() is None for part in parts[:-1]] == [True, True]  # the next build collected the last one


def test_one_freeze_comes_behind_the_last_piece_of_preparation() -> None:
    pieces = [True, True, False, False, True, False]
    prepare = freezing(iter(pieces).__next__)
    frozen = []
    for piece in pieces:
        assert prepare() is piece
        frozen.append(num_frozen() > 0)
        gc.unfreeze()
    assert frozen == [False, False, True, False, False, True]


def test_an_engine_on_a_cpu_is_not_frozen() -> None:
    engine = make_engine()
    while engine.prepare():
        pass
    assert num_frozen() == 0
