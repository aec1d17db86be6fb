"""Copies to and from a GPU where the driver has no memory left to pin a block of the host's.

The GPU is played by the CPU: what is pinned, and what a failure to pin leads to, is decided on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from infer.execution.gpu import sending

NO_MEMORY = torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ...")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
CPU = torch.device("cpu")


@pytest.fixture(params=[NO_MEMORY, LOST], ids=["no memory", "lost"])
def error(request: pytest.FixtureRequest) -> Iterator[torch.AcceleratorError]:
    """The reason for which nothing can be pinned."""
    empty = torch.empty

    def refuse(*shape: Any, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        if pin_memory:
            raise request.param
        made: torch.Tensor = empty(*shape, **others)
        return made

    with (
        mock.patch.object(sending, "is_gpu", lambda device: True),
        mock.patch.object(torch.Tensor, "pin_memory", side_effect=request.param),
        mock.patch.object(torch, "empty", refuse),
    ):
        yield request.param


def test_without_memory_to_pin_the_same_numbers_arrive(error: torch.AcceleratorError) -> None:
    values, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    if error is LOST:
        for copy in (lambda: sending.send(values, CPU), lambda: sending.send_into(target, values)):
            with pytest.raises(torch.AcceleratorError, match="illegal"):
                copy()
        with pytest.raises(torch.AcceleratorError, match="illegal"):
            sending.fetch(values)
        return
    assert sending.send(values, CPU).tolist() == [0, 1, 2, 3, 4]
    sending.send_into(target, values)
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert sending.fetch(values).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("most", [0, 5, 1000])
def test_a_reserve_takes_blocks_until_there_is_no_memory_and_holds_them_until_then(most: int) -> None:
    class Block:
        pass

    taken, held = list[int](), weakref.WeakSet[Block]()

    def pin(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Block:
        assert pin_memory and len(held) == len(taken), "a block that is given back is given out again"
        if len(taken) == most:
            raise torch.AcceleratorError(str(NO_MEMORY))
        taken.append(size)
        held.add(block := Block())
        return block

    with mock.patch.object(torch, "empty", pin):
        sending.reserve_pinned()
    assert taken == list(sending.RESERVED_SIZES * sending.NUM_RESERVED)[:most]
    assert not held, "the allocator has them"


def test_a_lost_device_ends_the_reserve() -> None:
    with (
        mock.patch.object(torch, "empty", side_effect=LOST),
        pytest.raises(torch.AcceleratorError, match="illegal"),
    ):
        sending.reserve_pinned()
