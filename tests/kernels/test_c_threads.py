"""Who computes the chunks of an operation: workers while they help, the caller alone where they do not.

The chunks here are Python functions that note which thread runs them. What a worker does is made to happen
and waited for, never timed: a slow machine makes these tests longer and does not make them fail.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infer.kernels.cpu.library import Library
from tests.kernels.c_builds import c_library

CHUNK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
CHUNKS = 3
MAX_TRIES = 3000  # operations until a worker has been seen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binds threads to cores")


class Crew:
    """Runs operations of `CHUNKS` chunks and knows who did each."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def run(self, on_worker: Callable[[], None] = lambda: None) -> set[str]:
        """Run one operation; `on_worker` is called in a worker's chunk. Returns who took part."""
        me = threading.get_ident()
        done = [0] * CHUNKS
        seen: set[str] = set()

        def chunk(_: int, number: int) -> None:
            done[number] += 1
            is_worker = threading.get_ident() != me
            seen.add("worker" if is_worker else "caller")
            if is_worker:
                on_worker()
            else:
                time.sleep(0.001)  # long enough for a worker to come

        function = CHUNK(chunk)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self._library.run_one(address, CHUNKS, b"\0" * 8)
        assert done == [1] * CHUNKS, "every chunk is done once"
        return seen

    def run_until_helped(self, on_worker: Callable[[], None] = lambda: None) -> int:
        """Run operations until a worker takes part; returns how many did not."""
        for number in range(MAX_TRIES):
            if "worker" in self.run(on_worker):
                return number
        pytest.fail(f"no worker in {MAX_TRIES} operations")


@contextmanager
def crew(caller_core: int, worker_core: int) -> Iterator[Crew]:
    """A caller and a worker, each bound to a core."""
    library = c_library("native")
    library.set_threads(1)  # who was started before is bound to nothing
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {worker_core})  # this thread, and those it starts from now on
        library.set_threads(2)
        os.sched_setaffinity(0, {caller_core})
        yield Crew(library)
    finally:
        os.sched_setaffinity(0, cores)
        library.set_threads(1)


def test_a_worker_that_comes_late_is_left_out_for_a_while_and_then_tried_again() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    with crew(cores[0], cores[1]) as two:
        two.run_until_helped()
        for _ in range(20):  # if the caller's own chunks took as long as the worker's, it was not late
            two.run_until_helped(on_worker=lambda: time.sleep(0.03))
            if all(two.run() == {"caller"} for _ in range(8)):
                break
        else:
            pytest.fail("a worker that is always late is always waited for")
        two.run_until_helped()


def test_a_worker_on_the_caller_s_core_takes_nothing() -> None:
    core = min(os.sched_getaffinity(0))
    with crew(core, core) as two:
        two.run()  # the worker may have looked before the caller was on its core
        assert all(two.run() == {"caller"} for _ in range(40))


def test_a_worker_on_the_caller_s_core_moves_to_another() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    library, core = c_library("native"), min(cores)
    library.set_threads(1)
    others = set(os.listdir("/proc/self/task"))
    library.set_threads(2)
    (worker,) = map(int, set(os.listdir("/proc/self/task")) - others)
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(worker, {core})
        Crew(library).run_until_helped()
        assert os.sched_getaffinity(worker) == cores - {core}
    finally:
        os.sched_setaffinity(0, cores)
        library.set_threads(1)


def processor_ticks(threads: set[str]) -> int:
    """Hundredths of a second that these threads of this process have computed."""
    stats = (Path("/proc/self/task") / thread / "stat" for thread in threads)
    return sum(sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) for stat in stats)


def test_workers_without_work_use_no_processor_time() -> None:
    library = c_library("native")
    library.set_threads(1)
    others = set(os.listdir("/proc/self/task"))
    library.set_threads(4)
    try:
        workers = set(os.listdir("/proc/self/task")) - others
        assert len(workers) == 3
        Crew(library).run()
        time.sleep(0.1)  # workers look for work a little longer before they sleep
        before = processor_ticks(workers)
        time.sleep(0.5)  # three workers that went on looking would use up to two cores' worth of this
        assert processor_ticks(workers) - before < 10
    finally:
        library.set_threads(1)
