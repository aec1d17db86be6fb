"""Memory that ranks share: messages arrive whole and in order, exchanges have the same bits everywhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer.engine.rank_worker import make_memory, open_link
from infer.errors import DeviceLost
from infer.execution.rank_ring import NUM_SLOTS, SLOT_BYTES, RankLink
from infer.kernels.cpu.collectives import CAPACITY, PIPE_SLOTS, column_share
from infer.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels")


def open_links(size: int, num_stages: int = 1) -> list[RankLink]:
    handle = make_memory(size)
    try:
        return [open_link(handle, rank, size, num_stages) for rank in range(size)]
    finally:
        os.close(handle)


def together(links: list[RankLink], work: Callable[[RankLink], Any]) -> list[Any]:
    """What each rank makes of the same work, each in a thread."""
    found: list[Any] = [None] * len(links)

    def run(rank: int) -> None:
        found[rank] = work(links[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_messages_arrive_whole_and_in_order() -> None:
    links = open_links(3)
    sizes = [0, 1, SLOT_BYTES, 5 * SLOT_BYTES + 7, *range(3 * NUM_SLOTS)]

    def work(link: RankLink) -> list[tuple[int, bytes]]:
        messages = [(kind % 7, bytes([kind % 251]) * size) for kind, size in enumerate(sizes)]
        if link is links[0]:
            for kind, body in messages:
                link.send(kind, body)
            return messages
        return [(kind, bytes(body)) for kind, body in (link.receive() for _ in messages)]

    sent, *received = together(links, work)
    assert received == [sent, sent]


def test_ranks_are_asked_for_room_once_in_a_round_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    links, asked, ask = open_links(3), list[int](), RankLink._wait_for_room

    def note(link: RankLink, number: int) -> int:
        asked.append(number)
        return ask(link, number)

    monkeypatch.setattr(RankLink, "_wait_for_room", note)
    for rank, link in enumerate(links):  # numbers wrap around in the middle
        link._number = (1 << 32) - 40
        link.library.word_set(link._word(rank), link._number)
    for turn in range(4 * NUM_SLOTS):
        links[0].send(1, bytes([turn]))
        for link in links[1:]:
            assert link.receive() == (1, bytearray([turn]))
    assert len(asked) == 4


@pytest.mark.parametrize("shape", [(1, 5), (7, 33), (3, CAPACITY // 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_have_the_bits_of_adding_in_the_order_of_ranks(size: int, shape: tuple[int, int]) -> None:
    shares = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    wanted = shares[0].clone()
    for share in shares[1:]:
        wanted += share

    def work(link: RankLink) -> list[torch.Tensor]:
        own = shares[link.communicator.rank]
        return [link.communicator.all_reduce(own.clone()) for _ in range(3)]

    for sums in together(open_links(size), work):
        assert all(torch.equal(each, wanted) for each in sums)


def test_sums_of_16_bits_are_rounded_once() -> None:
    share = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = (share.float() + share.float()).bfloat16()
    for total in together(open_links(2), lambda link: link.communicator.all_reduce(share.clone())):
        assert total.dtype is torch.bfloat16 and torch.equal(total, wanted)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 300), (5, 97), (300, 8000)])
def test_columns_of_all_ranks_are_side_by_side(num_rows: int, num_columns: int) -> None:
    whole, width = torch.randn(num_rows, num_columns), column_share(num_columns, 3)

    def work(link: RankLink) -> torch.Tensor:
        first = link.communicator.rank * width
        return link.communicator.all_gather(whole[:, first : first + width], num_columns)

    for gathered in together(open_links(3), work):
        assert torch.equal(gathered, whole)


@pytest.mark.parametrize(("width", "dtype"), [(48, torch.float32), (CAPACITY // 2 + 1, torch.bfloat16)])
def test_rows_go_from_stage_to_stage(width: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(num_rows, width).to(dtype) for num_rows in (1, 7, 2, *[1] * 2 * PIPE_SLOTS)]

    def work(link: RankLink) -> list[torch.Tensor]:
        pipe, found = link.pipe, []
        assert pipe is not None
        for part in parts:
            x = part if pipe.stage == 0 else pipe.take(len(part), width, dtype) + 1
            x = link.communicator.all_reduce(x.clone()) / 2
            found.append(x)
            if pipe.stage < pipe.num_stages - 1:
                pipe.pass_on(x)
            pipe.tick()
        return found

    links = open_links(6, num_stages=3)
    found = together(links, work)
    for stage, ranks in enumerate((range(4, 6), range(2, 4), range(2))):
        for rank in ranks:
            wanted = [part + stage for part in parts]
            assert all(torch.allclose(x, y, atol=0.1) for x, y in zip(found[rank], wanted, strict=True))
            assert all(map(torch.equal, found[rank], found[ranks[0]]))
    lines = links[0].lines()
    assert all(line.progress >= 2 * len(parts) and not line.waiting for line in lines)
    assert not any(line.idle_s for line in lines), "nobody waits for a message"


def test_a_lost_rank_ends_every_wait() -> None:
    links = open_links(3)  # the third never comes

    def work(link: RankLink) -> Any:
        if link is links[2]:
            link.communicator.abort()
        elif link is links[1]:
            with pytest.raises(DeviceLost):
                link.receive()
        else:
            link.communicator.all_reduce(torch.ones(2, 2))
        return link.communicator.is_aborted

    assert together(links, work) == [True, True, True]
