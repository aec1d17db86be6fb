"""The other ranks of a model, as processes of the one that has the engine.

    engine process, rank 0 ──┬── standard input of each      its launch settings; it exits when this closes
                             ├── shared memory, no name      messages, and the collectives of every step
                             └── a pipe from each            its startup progress or error, and its exit

A thread for each process starts it and waits for its exit. A rank that dies, is stopped, or does not answer
while the others wait for it ends the group: all waits in shared memory end, the other processes are killed,
and the step in flight raises `RanksEnded`. Nothing outlives this process: the operating system kills ranks
whose parent is gone, and the memory has no name.

Ranks on other machines are processes of a node there (rank_node.py), which mirrors the shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import torch

from infer.client.messages import DONE, Failure, NodeReport, RankLaunch, to_error, to_failure
from infer.client.rank_greeting import facts_of, gather_nodes, listen, read_token
from infer.client.spawn import give_orders, is_stopped, spawn, spell_end, write_orders
from infer.client.supervisor import log_level
from infer.config.settings import EngineConfig, LoadConfig
from infer.engine import machine
from infer.engine.rank_worker import RankLink, RankMirror, make_memory, open_link
from infer.errors import InferError, RanksEnded
from infer.loader.load import Communicator, Pipe, RankLine

logger = logging.getLogger(__name__)

RANK_MODULE = "infer.client.rank_process"
LOOK_S: Final = 0.25  # seconds between two checks of ranks that others wait for
STOPPED_S: Final = 1.0  # seconds after which a process that a signal has stopped counts as gone
NODE_SILENT_S: Final = 5.0  # seconds without a sign of life after which another node counts as gone
HEAD_SILENT_S: Final = 30.0  # the same for node 0, whose engine may block other threads
SILENT_S: Final = 60.0  # seconds without a collective after which the rank that others wait for is gone


@dataclass(slots=True, eq=False)
class _Group:
    """The threads' shared state; nothing here refers to the `RankProcesses` itself."""

    abort: Callable[[], None]  # ends all waits in shared memory
    lines: Callable[[], Sequence[RankLine]]  # returns the state of each rank; none: node 0 watches them
    on_idle_loss: Callable[[], None] = lambda: None  # called when a rank is lost while no step waits
    changed: threading.Condition = field(default_factory=threading.Condition)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    num_done: dict[int, int] = field(default_factory=dict)  # finished parts of startup, by rank
    lost: str | None = None  # why the group has ended
    error: InferError | None = None  # the error of a rank that failed to start
    mirror: RankMirror | None = None  # the other nodes
    is_closing: bool = False
    is_waited_for: bool = False  # True: rank 0 waits for the others
    expected_since: float | None = None  # when rank 0 began to wait for a GPU step; None: it does not

    def lose(self, reason: str, error: InferError | None = None) -> None:
        """End the group; the first reason given is reported."""
        with self.changed:
            if self.lost is not None:
                return
            self.lost, self.error, is_idle = reason, error, not self.is_waited_for
            if not self.is_closing:
                logger.error("ranks ended reason=%r", reason)
            self.abort()
            self.kill()
            if self.mirror is not None:
                failure = None if error is None else to_failure(error)
                self.mirror.report_end(msgspec.json.encode(NodeReport(reason=reason, failure=failure)))
                self.mirror.close()
            self.changed.notify_all()
        if is_idle and not self.is_closing:
            self.on_idle_loss()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


class RankProcesses:
    """The processes of ranks 1 and up; a `RankGroup` (kernels/runtime/communicator.py)."""

    def __init__(self, config: EngineConfig, num_threads: int, device: torch.device) -> None:
        """Start them; `device` is rank 0's."""
        load, size = config.load, config.load.num_ranks
        gate = _Gate(config, device) if load.nnodes > 1 else None
        handle = make_memory(size)
        try:
            self._link = open_link(handle, 0, size, config.load.pipeline_parallel_size)
            self.communicator: Communicator = self._link.communicator
            self.pipe: Pipe | None = self._link.pipe
            self.lines = self._link.lines
            self._group = group = _Group(self._link.communicator.abort, self.lines)
            self._num_parts = 0  # parts of startup that were requested
            self._num_open = 0  # messages that no `check` or `wait` has acknowledged
            group.is_waited_for = True
            if gate is not None:
                group.num_done.update(dict.fromkeys(range(load.num_local_ranks, size), 0))
                gate.open(group, self._link)
            self._threads = _start_ranks(group, config, load.ranks_of_nodes[0][1:], handle, num_threads)
        finally:
            os.close(handle)
        self._finalizer = weakref.finalize(self, _end, group, os.getpid())

    def send(self, kind: int, body: bytes | bytearray) -> None:
        """Send a message to all other ranks, which rank 0 then waits for until a `check` or a `wait`."""
        self._num_open += 1
        self._group.is_waited_for = True
        try:
            self._link.send(kind, body)
        except RanksEnded:
            self.check()
            raise

    def wait(self) -> None:
        """Wait until all ranks have finished one more part of startup; raises the error of a failed rank."""
        group, self._num_parts = self._group, self._num_parts + 1
        group.is_waited_for = True
        with group.changed:
            while group.lost is None and min(group.num_done.values()) < self._num_parts:
                group.changed.wait()
        self._num_open = 0
        if group.error is not None:
            raise group.error
        self.check()

    def expect(self) -> None:
        """Start a timeout: unless `check` follows within SILENT_S, the GPU step is lost and the group ends.

        Our own collectives have such a limit (exchange.cu), NCCL's have none.
        """
        self._group.expected_since = time.monotonic()

    def check(self, *, is_idle: bool | None = None) -> None:
        """Raise `RanksEnded` if a rank is gone.

        With `is_idle`, rank 0 then waits for no rank; by default, if every message has been acknowledged.
        """
        self._group.expected_since = None
        if self._link.communicator.is_aborted:
            with self._group.changed:  # wait for the reason from the thread that aborted
                raise RanksEnded(self._group.lost or "a rank of the model is gone, or did not come to a sum")
        self._num_open = int(not is_idle) if is_idle is not None else max(self._num_open - 1, 0)
        self._group.is_waited_for = self._num_open > 0

    def watch(self, on_idle_loss: Callable[[], None]) -> None:
        """Call this from a thread when a rank is lost while no step waits; `check` raises the reason."""
        with self._group.changed:
            self._group.on_idle_loss, is_lost = on_idle_loss, self._group.lost is not None
        if is_lost:
            on_idle_loss()

    def close(self, reason: str = "the engine was closed") -> None:
        """End all other ranks and wait for their exit."""
        self._group.is_closing = True
        self._group.lose(reason)
        for thread in self._threads:
            thread.join()


def _end(group: _Group, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has this object, but not the processes
        group.is_closing = True
        group.lose("the engine is gone")


class _Gate:
    """Admits the other nodes to a group; the constructor rejects settings that cannot work."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._load, self._token, self._device = config.load, read_token(config.load), device
        self._facts = facts_of(config, device)

    def open(self, group: _Group, link: RankLink) -> None:
        """Admit nodes, in a thread."""
        self._server = listen(self._load)
        group.mirror = _mirror(group, link, self._load, self._device)
        gather = partial(self._gather, group, group.mirror)
        threading.Thread(target=gather, name="infer-gate", daemon=True).start()

    def _gather(self, group: _Group, mirror: RankMirror) -> None:
        add = partial(mirror.add, silent_s=NODE_SILENT_S)
        if gather_nodes(
            self._server, self._load, self._token, self._facts, add, lambda: group.lost is not None
        ):
            logger.info("all nodes have joined nodes=%d", self._load.nnodes)
            mirror.start()


def _mirror(group: _Group, link: RankLink, load: LoadConfig, device: torch.device) -> RankMirror:
    nodes = load.ranks_of_nodes
    return RankMirror(
        link, nodes, load.node_rank,
        meets_all=machine.has_gpu_kernels(device),  # GPU collectives do not use this memory
        on_report=partial(_take_report, group, nodes), on_loss=group.lose,
    )  # fmt: skip


def _take_report(group: _Group, nodes: Sequence[range], node: int, body: bytes) -> None:
    """Handle the report of another node."""
    try:
        report = msgspec.json.decode(body, type=NodeReport)
    except msgspec.MsgspecError as error:
        group.lose(f"node {node} has sent a report that cannot be read: {error}")
        return
    if report.reason is not None:
        group.is_closing = group.is_closing or node == 0  # nodes only follow node 0
        group.lose(report.reason, None if report.failure is None else to_error(report.failure))
    elif report.rank in nodes[node] and report.rank in group.num_done:
        with group.changed:
            group.num_done[report.rank] += 1
            group.changed.notify_all()


def serve_ranks(
    config: EngineConfig, connection: socket.socket, num_threads: int, device: torch.device
) -> str:
    """Run this node's ranks for a group; node 0 is at the other end. Returns why the group ended."""
    load, size = config.load, config.load.num_ranks
    own = load.ranks_of_nodes[load.node_rank]
    handle = make_memory(size)
    try:
        link = open_link(handle, own[0], size, load.pipeline_parallel_size)
        group = _Group(link.communicator.abort, list)
        group.is_waited_for = True
        mirror = group.mirror = _mirror(group, link, load, device)
        mirror.add(0, connection, HEAD_SILENT_S)
        mirror.start()
        threads = _start_ranks(group, config, own, handle, num_threads)
    finally:
        os.close(handle)
    num_told = dict.fromkeys(own, 0)
    try:
        while True:
            with group.changed:
                while group.lost is None and group.num_done == num_told:
                    group.changed.wait()
                if group.lost is not None:
                    return group.lost
                num_done = dict(group.num_done)
            for rank in own:  # the lock is released: a report may wait for the network
                for _ in range(num_done[rank] - num_told[rank]):
                    mirror.report(msgspec.json.encode(NodeReport(rank=rank)))
            num_told = num_done
    finally:
        group.lose("the node was ended")
        for thread in threads:
            thread.join()


def _start_ranks(
    group: _Group, config: EngineConfig, ranks: range, memory: int, num_threads: int
) -> list[threading.Thread]:
    """Start the processes of ranks, a thread for each, and a thread that watches them."""
    level, threads = log_level(), list[threading.Thread]()
    for rank in ranks:
        launch = RankLaunch(
            config=config, rank=rank, memory=memory, report=-1, num_threads=num_threads, log_level=level
        )
        started = threading.Event()
        thread = threading.Thread(
            target=_run_process, args=(group, launch, started), name=f"infer-rank-{rank}", daemon=True
        )
        thread.start()
        started.wait()
        threads.append(thread)
    threading.Thread(target=_watch, args=(group,), name="infer-rank-watch", daemon=True).start()
    return threads


def _run_process(group: _Group, launch: RankLaunch, started: threading.Event) -> None:
    """Start a process, handle its reports, and wait for its exit.

    It runs in a thread that lives as long as the process: to the kernel, this thread is its parent.
    """
    rank, failure = launch.rank, None
    reading, writing = os.pipe()
    try:
        with group.changed:
            group.num_done[rank] = 0
            if group.lost is not None:
                raise RanksEnded(group.lost)
            orders = write_orders(msgspec.structs.replace(launch, report=writing))
            process = spawn(RANK_MODULE, pass_fds=(launch.memory, writing), is_piped=False, leads=False)
            group.processes[rank] = process
    except BaseException as error:
        os.close(reading)
        group.lose(f"rank {rank} could not be started: {error}")
        return
    finally:
        os.close(writing)
        started.set()
    give_orders(process, orders)
    with open(reading, "rb") as lines:
        for line in lines:
            if line.strip() != DONE:
                with contextlib.suppress(msgspec.DecodeError):  # killed while it wrote
                    failure = msgspec.json.decode(line, type=Failure)
                continue
            with group.changed:
                group.num_done[rank] += 1
                group.changed.notify_all()
    code = process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    if failure is not None:
        group.lose(f"rank {rank} failed: {failure.message}", to_error(failure))
    else:
        group.lose(f"rank {rank} ended with {spell_end(code)}")


def _watch(group: _Group) -> None:
    """Check the ranks that rank 0 waits for: one that is stopped or silent for too long ends the group."""
    stopped_since, seen, seen_at = dict[int, float](), tuple[int, ...](), time.monotonic()
    while group.lost is None:
        time.sleep(LOOK_S)
        now = time.monotonic()
        if not group.is_waited_for:
            stopped_since, seen_at = {}, now
            continue
        for rank, process in list(group.processes.items()):
            if not is_stopped(process.pid):
                stopped_since.pop(rank, None)
            elif now - stopped_since.setdefault(rank, now) >= STOPPED_S:
                group.lose(f"rank {rank} was stopped by a signal")
        since = group.expected_since
        if since is not None and now - since > SILENT_S:
            group.lose(f"a step of the ranks has not ended for {SILENT_S:.0f} s")
        lines = group.lines()
        found = tuple(line.progress for line in lines)
        if found != seen or not any(line.needs_others for line in lines):
            seen, seen_at = found, now
        elif now - seen_at > SILENT_S:
            silent = next((rank for rank, line in enumerate(lines) if not line.waiting), 0)
            group.lose(f"rank {silent} has not answered for {SILENT_S:.0f} s")
