"""Requests whose constraint is being compiled: beside the scheduler's queue, counted as waiting.

    add ──► a thread compiles ──► `wake`, and the next step takes it into the queue, or refuses it

A step is a moment of the engine's clock, so a request that was compiled meanwhile counts as added then: that
is what a record has, and a replay, which compiles while it adds, does the same things in the same steps.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Event, Lock
from time import perf_counter
from typing import NamedTuple

from infer.engine.stats import GRAMMAR_SECONDS, Histogram
from infer.errors import RequestError
from infer.sampling.structured import Structured
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.sequence import SequenceGroup
from infer.structured.compiler import Compiler, Grammar, deep_stacks

logger = logging.getLogger(__name__)

NUM_THREADS = 2


class _Waiting(NamedTuple):
    """An admitted request, and its prompt's ids."""

    group: SequenceGroup
    tokens: array[int]
    is_aborted: Event  # seen by the thread that would compile


class CompilingRequests:
    """The requests that wait for their grammar. One engine thread owns it; compilers only call back."""

    def __init__(self, compiler: Compiler) -> None:
        self.seconds, self.num_failures = Histogram(GRAMMAR_SECONDS), 0
        self._compiler = compiler
        self._num_unfinished = 0  # jobs
        self._counting = Lock()  # of the counts above
        self._threads: ThreadPoolExecutor | None = None
        self._wake: Callable[[], None] | None = None  # called in a compiler's thread; None: compile at once
        self._waiting: dict[str, _Waiting] = {}  # by request id
        self._done: deque[tuple[SequenceGroup, Future[Grammar]]] = deque()  # which compilers append to

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_jobs(self) -> int:
        """Requests that wait, or jobs that no thread has got rid of yet, whichever are more.

        The job of an aborted request stays in the threads' queue until its turn comes.
        """
        return max(len(self._waiting), self._num_unfinished)

    @property
    def has_done(self) -> bool:
        """Whether there is a request to `take`."""
        return bool(self._done)

    def compile_aside(self, wake: Callable[[], None]) -> None:
        """Let no caller wait from now on; `wake` is called in a compiler's thread."""
        self._wake = wake

    def begin(self, structured: Structured, group: SequenceGroup, tokens: array[int]) -> Grammar | None:
        """The grammar of a request, or None: it waits, and is taken later."""
        is_aborted, wake = Event(), self._wake
        result = self._submit(structured, is_aborted)
        if wake is None:
            return result.result()
        group.added_at = perf_counter()
        self._waiting[group.request.request_id] = _Waiting(group, tokens, is_aborted)

        def done(result: Future[Grammar]) -> None:
            if not is_aborted.is_set():
                self._done.append((group, result))
                wake()

        result.add_done_callback(done)
        return None

    def _submit(self, structured: Structured, is_aborted: Event) -> Future[Grammar]:
        """Begin to compile in a thread: also where the caller waits for it, whose stack may be small."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="infer-grammar")
        with self._counting:
            self._num_unfinished += 1
        with deep_stacks():
            return self._threads.submit(self._compile, structured, is_aborted)  # may start a thread

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
                    self.seconds.observe(perf_counter() - begun)

    def abort(self, request_id: str) -> list[StepOutput]:
        """Forget a request that waits; its last outputs. A thread that has not begun with it never does."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return []
        waiting.is_aborted.set()
        return _last_outputs(waiting.group.request, "abort")

    def take(self) -> Iterator[tuple[SequenceGroup, array[int], Grammar | list[StepOutput]]]:
        """The requests that need not wait any more: each with its grammar, or with its last outputs."""
        while self._done:
            group, result = self._done.popleft()
            request_id = group.request.request_id
            waiting = self._waiting.get(request_id)
            if waiting is None or waiting.group is not group:  # aborted; the id may be another's
                continue
            tokens = self._waiting.pop(request_id).tokens
            error = result.exception()
            if error is None:
                yield group, tokens, result.result()
                continue
            if not isinstance(error, RequestError):
                logger.error("constraint not compiled request_id=%s", request_id, exc_info=error)
                error = RequestError("the constraint could not be compiled")
            yield group, tokens, _last_outputs(group.request, "error", error)


def _last_outputs(request: Request, reason: str, error: RequestError | None = None) -> list[StepOutput]:
    """One for each sequence that the client waits for."""
    said = None if error is None else str(error)
    param = None if error is None else error.param or "structured"
    return [
        StepOutput(request.request_id, index, (), finish_reason=reason, error=said, param=param)
        for index in range(request.params.num_sequences)
    ]
