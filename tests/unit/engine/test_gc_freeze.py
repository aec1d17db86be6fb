"""What an engine is made of is out of the collector's sight while the engine is there, and no longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from infer.engine import gc_freeze
from infer.engine.gc_freeze import freeze_with, freezing
from tests.support.tiny import make_engine

pytestmark = pytest.mark.usefixtures("real_freezing")


def is_thawed() -> bool:
    """Nothing is frozen but Python's own immortal objects: from 3.12 on a few hundred."""
    return gc.get_freeze_count() < 1000


class Circle:
    """Refers to itself, as a device half does through its graphs."""

    def __init__(self) -> None:
        self.again = self.run

    def run(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.part = Circle()


def test_what_was_built_is_frozen_as_long_as_its_owner_lives() -> None:
    owner, before = Owner(), gc.get_freeze_count()
    freeze_with(owner)
    assert gc.get_freeze_count() > before
    part = weakref.ref(owner.part)

    del owner
    assert is_thawed()
    gc.collect()
    assert part() is None


@pytest.mark.parametrize("uses_cuda", [False, True])
def test_pinned_memory_goes_back_where_cuda_is_in_use(
    uses_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: uses_cuda)
    monkeypatch.setattr("torch._C._host_emptyCache", lambda: emptied.append(True), raising=False)
    gc_freeze.collect()
    assert emptied == [True] * uses_cuda


def test_an_engine_that_goes_takes_all_its_parts_along() -> None:
    engine = make_engine()
    freeze_with(engine)
    device: Any = engine._device
    parts = [weakref.ref(part) for part in (device, device.store, engine.scheduler)]

    del engine, device
    gc.collect()
    assert [part() for part in parts] == [None, None, None]
    assert is_thawed()


def test_many_engines_leave_nothing_behind() -> None:
    parts = []
    for _ in range(3):
        owner = Owner()
        freeze_with(owner)
        parts.append(weakref.ref(owner.part))
    assert [part() is None for part in parts[:-1]] == [True, True]  # the next build collected the last one


def test_one_freeze_comes_behind_the_last_piece_of_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, freezes, counts = [True, True, False, False, True, False], list[bool](), list[int]()
    monkeypatch.setattr(gc_freeze, "freeze", lambda: freezes.append(True))
    prepare = freezing(iter(pieces).__next__)
    for piece in pieces:
        assert prepare() is piece
        counts.append(len(freezes))
    assert counts == [0, 0, 1, 1, 1, 2]


def test_an_engine_on_a_cpu_is_not_frozen() -> None:
    before, engine = gc.get_freeze_count(), make_engine()
    while engine.prepare():
        pass
    assert gc.get_freeze_count() <= before
