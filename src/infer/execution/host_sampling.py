"""Sampling on the host: ids and logprobs from hidden states, row by row.

    hidden [T]  ──►  sampled positions  ──►  logits  ──►  one id each, several before a fork
                └──►  rows of prompts with prompt_logprobs, a few logits at a time

Both device halves use this module. A CPU samples every step with it. A GPU uses it only for steps whose ids
decide what runs next (`ON_HOST`), and for logprobs of prompts.

A row that *verifies* drafts is sampled at all of its positions at once, each as if the drafts before it were
accepted. The noise is a hash of (seed, position), so if all earlier drafts are accepted, the id at a position
is the one that the row would have sampled without drafts. Ids are kept up to and including the first that
differs from its draft. So the text is the same with and without drafts, greedy or not. A tree of drafts is
verified along the path of the sampled ids (trees.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infer.execution.device import StepResult
from infer.execution.layout import positions_of
from infer.execution.order import DECODE, DRAWS_BEST, NO_MASKS, NONE, VERIFY, StepMasks, StepOrder
from infer.execution.row_book import RowBook
from infer.execution.trees import branched_rows, kept_path, main_line
from infer.kernels.runtime.torch_threads import threads_for
from infer.kernels.sampling.logprob_table import logprob_table
from infer.models.model import Network
from infer.sampling.logprobs import read_logprobs
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import SampleRow, best_ids, sample

LOGPROB_ROWS = 64  # rows of logits computed at once for prompt logprobs: 64 * 150k * 4 bytes = 38 MB

Judge = Callable[[Sequence[int], Sequence[int]], int]  # sampled ids, drafts: returns how many ids are kept


class PromptTable(NamedTuple):
    """The logprobs of a part of a prompt, possibly still on a device (sampling/logprobs.py)."""

    number: int  # number of the row in the order
    chosen: list[int]  # tokens of the prompt
    num_top: int  # alternatives to each token
    table: torch.Tensor


class HostSampler:
    """Samples the ids of a step from the hidden states of a model.

    `send` copies ids to its device; `logits` computes a step's logits, by default with the model.
    """

    def __init__(
        self,
        model: Network,
        book: RowBook,
        send: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
        logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._model, self._book, self._send, self._logits = model, book, send, logits
        self.judge: Judge = num_kept

    def sample(
        self, order: StepOrder, last_rows: list[int], hidden_TD: torch.Tensor, masks: StepMasks
    ) -> StepResult:
        """Return the result of a step, given the index in `hidden_TD` of each row's last token."""
        if order.flags & DRAWS_BEST:
            places, _, _ = self._rows_to_sample(_once(order), last_rows, {}, masks)
            return self.draw_best(order, (self._logits or self._model.logits)(_rows_of(hidden_TD, places)))
        ids: list[tuple[int, ...]] = [()] * order.num_rows
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * order.num_rows
        prompt_logprobs = read_prompts(self.prompt_tables(order, last_rows, hidden_TD))
        drafts = drafts_of(order)
        places, rows, counts = self._rows_to_sample(order, last_rows, drafts, masks)
        if not rows:
            return StepResult(ids, logprobs, prompt_logprobs)
        logits_SV = (self._logits or self._model.logits)(_rows_of(hidden_TD, places))
        with threads_for(len(rows)):
            samples = sample(logits_SV, rows, overwrites=True)
        first, backs = 0, dict(branched_rows(order))
        for number, count in enumerate(counts):
            drawn = samples.ids[first : first + count]
            path: Sequence[int] = range(count)
            if number in drafts:
                path = kept_nodes(self.judge, drawn, drafts[number], backs.get(number))
            ids[number] = tuple(drawn[node] for node in path)
            logprobs[number] = tuple(samples.logprobs[first + node] for node in path)
            first += count
        return StepResult(ids, logprobs, prompt_logprobs)

    def draw_best(self, order: StepOrder, logits_SV: torch.Tensor) -> StepResult:
        """Return the best ids at all sampled positions, given their logits; a row's ids are concatenated."""
        _, rows, counts = self._rows_to_sample(_once(order), [0] * order.num_rows, {}, NO_MASKS)
        with threads_for(len(rows)):
            best = best_ids(logits_SV, rows, int(order.num_draws.max()))
        ends = np.cumsum(counts).tolist()
        ids = [tuple(id_ for each in best[end - count : end] for id_ in each)
               for end, count in zip(ends, counts, strict=True)]  # fmt: skip
        return StepResult(ids, [()] * order.num_rows, {})

    def _rows_to_sample(
        self, order: StepOrder, last_rows: list[int], drafts: Mapping[int, list[int]], masks: StepMasks
    ) -> tuple[list[int], list[SampleRow], list[int]]:
        """Return the hidden states to sample, the parameters for each, and the number of ids per row."""
        places, rows, counts = list[int](), list[SampleRow](), list[int]()
        mask_of = masks.by_place() if len(masks.numbers) else {}
        columns = order.num_sampled.tolist(), order.num_draws.tolist(), order.stops.tolist()
        entries = self._book.entries(order.rows)
        ends = order.counts.cumsum()
        positions = (positions_of(order, ends) + 1).tolist() if len(order.backs) else None
        for number, (entry, last_row, num_sampled, num_draws, stop) in enumerate(
            zip(entries, last_rows, *columns, strict=True)
        ):
            counts.append(num_sampled * num_draws)
            for back in range(num_sampled - 1, -1, -1):  # positions before the last one
                place = stop - back
                position = place if positions is None else positions[ends[number] - 1 - back]
                for index in range(num_draws):
                    row = entry.sample_row(position, index, mask_of.get((number, place)))
                    if number in drafts:  # penalties count the drafts before this position
                        row = row._replace(tokens=[*row.tokens, *drafts[number][: num_sampled - 1 - back]])
                    places.append(last_row - back)
                    rows.append(row)
        return places, rows, counts

    def prompt_tables(
        self, order: StepOrder, last_rows: list[int], hidden_TD: torch.Tensor
    ) -> list[PromptTable]:
        """Return the logprobs of prompt tokens that follow this step's tokens, a few logits at a time."""
        found = list[PromptTable]()
        for number, tokens, place, count in self._stretches(order, last_rows):
            num_top = self._book[int(order.rows[number])].facts.prompt_logprobs
            chosen = [*tokens[1:].tolist(), int(order.next_tokens[number])][:count]
            chosen_T, parts = self._send(torch.tensor(chosen), hidden_TD.device), []
            for first in range(0, count, LOGPROB_ROWS):
                last = min(first + LOGPROB_ROWS, count)
                logits = self._model.logits(hidden_TD[place + first : place + last])
                parts.append(logprob_table(logits, chosen_T[first:last], num_top))
            found.append(PromptTable(number, chosen, num_top, torch.cat(parts)))
        return found

    def follow(self, order: StepOrder, last_rows: list[int], hidden_TD: torch.Tensor) -> None:
        """Compute this rank's shard of all logits that `sample` computes on rank 0, in the same order."""
        for _, _, place, count in self._stretches(order, last_rows):
            for first in range(place, place + count, LOGPROB_ROWS):
                self._model.logits(hidden_TD[first : min(first + LOGPROB_ROWS, place + count)])
        sampled = zip(last_rows, order.num_sampled.tolist(), order.num_draws.tolist(), strict=True)
        places = [
            last_row - back
            for last_row, num_sampled, num_draws in sampled
            for back in range(num_sampled - 1, -1, -1)
            for _ in range(num_draws)
        ]
        if places:
            (self._logits or self._model.logits)(_rows_of(hidden_TD, places))

    def _stretches(
        self, order: StepOrder, last_rows: list[int]
    ) -> Iterator[tuple[int, np.ndarray, int, int]]:
        """Yield the rows with prompt logprobs: number, tokens, first hidden state, number of states."""
        if not len(order.next_tokens):
            return
        for number, tokens in given_tokens(order).items():
            facts, start = self._book[int(order.rows[number])].facts, int(order.starts[number])
            count = min(len(tokens), facts.num_prompt - 1 - start)  # following tokens within the prompt
            if facts.prompt_logprobs != NONE and count > 0:
                yield number, tokens, last_rows[number] + 1 - len(tokens), count


def _once(order: StepOrder) -> StepOrder:
    """Return the order with at most one id sampled at each position."""
    return order._replace(num_draws=np.minimum(order.num_draws, 1))


def _rows_of(hidden_TD: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return the hidden states at some places, without a copy if these are all places in order."""
    # equal counts alone are not enough: a row about to fork repeats its place
    has_all = len(places) == hidden_TD.shape[0] and places == list(range(len(places)))
    return hidden_TD if has_all else hidden_TD[places]


def given_tokens(order: StepOrder) -> dict[int, np.ndarray]:
    """Return the tokens of the rows that do not decode, by row number."""
    (numbers,) = (order.kinds != DECODE).nonzero()
    if not len(numbers):
        return {}
    parts = np.split(order.tokens, order.counts[numbers].cumsum()[:-1])
    return dict(zip(numbers.tolist(), parts, strict=True))


def drafts_of(order: StepOrder) -> dict[int, list[int]]:
    """Return the drafts of verifying rows, by row number: their tokens after the first."""
    (numbers,) = ((order.kinds == VERIFY) & (order.num_sampled > 1)).nonzero()
    if not len(numbers):
        return {}
    given = given_tokens(order)
    return {number: given[number][1:].tolist() for number in numbers.tolist()}


def num_kept(drawn: Sequence[int], drafts: Sequence[int]) -> int:
    """Return the number of sampled ids that are kept: all that equal their drafts, and one more."""
    pairs = zip(drawn, drafts, strict=False)
    return next((place for place, (got, draft) in enumerate(pairs) if got != draft), len(drafts)) + 1


def kept_nodes(
    judge: Judge, drawn: Sequence[int], drafts: Sequence[int], backs: Sequence[int] | None
) -> Sequence[int]:
    """Return the places of a window whose ids are kept; `backs`: set if its drafts are a tree.

    A judge other than `num_kept` keeps a part of the main line only.
    """
    if backs is None:
        return range(judge(drawn, drafts))
    if judge is num_kept:
        return kept_path(drawn, drafts, backs)
    return range(judge(drawn, drafts[: main_line(backs[1:])]))


class SyntheticJudge:
    """Accepts each draft with a fixed probability, for benchmarks with random weights."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance, self._rng = acceptance, random.Random(0)

    def __call__(self, drawn: Sequence[int], drafts: Sequence[int]) -> int:
        """Return the number of ids that are kept: one per accepted draft, and one more."""
        refused = (place for place in range(len(drafts)) if self._rng.random() >= self._acceptance)
        return next(refused, len(drafts)) + 1


def read_prompts(tables: list[PromptTable]) -> dict[int, list[RowLogprobs]]:
    """Return the logprobs of prompts by row number, from tables that are on the host."""
    return {
        each.number: read_logprobs(each.table, each.chosen, [each.num_top] * len(each.chosen))
        for each in tables
    }
