"""Buffers on the host for the ids that a GPU sampled, and the results that wait for them.

Steps are launched ahead of the one that is read, so there are several buffers, used in turn; none may be
overwritten before it has been read. Their memory is pinned, which lets the device copy while the host works,
and an event after each copy says when it is done.

Logprobs arrive with the ids of their rows. The stream of the steps processes the logits before the next step
overwrites them; a separate stream does the rest, and the copy, during that step.

Copies to the device are simpler: each uses fresh memory, which torch's allocator keeps until the copy has run
(`sending.send`), however many steps come before it.

Shapes:  S rows of a step, V vocabulary, K rows that ask for logprobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from infer.errors import DeviceLost, EngineError
from infer.execution.device import StepResult
from infer.execution.embedding import Pooled
from infer.execution.gpu.sending import fetch, send
from infer.execution.host_sampling import Judge, PromptTable, kept_nodes, num_kept, read_prompts
from infer.execution.order import StepOrder
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.sampling.logprob_table import logprob_table
from infer.sampling.logprobs import read_logprobs
from infer.sampling.params import NO_TOKEN, RowLogprobs

DRAFTING = "while drafts were made"  # the place, besides a step, where a device may fail


class Asked(NamedTuple):
    """The rows of a step that ask for logprobs."""

    places: list[int]  # places among the ids
    counts: list[int]  # alternatives asked for
    logits_SV: torch.Tensor  # logits of the step, which the next step may overwrite


class PendingTensor(NamedTuple):
    """A tensor on its way to the host."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None  # recorded after the copy; None: the tensor is there

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


class Drawn(NamedTuple):
    """The ids of a row among the ids of its step."""

    number: int  # number of the row in the order
    place: int  # place of the first id
    drafts: Sequence[int] = ()  # drafts that the ids are compared with; there is one id more
    num_kept: int | None = None  # number of kept ids, if decided beforehand; None: as judged
    backs: Sequence[int] | None = None  # distances of tokens from their parents, if the drafts have branches


def drawn_by(
    order: StepOrder,
    last_places: np.ndarray,
    decided: Mapping[int, int] = MappingProxyType({}),
    backs: Mapping[int, list[int]] = MappingProxyType({}),
) -> list[Drawn]:
    """Return the ids of all rows that draw any, given the place of each row's last one, and their drafts.

    `decided`: the number of ids that some rows keep; `backs`: distances in rows whose drafts have branches.
    """
    columns = last_places.tolist(), order.num_sampled.tolist(), order.counts.cumsum().tolist()
    tokens: list[int] = []
    found = []
    for number, (last, count, end) in enumerate(zip(*columns, strict=True)):
        if count > 1:  # the order has no row that decodes
            tokens = tokens or order.tokens.tolist()
            drafts = tokens[end - count + 1 : end]
            found.append(Drawn(number, last + 1 - count, drafts, decided.get(number), backs.get(number)))
        elif count:
            found.append(Drawn(number, last))
    return found


class PendingIds:
    """The result of a step whose ids are on their way."""

    def __init__(self, step: int, ids: PendingTensor, num_rows: int, judge: Judge) -> None:
        self._step, self._ids, self._judge = step, ids, judge
        self._num_rows = num_rows  # rows of the order
        self._drawn: Callable[[], list[Drawn]] | None = None
        self._prompts: list[PromptTable] = []
        self._pooled: Pooled | None = None
        self._asked: tuple[list[int], list[int], PendingTensor] | None = None

    def scatter(
        self,
        drawn: Callable[[], list[Drawn]],
        prompts: list[PromptTable] | None = None,
        pooled: Pooled | None = None,
    ) -> PendingIds:
        """Set which ids each row has, one or several or none; `drawn` is called when the ids have arrived.

        Logprobs of prompts and pooled states must arrive before the ids do.
        """
        self._drawn, self._prompts, self._pooled = drawn, prompts or [], pooled
        return self

    def attach(self, asked: Asked, table: PendingTensor) -> None:
        """Add logprobs to the result, from a table on its way."""
        self._asked = asked.places, asked.counts, table  # the logits need not be kept

    def arrive(self) -> torch.Tensor:
        """Wait for the ids."""
        return self._ids.wait()

    def settle(self) -> None:
        """Wait for the ids and copy them, so that their buffer may be written again."""
        self._ids = PendingTensor(self.arrive().clone(), None)

    def wait(self) -> StepResult:
        """Wait for the ids; raise `DeviceLost` if the device has failed."""
        try:
            arrived: list[int] = self.arrive().tolist()
            rows = self._logprobs(arrived)
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {self._step}", error) from error
        if self._drawn is None:  # one id for each row, in order
            return StepResult(list(zip(arrived)), rows, {}, NO_TOKEN not in arrived)
        ids: list[tuple[int, ...]] = [()] * self._num_rows
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * self._num_rows
        for number, place, drafts, decided, backs in self._drawn():
            kept: Sequence[int] = range(decided or 1)
            if drafts and decided is None:
                kept = kept_nodes(self._judge, arrived[place : place + 1 + len(drafts)], drafts, backs)
            ids[number] = tuple(arrived[place + node] for node in kept)
            logprobs[number] = tuple(rows[place + node][0] for node in kept)
        is_whole = all(NO_TOKEN not in row for row in ids)
        pooled = {} if self._pooled is None else self._pooled.by_number()
        return StepResult(ids, logprobs, read_prompts(self._prompts), is_whole, pooled)

    def _logprobs(self, ids: list[int]) -> list[tuple[RowLogprobs | None, ...]]:
        """Return the logprobs of each id whose row asked for them and has a token."""
        rows: list[tuple[RowLogprobs | None, ...]] = [(None,)] * len(ids)
        if self._asked is not None:
            places, counts, table = self._asked
            found = read_logprobs(table.wait(), [ids[place] for place in places], counts)
            for place, row in zip(places, found, strict=True):
                rows[place] = (row if ids[place] != NO_TOKEN else None,)
        return rows


class Readback:
    """Pinned memory for the ids of the last few steps, and the events that say they have arrived."""

    def __init__(
        self, max_rows: int, device: torch.device, *, steps_ahead: int, drafts_KS: torch.Tensor | None = None
    ) -> None:
        """`drafts_KS`: drafts to be read, while the drafts of the next window are made."""
        self._device, self._is_cuda = device, is_gpu(device)
        self.judge: Judge = num_kept
        num_buffers = steps_ahead + 2  # the steps ahead, the one that is read, and a spare
        self._buffers = [
            torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(num_buffers)
        ]
        self._parts = list(self._buffers)  # part of each buffer that the last step to take it needed
        self._events = [_event() if self._is_cuda else None for _ in range(num_buffers)]
        self._drafts = deque[tuple[torch.Tensor, torch.cuda.Event | None]]()
        if drafts_KS is not None and len(drafts_KS):
            for _ in range(3):
                copy_KS = torch.empty(drafts_KS.shape, dtype=drafts_KS.dtype, pin_memory=self._is_cuda)
                self._drafts.append((copy_KS, _event() if self._is_cuda else None))
        self._next = 0
        self._aside: torch.cuda.Stream | None = None  # stream of logprobs, made for the first of them
        self._places: list[int] = []  # places of the rows that asked for logprobs last
        self._places_K = torch.empty(0, dtype=torch.int64, device=device)
        self._last: deque[PendingIds] = deque(maxlen=num_buffers)  # steps whose ids are still in buffers

    def take(self, step: int, ids_S: torch.Tensor, num_rows: int, asked: Asked | None = None) -> PendingIds:
        """Start to copy the ids of a step to the host, and logprobs for the rows that ask."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        buffer, event, num_ids = self._parts[number], self._events[number], ids_S.shape[0]
        if buffer.shape[0] != num_ids:
            self._parts[number] = buffer = self._buffers[number][:num_ids]
        buffer.copy_(ids_S, non_blocking=True)
        if event is not None:
            event.record()
        pending = PendingIds(step, PendingTensor(buffer, event), num_rows, self.judge)
        self._last.append(pending)
        if asked is not None:
            with torch.inference_mode():
                pending.attach(asked, self._take_logprobs(asked, ids_S))
        return pending

    def settle(self) -> None:
        """Copy the ids of all steps so far, because more buffers will be taken than there are."""
        while self._last:
            self._last.popleft().settle()

    def arrive(self) -> None:
        """Wait until every step so far has been sampled."""
        if self._last:
            self._last[-1].arrive()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor to new pinned memory; an event recorded after it says when it is there."""
        return fetch(tensor) if self._is_cuda else tensor

    def fetch_drafts(self, drafts_KS: torch.Tensor) -> PendingTensor:
        """Start to copy all drafts; the result is valid until drafts have been fetched twice more."""
        self._drafts.rotate()
        copy_KS, event = self._drafts[0]
        copy_KS.copy_(drafts_KS, non_blocking=True)
        if event is not None:
            event.record()
        return PendingTensor(copy_KS, event)

    def _take_logprobs(self, asked: Asked, ids_S: torch.Tensor) -> PendingTensor:
        """Start to compute logprobs; if memory runs out, retry only this: the step cannot be repeated."""
        try:
            return self._make_table(asked, ids_S)
        except torch.OutOfMemoryError:
            pass  # the tensors of the attempt are freed with the error
        try:
            return self._make_table(asked, ids_S)
        except torch.OutOfMemoryError as error:
            raise EngineError("no memory is left for the logprobs of a step; lower device_memory") from error

    def _make_table(self, asked: Asked, ids_S: torch.Tensor) -> PendingTensor:
        if asked.places != self._places:  # most steps ask for the same places as the last
            self._places_K = send(torch.tensor(asked.places), self._device)
            self._places = asked.places
        width = max(asked.counts)
        if not self._is_cuda:
            return PendingTensor(logprob_table(asked.logits_SV, ids_S, width, self._places_K), None)
        self._aside = aside = self._aside or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        table = logprob_table(asked.logits_SV, ids_S, width, self._places_K, aside)
        with torch.cuda.stream(aside):
            fetched, event = self.fetch(table), _event()
            event.record()
        return PendingTensor(fetched, event)


@contextmanager
def losing_device(where: str) -> Iterator[None]:
    """Raise `DeviceLost` if the device fails."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost.of(where, error) from error


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
