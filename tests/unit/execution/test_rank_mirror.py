"""Memory of ranks on several nodes: what is written on one is found on the others, whole and in order."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from infer.errors import DeviceLost
from infer.execution import rank_mirror
from infer.execution.rank_mirror import RankMirror
from infer.execution.rank_ring import NUM_SLOTS, SLOT_BYTES, RankLink, linked_words
from infer.kernels.cpu.collectives import CAPACITY, PIPE_SLOTS
from infer.kernels.cpu.library import library
from tests.support.rank_nodes import Nodes, open_nodes, tcp_pair

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels")

Open = Callable[[int, int, int], Nodes]


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[Nodes] = []

    def make(size: int, num_stages: int, nnodes: int) -> Nodes:
        made.append(open_nodes(size, num_stages, nnodes))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


def together(links: list[RankLink], work: Callable[[int, RankLink], Any]) -> list[Any]:
    """What each rank makes of the same work, each in a thread."""
    found: list[Any] = [None] * len(links)

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, links[rank])
        except BaseException:
            for link in links:  # the others wait for it
                link.communicator.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@pytest.mark.parametrize(("size", "nnodes"), [(2, 2), (3, 3), (4, 2)])
def test_messages_reach_other_nodes_whole_and_in_order(size: int, nnodes: int, opened: Open) -> None:
    sizes = [0, 1, SLOT_BYTES, 5 * SLOT_BYTES + 7, *range(3 * NUM_SLOTS)]
    messages = [(kind % 7, bytes([kind % 251]) * size) for kind, size in enumerate(sizes)]

    def work(rank: int, link: RankLink) -> list[tuple[int, bytes]]:
        if rank == 0:
            for kind, body in messages:
                link.send(kind, body)
            return messages
        return [(kind, bytes(body)) for kind, body in (link.receive() for _ in messages)]

    assert together(opened(size, 1, nnodes).links, work) == [messages] * size


@pytest.mark.parametrize(("size", "nnodes"), [(2, 2), (3, 3), (4, 2)])
def test_sums_and_columns_have_the_same_bits_on_all_nodes(size: int, nnodes: int, opened: Open) -> None:
    lengths = [1, 7, 100, CAPACITY + 3]

    def work(rank: int, link: RankLink) -> list[torch.Tensor]:
        made = []
        for length in lengths * 3:
            draws = torch.Generator().manual_seed(rank)  # ranks are threads: one generator for each
            made.append(link.communicator.all_reduce(torch.randn(length, generator=draws)))
            made.append(link.communicator.all_gather(torch.randn(5, 32, generator=draws), 32 * size))
        return made

    first, *others = together(opened(size, 1, nnodes).links, work)
    shares = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    assert torch.allclose(first[4], torch.stack(shares).sum(0), atol=1e-5)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize(("size", "num_stages", "nnodes"), [(2, 2, 2), (3, 3, 3), (4, 2, 2), (4, 2, 4)])
def test_rows_pass_from_node_to_node(size: int, num_stages: int, nnodes: int, opened: Open) -> None:
    group, num_rows = size // num_stages, 4 * PIPE_SLOTS  # more than a stage may be ahead

    def work(rank: int, link: RankLink) -> torch.Tensor:
        last = torch.zeros(0)
        for number in range(num_rows):
            assert link.pipe is not None
            rows = torch.full((number % 3 + 1, 8), float(number))
            if rank // group < num_stages - 1:
                rows = link.pipe.take(number % 3 + 1, 8, torch.float32)
                assert float(rows[0, 0]) == number + num_stages - 1 - rank // group
            last = rows + 1
            if rank >= group:
                link.pipe.pass_on(last)
        return last

    last = together(opened(size, num_stages, nnodes).links, work)[0]
    assert float(last[0, 0]) == num_rows - 1 + num_stages


def test_ranks_of_all_stages_gather_bytes_on_several_nodes() -> None:
    """As those on GPUs do while they start."""
    nodes = open_nodes(4, 2, 2, meets_all=True)

    def work(rank: int, link: RankLink) -> list[bytes]:
        return link.communicator.everyone().gather_bytes(bytes([rank]) * 40)

    try:
        expected = [(bytes([rank]) * 40).ljust(64, b"\0") for rank in range(4)]
        assert together(nodes.links, work) == [expected] * 4
    finally:
        nodes.close()


def test_states_and_reports_reach_node_0(opened: Open) -> None:
    nodes = opened(2, 1, 2)
    nodes.mirrors[1].report(b"from 1")
    nodes.mirrors[0].report(b"from 0")
    until(lambda: len(nodes.reports) == 2)
    assert sorted(nodes.reports) == [(0, 1, b"from 1"), (1, 0, b"from 0")]

    def wait(rank: int, link: RankLink) -> None:
        if rank == 1:
            with pytest.raises(DeviceLost):
                link.receive()

    thread = threading.Thread(target=wait, args=(1, nodes.links[1]))
    thread.start()
    until(lambda: nodes.links[0].lines()[1].waiting == 2)
    nodes.close()
    thread.join()


def test_a_report_waits_until_the_connection_is_free(opened: Open) -> None:
    nodes = opened(2, 1, 2)
    turn = nodes.mirrors[1]._peers[0].turn
    with turn:  # as a long frame on a slow network
        thread = threading.Thread(target=nodes.mirrors[1].report, args=(b"done",))
        thread.start()
        thread.join(3 * rank_mirror.BEAT_S)
    until(lambda: nodes.reports)
    thread.join()
    assert nodes.reports == [(0, 1, b"done")]


def test_a_node_that_comes_after_the_end_is_sent_away(opened: Open) -> None:
    nodes = opened(2, 1, 2)
    here, there = tcp_pair()
    mirror = RankMirror(nodes.links[0], [range(1), range(1, 2)], 0, on_report=print, on_loss=print)
    mirror.close()
    mirror.add(1, here, 60.0)
    there.settimeout(30)
    assert there.recv(1) == b""
    there.close()


def test_an_error_of_our_own_ends_the_connection(opened: Open) -> None:
    nodes = opened(2, 1, 2)
    here, there = tcp_pair()
    losses: list[str] = []

    def fail(node: int, body: bytes) -> None:
        raise KeyError(node)

    mirror = RankMirror(nodes.links[0], [range(1), range(1, 2)], 0, on_report=fail, on_loss=losses.append)
    mirror.add(1, here, 60.0)
    there.sendall(struct.pack("<HII", 0xFFFE, 0, 1) + b"x")
    until(lambda: losses)
    assert losses == ["node 1 is gone: KeyError(1)"]
    mirror.close()
    there.close()


def test_the_end_of_a_node_is_told_to_the_others(opened: Open) -> None:
    nodes = opened(3, 1, 3)
    nodes.mirrors[2].close()
    until(lambda: nodes.losses)
    assert nodes.losses[0][0] == 0 and nodes.losses[0][1].startswith("node 2 is gone")
    with pytest.raises(DeviceLost):
        nodes.links[0].receive()  # waits end


def test_a_silent_node_counts_as_gone(opened: Open) -> None:
    nodes = opened(2, 1, 2)
    here, there = tcp_pair()
    losses: list[str] = []
    mirror = RankMirror(nodes.links[0], [range(1), range(1, 2)], 0, on_report=print, on_loss=losses.append)
    mirror.add(1, here, 0.5)
    until(lambda: losses)
    assert losses == ["node 1 has not answered"]
    mirror.close()
    there.close()


WORDS = linked_words(2, 1)  # rank 0's share, rank 1's share, messages, those taken by rank 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (struct.pack("<HII", 0, 1, 0), "word 0, which it may not"),  # it is rank 0's
        (struct.pack("<HII", 99, 1, 0), "word 99, which it may not"),
        (struct.pack("<HII", 1, 1, CAPACITY * 4 + 1), "word 1, which it may not"),
        (struct.pack("<HII", 1, 7, 0), "number 7 of word 1 after 0"),
        (struct.pack("<HII", 3, 7, 1), "1 bytes for word 3, which it may not"),
        (struct.pack("<HII", 0xFFFF, 0, 5), "5 bytes of news"),
        (struct.pack("<HII", 0xFFFE, 0, rank_mirror.REPORT_BYTES + 1), "bytes of news"),
    ],
)
def test_frames_that_break_the_rules_end_the_connection(frame: bytes, reason: str, opened: Open) -> None:
    assert [word.writer for word in WORDS] == [0, 1, 0, 1]
    nodes = opened(2, 1, 2)
    here, there = tcp_pair()
    losses: list[str] = []
    mirror = RankMirror(nodes.links[0], [range(1), range(1, 2)], 0, on_report=print, on_loss=losses.append)
    mirror.add(1, here, 60.0)
    there.sendall(frame)
    until(lambda: losses)
    assert reason in losses[0]
    mirror.close()
    there.close()
