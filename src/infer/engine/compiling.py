"""Requests whose constraint is being compiled: beside the scheduler's queue, counted as waiting.

    add ──► a thread compiles ──► `wake`, and the next step takes it into the queue, or refuses it

A step is a moment of the engine's clock, so a request that was compiled meanwhile counts as added then: that
is what a record has, and a replay, which compiles while it adds, does the same things in the same steps.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, stack_size
from time import perf_counter
from typing import TypeAlias

from infer.engine.stats import GRAMMAR_SECONDS, Histogram
from infer.errors import RequestError
from infer.log import get_logger
from infer.sampling.structured import Structured
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.sequence import SequenceGroup
from infer.structured.compiler import Compiler, Grammar

logger = get_logger(__name__)

NUM_THREADS = 2
STACK_BYTES = 256 << 20  # of their address space: the library calls itself for a rule inside of a rule

Waiting: TypeAlias = tuple[SequenceGroup, "array[int]"]  # an admitted request, and its prompt's ids


class CompilingRequests:
    """The requests that wait for their grammar. One engine thread owns it; compilers only call back."""

    def __init__(self, compiler: Compiler) -> None:
        self.seconds, self.num_failures = Histogram(GRAMMAR_SECONDS), 0
        self._compiler = compiler
        self._counting = Lock()  # of the two counts above
        self._threads: ThreadPoolExecutor | None = None
        self.wake: Callable[[], None] | None = None  # called in a compiler's thread; None: compile at once
        self._waiting: dict[str, Waiting] = {}  # by request id
        self._done: deque[tuple[SequenceGroup, Future[Grammar]]] = deque()  # which compilers append to

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def has_done(self) -> bool:
        """Whether there is a request to `take`."""
        return bool(self._done)

    def begin(self, structured: Structured, group: SequenceGroup, tokens: array[int]) -> Grammar | None:
        """The grammar of a request, or None: it waits, and is taken later."""
        result, wake = self._submit(structured), self.wake
        if wake is None:
            return result.result()
        group.added_at = perf_counter()
        self._waiting[group.request.request_id] = group, tokens

        def done(result: Future[Grammar]) -> None:
            self._done.append((group, result))
            wake()

        result.add_done_callback(done)
        return None

    def _submit(self, structured: Structured) -> Future[Grammar]:
        """Begin to compile in a thread: also where the caller waits for it, whose stack may be small."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="infer-grammar")
        usual = stack_size(STACK_BYTES)
        try:
            return self._threads.submit(self._compile, structured)  # may start a thread
        finally:
            stack_size(usual)

    def _compile(self, structured: Structured) -> Grammar:
        begun = perf_counter()
        try:
            return self._compiler.compile(structured)
        except BaseException:
            with self._counting:
                self.num_failures += 1
            raise
        finally:
            with self._counting:
                self.seconds.observe(perf_counter() - begun)

    def abort(self, request_id: str) -> list[StepOutput]:
        """Forget a request that waits; its last outputs."""
        waiting = self._waiting.pop(request_id, None)
        return [] if waiting is None else _last_outputs(waiting[0].request, "abort")

    def take(self) -> Iterator[tuple[SequenceGroup, array[int], Grammar | list[StepOutput]]]:
        """The requests that need not wait any more: each with its grammar, or with its last outputs."""
        while self._done:
            group, result = self._done.popleft()
            request_id = group.request.request_id
            if self._waiting.get(request_id, (None,))[0] is not group:  # aborted; the id may be another's
                continue
            _, tokens = self._waiting.pop(request_id)
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
