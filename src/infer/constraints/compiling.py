"""Requests whose constraint is being compiled: they count as waiting, but are not in the scheduler's queue.

    add ──► a thread compiles ──► `wake`, and the next step puts the request into the queue, or rejects it

Steps are the engine's clock, so a request counts as added in the step that puts it into the queue. A record
has this step, so a replay, which compiles synchronously, does the same in the same steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Event, Lock
from time import perf_counter
from typing import Generic, TypeVar

from infer.constraints.compiler import Compiler, Grammar, deep_stacks
from infer.constraints.description import Structured
from infer.errors import RequestError

logger = logging.getLogger(__name__)

NUM_THREADS = 2
T = TypeVar("T")  # an admitted request


class CompilingRequests(Generic[T]):
    """The requests that wait for their grammar. The engine's thread owns it; compilers only call back."""

    def __init__(self, compiler: Compiler, observe: Callable[[float], None]) -> None:
        self.num_failures = 0
        self._compiler, self._observe = compiler, observe  # `observe` gets the seconds of each compilation
        self._num_unfinished = 0  # jobs that are queued or running
        self._counting = Lock()  # held while the counts above change
        self._threads: ThreadPoolExecutor | None = None
        self.wake: Callable[[], None] | None = None  # called in a compiler's thread; None: compile at once
        self._waiting: dict[str, tuple[T, Event]] = {}  # requests by id; the event is set when one is aborted
        self._done: deque[tuple[str, Event, Future[Grammar]]] = deque()  # results, appended by compilers

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[T]:
        """The requests that wait, oldest first."""
        return iter([request for request, _ in self._waiting.values()])

    @property
    def num_jobs(self) -> int:
        """The number of waiting requests, or of unfinished jobs if there are more.

        The job of an aborted request stays in the threads' queue until a thread takes it.
        """
        return max(len(self._waiting), self._num_unfinished)

    @property
    def has_done(self) -> bool:
        """True if there is a request to `take`."""
        return bool(self._done)

    def begin(self, structured: Structured, request_id: str, request: T) -> Grammar | None:
        """Return the grammar of a request; None: it is being compiled, and `take` returns it later."""
        is_aborted, wake = Event(), self.wake
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="infer-grammar")
        with self._counting:
            self._num_unfinished += 1
        with deep_stacks():  # `submit` may start a thread; a caller that waits may itself have a small stack
            result = self._threads.submit(self._compile, structured, is_aborted)
        if wake is None:
            return result.result()
        self._waiting[request_id] = request, is_aborted

        def done(result: Future[Grammar]) -> None:
            if not is_aborted.is_set():
                self._done.append((request_id, is_aborted, result))
                wake()

        result.add_done_callback(done)
        return None

    def _compile(self, structured: Structured, is_aborted: Event) -> Grammar:
        begun, is_wanted, has_failed = perf_counter(), not is_aborted.is_set(), True
        try:
            if not is_wanted:
                raise CancelledError
            grammar = self._compiler.compile(structured)
            has_failed = False
            return grammar
        finally:
            with self._counting:
                self._num_unfinished -= 1
                if is_wanted:
                    self.num_failures += has_failed
                    self._observe(perf_counter() - begun)

    def abort(self, request_id: str) -> T | None:
        """Forget a waiting request and return it. A job that has not begun never compiles it."""
        request, is_aborted = self._waiting.pop(request_id, (None, Event()))
        is_aborted.set()
        return request

    def take(self) -> Iterator[tuple[T, Grammar | RequestError]]:
        """Yield the requests whose job is done, each with its grammar or its error."""
        while self._done:
            request_id, is_aborted, result = self._done.popleft()
            if is_aborted.is_set():
                continue
            request, _ = self._waiting.pop(request_id)
            error = result.exception()
            if error is not None and not isinstance(error, RequestError):
                logger.error("constraint not compiled request_id=%s", request_id, exc_info=error)
                error = RequestError("the constraint could not be compiled")
            yield request, error or result.result()
