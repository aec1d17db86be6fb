"""The host half of a step: turns a plan and its sequences into the order that devices execute.

    plan      chunks of sequences, reserved blocks, blocks to move               (scheduling/plan.py)
    order     rows, ids, slots, changes of state: numbers only                   (execution/order.py)

A device keeps state from step to step, so an order contains only changes. For this the host half keeps two
facts about each row of the batch state:

    tenancy       the tenancy of the row that the device knows; a new tenancy means that the row begins
    has_newest    True if the device sampled the row's newest token itself; if not, the order contains it

Only this module decides the kind of each row. A chunk with drafts verifies them. A chunk of one token that
samples one id decodes, even if it is the last token of a prompt, because it is computed in the same way. Any
other chunk is a prompt or part of one. In a step with drafts no row decodes: a chunk of one token is then a
window without drafts.

A *draft model* has its own host half over the same batch state. Its rows draw with the same noise as the
sequences, but without penalties, masks and logprobs. If it drafts trees, its rows are windows too, in which
it draws the best ids after each token.

If an order decodes the same rows as the previous order, each position grows by one. The order is then marked
`REPEATS`, and a device need not look at its rows.

A plan that failed ends its requests; its rows begin again when they are next used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import numpy as np

from infer.config.speculation import MAX_DRAFTS
from infer.execution.order import (
    AWAITS_MASKS,
    DECODE,
    DRAWS_BEST,
    EMPTY,
    NONE,
    ON_HOST,
    PADDING,
    POOLINGS,
    PROMPT,
    READS_PROMPTS,
    REPEATS,
    TRANSFERS,
    UNSEEN,
    VERIFY,
    RowFacts,
    StepOrder,
)
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.sampling.params import sequence_seed
from infer.scheduling.batch_state import BatchState
from infer.scheduling.beam import num_logprobs
from infer.scheduling.plan import Chunks, StepPlan
from infer.scheduling.sequence import Sequence

NOBODY = -1  # tenancy of a row that must begin again


class HostHalf:
    """Makes the orders of one engine, in the order of its plans."""

    def __init__(
        self, state: BatchState, *, window_tokens: int = 0, is_draft: bool = False, num_best: int = 0
    ) -> None:
        """`window_tokens`: as in execution/device.py; `is_draft`: True for a draft model.

        `num_best`: ids that a draft model draws after each token of a tree.
        """
        self._state, num_rows = state, len(state.tenancy)
        self._window_tokens, self._is_draft, self._num_best = window_tokens, is_draft, num_best
        self._tenancy = np.full(num_rows, NOBODY, dtype=np.int64)
        self._has_newest = np.zeros(num_rows, dtype=bool)
        self._has_uses = np.zeros(num_rows, dtype=bool)  # rows whose tokens the device counts
        self._is_beam = np.zeros(num_rows, dtype=bool)
        self._adapters = np.zeros(num_rows, dtype=np.int16)  # adapter slots of rows
        self._reads_prompt = np.zeros(num_rows, dtype=bool)  # rows of embeddings, or with prompt logprobs
        self._steady: StepOrder | None = None  # the last order, if all of its rows decode

    def order(self, plan: StepPlan, *, awaits_masks: bool = False, is_unseen: bool = False) -> StepOrder:
        """Return the order of a plan; `awaits_masks`: sampled later; `is_unseen`: a head may skip it."""
        flags = (AWAITS_MASKS if awaits_masks else 0) | (UNSEEN if is_unseen else 0)
        steady = self._steady
        if steady is not None and plan.chunks.is_repeated:
            tables, transfers = _diffs(plan.table_changes), _moves(plan)
            return steady.repeat(plan.step, flags | REPEATS, plan.chunks.starts, tables, transfers)
        order = self._order(plan, flags)
        is_steady = len(plan.chunks) > 0 and not (order.flags & ON_HOST or (order.kinds != DECODE).any())
        self._steady = None
        if is_steady:
            self._steady = order._replace(
                known=EMPTY.known, lines=EMPTY.lines, facts=EMPTY.facts, extras=EMPTY.extras
            )
        return order

    def forget(self, plan: StepPlan) -> None:
        """Mark the rows of a plan that failed: they begin again."""
        self._tenancy[plan.chunks.rows] = NOBODY
        self._steady = None

    def _order(self, plan: StepPlan, flags: int) -> StepOrder:
        chunks, rows, sequences = plan.chunks, plan.chunks.rows, plan.chunks.sequences
        begins = self._tenancy[rows] != self._state.tenancy[rows]
        for number in begins.nonzero()[0].tolist():
            self._note(sequences[number])
        kinds = np.where((chunks.stops - chunks.starts == 1) & (chunks.num_samples == 1), DECODE, PROMPT)
        is_drawn_on_host = (chunks.num_samples > 1) | (self._is_beam[rows] & chunks.draws)
        has_drafts = np.zeros(len(kinds), dtype=bool)
        table_changes = plan.table_changes
        if self._is_draft:  # the tokens missing from the draft model's cache are a window that draws once
            self._has_newest[rows[chunks.stops <= [len(seq.tokens) for seq in sequences]]] = False
            if table_changes and begins.any():
                table_changes = _but_those_of(rows[begins], table_changes, len(self._tenancy))
            is_short = (chunks.stops - chunks.starts <= MAX_DRAFTS) & chunks.draws
            if self._num_best:
                kinds[chunks.draws] = VERIFY
                flags |= DRAWS_BEST if chunks.draws.any() else 0
                has_drafts[:] = chunks.stops > [len(seq.tokens) for seq in sequences]
            elif (is_short & (kinds == PROMPT)).any():
                kinds[is_short] = VERIFY
        elif self._state.num_drafts:
            has_drafts[:] = [bool(seq.drafts) for seq in sequences]
            kinds[has_drafts | (kinds == DECODE)] = VERIFY
            if PROMPT in kinds or int((chunks.stops - chunks.starts).sum()) > self._window_tokens:
                # token counts and masks differ from one draft to the next
                is_drawn_on_host |= has_drafts & (self._has_uses[rows] | bool(flags & AWAITS_MASKS))
        if is_drawn_on_host.any():  # the host's sampler needs all tokens of rows with token counts
            flags |= ON_HOST
            begins |= self._has_uses[rows]
        reading = self._reading(chunks)
        flags |= READS_PROMPTS if reading else 0
        arrived = [sequences[number] for number in begins.nonzero()[0].tolist()]
        known = self._unknown_tokens(chunks, kinds)
        self._advance(chunks, has_drafts, is_on_host=bool(flags & ON_HOST))
        tokens, slots = self._lay_out(chunks, kinds)
        lines, facts, extras = self._entries(arrived)
        draws = (chunks.num_samples * max(self._num_best, 1)).astype(np.int16)
        return StepOrder(
            step=plan.step,
            flags=flags,
            rows=rows.astype(np.int32),
            starts=chunks.starts.astype(np.int32),
            counts=(chunks.stops - chunks.starts).astype(np.int32),
            num_sampled=np.where(has_drafts, chunks.stops - chunks.starts, draws > 0).astype(np.int16),
            num_draws=draws,
            adapters=self._adapters[rows],
            kinds=kinds.astype(np.int8),
            tokens=tokens,
            slots=slots,
            backs=_backs(chunks, has_drafts, len(tokens)),
            next_tokens=_followers(chunks, reading),
            known=known,
            table_changes=_diffs(table_changes, [self._table(seq) for seq in arrived]),
            transfers=_moves(plan),
            lines=lines,
            facts=facts,
            extras=extras,
        )

    def _note(self, seq: Sequence) -> None:
        """Record what the host half needs about a sequence that begins in its row."""
        row, params = seq.row, seq.group.request.params
        self._tenancy[row] = self._state.tenancy[row]
        self._has_newest[row] = False
        if self._is_draft:
            return
        self._is_beam[row], self._adapters[row] = seq.is_beam, seq.group.adapter_slot
        self._reads_prompt[row] = params.prompt_logprobs is not None or seq.group.request.pooling is not None
        self._has_uses[row] = _has_uses(seq)

    def _reading(self, chunks: Chunks) -> list[int]:
        """Return the numbers of the chunks whose hidden states are all read.

        Embeddings and prompt logprobs read them; a prompt's last token predicts the output, not the prompt.
        """
        found = []
        for number in self._reads_prompt[chunks.rows].nonzero()[0].tolist():
            seq = chunks.sequences[number]
            if seq.group.request.pooling is not None or chunks.starts[number] < seq.num_prompt - 1:
                found.append(number)
        return found

    def _unknown_tokens(self, chunks: Chunks, kinds: np.ndarray) -> np.ndarray:
        """Return rows, tokens and positions of decoding rows whose token the device did not sample."""
        (unknown,) = ((kinds == DECODE) & ~self._has_newest[chunks.rows]).nonzero()
        if not len(unknown):
            return EMPTY.known
        starts: list[int] = chunks.starts[unknown].tolist()
        sequences = [chunks.sequences[number] for number in unknown.tolist()]
        tokens = [seq.tokens[start] for seq, start in zip(sequences, starts, strict=True)]
        return np.array([chunks.rows[unknown], tokens, starts], dtype=np.int64)

    def _advance(self, chunks: Chunks, has_drafts: np.ndarray, *, is_on_host: bool) -> None:
        """Note which newest tokens the device knows after this order."""
        rows = chunks.rows
        self._has_newest[rows] = False if is_on_host else chunks.draws & ~has_drafts
        if is_on_host or has_drafts.any():  # only the host knows the tokens: it sends them again
            self._tenancy[rows[self._has_uses[rows] & (is_on_host | has_drafts)]] = NOBODY

    def _lay_out(self, chunks: Chunks, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all rows that do not decode, concatenated, and their slots in each table."""
        (given,) = (kinds != DECODE).nonzero()
        tables, size = self._state.tables, self._state.block_size
        if not len(given):
            return EMPTY.tokens, np.empty((len(tables), 0), dtype=np.int32)
        ids = array("I")
        starts, stops = chunks.starts[given], chunks.stops[given]
        for number, start, stop in zip(given.tolist(), starts.tolist(), stops.tolist(), strict=True):
            seq = chunks.sequences[number]
            ids += seq.tokens[start:stop]
            if seq.drafts and (stop > len(seq.tokens) if self._num_best else not self._is_draft):
                ids.extend(seq.drafts)
        counts = stops - starts
        positions = np.arange(len(ids)) + (stops - counts.cumsum()).repeat(counts)
        blocks, offsets = np.divmod(positions, size)
        slots = tables[:, chunks.rows[given].repeat(counts), blocks] * size + offsets
        return np.frombuffer(ids, dtype=np.uint32), slots.astype(np.int32)

    def _table(self, seq: Sequence) -> np.ndarray:
        """Return the whole tables of a sequence: a line of (row, index, block) for each block."""
        row, num_blocks = seq.row, seq.num_reserved // self._state.block_size
        num_tables, num_rows, _ = self._state.tables.shape
        lines_KB3 = np.empty((num_tables, num_blocks, 3), dtype=np.int32)
        lines_KB3[:, :, 0] = row + num_rows * np.arange(num_tables)[:, None]
        lines_KB3[:, :, 1] = np.arange(num_blocks)
        lines_KB3[:, :, 2] = self._state.tables[:, row, :num_blocks]
        return lines_KB3.reshape(-1, 3)

    def _entries(self, arrived: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sample lines of rows that begin, their facts, and their lists, concatenated."""
        if not arrived:
            return EMPTY.lines, EMPTY.facts, EMPTY.extras
        lines, facts, extras = bytearray(), list[RowFacts](), array("I")
        for seq in arrived:
            line, fact = _line(seq), _facts(seq)
            if self._is_draft:
                line, fact = line._replace(has_uses=0), RowFacts(seq.num_prompt)
            lines += line.pack()
            facts.append(fact)
            if fact.num_tokens:
                extras += seq.tokens
            if fact.num_banned:
                extras.extend(_banned(seq))
            biases = seq.group.request.params.logit_bias
            extras.extend(biases)
            extras.frombytes(np.array(list(biases.values()), dtype=np.float32).tobytes())
        return (
            np.frombuffer(lines, dtype=np.int64).reshape(-1, NUM_FIELDS),
            np.array(facts, dtype=np.int32),
            np.frombuffer(extras, dtype=np.uint32) if extras else EMPTY.extras,
        )


def _banned(seq: Sequence) -> tuple[int, ...]:
    """Return the ids that a sequence may not sample before its `min_tokens`."""
    return seq.group.stop_ids if seq.group.request.params.min_tokens else ()


def _has_uses(seq: Sequence) -> bool:
    """True if the tokens of a sequence are counted: for penalties or `min_tokens`."""
    return seq.group.request.params.has_penalties or bool(_banned(seq))


def _line(seq: Sequence) -> SampleLine:
    """Return the sampling parameters of a sequence as a line."""
    params = seq.group.request.params
    return SampleLine(
        seq.row,
        has_uses=int(_has_uses(seq)),
        top_k=params.top_k,
        seed=sequence_seed(seq.group.seed, seq.index),
        ban_end=seq.num_prompt + params.min_tokens,
        num_biased=len(params.logit_bias),
        temperature=0.0 if params.is_greedy else params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def _facts(seq: Sequence) -> RowFacts:
    request, count = seq.group.request, num_logprobs(seq.group)
    asked = request.params.prompt_logprobs
    return RowFacts(
        num_prompt=seq.num_prompt,
        num_logprobs=NONE if count is None else count,
        prompt_logprobs=NONE if asked is None else asked,
        pooling=POOLINGS.index(request.pooling),
        num_tokens=len(seq.tokens) if _has_uses(seq) else 0,
        num_banned=len(_banned(seq)),
    )


def _followers(chunks: Chunks, reading: list[int]) -> np.ndarray:
    """Return the token after each chunk, where it is known and not sampled, or its logprob is read.

    Empty if every chunk samples, as in most steps.
    """
    (numbers,) = (~chunks.draws).nonzero()
    if not len(numbers) and not reading:
        return EMPTY.next_tokens
    found = np.zeros(len(chunks), dtype=np.uint32)
    for number in {*numbers.tolist(), *reading}:
        tokens, stop = chunks.sequences[number].tokens, int(chunks.stops[number])
        found[number] = tokens[stop] if stop < len(tokens) else 0
    return found


def _backs(chunks: Chunks, has_drafts: np.ndarray, num_given: int) -> np.ndarray:
    """Return the distance of each given token from its parent; empty if no drafts have branches."""
    (numbers,) = has_drafts.nonzero()
    branched = [
        number for number in numbers.tolist() if any(b != 1 for b in chunks.sequences[number].draft_backs)
    ]
    if not branched:
        return EMPTY.backs
    ends, backs = (chunks.stops - chunks.starts).cumsum(), np.ones(num_given, dtype=np.int8)
    for number in branched:
        seq, end = chunks.sequences[number], int(ends[number])
        backs[end - len(seq.drafts) : end] = seq.draft_backs
    return backs


def _diffs(changes: list[int], tables: Seq[np.ndarray] = ()) -> np.ndarray:
    """Return a line of (row, index, block) for each new block of a table, padded to a power of two.

    The padding keeps the number of different launch sizes on a GPU small.
    """
    num_lines = len(changes) // 3 + sum(map(len, tables))
    if not num_lines:
        return EMPTY.table_changes
    padding = [PADDING] * 3 * ((1 << (num_lines - 1).bit_length()) - num_lines)
    diffs_D3 = np.array(changes + padding, dtype=np.int32).reshape(-1, 3)
    return np.concatenate([diffs_D3, *tables]) if tables else diffs_D3


def _but_those_of(rows: np.ndarray, changes: list[int], num_rows: int) -> list[int]:
    """Return the table changes without those rows, whose whole tables are sent."""
    kept = np.array(changes, dtype=np.int64).reshape(-1, 3)
    found: list[int] = kept[~np.isin(kept[:, 0] % num_rows, rows)].reshape(-1).tolist()
    return found


def _moves(plan: StepPlan) -> np.ndarray:
    if not plan.transfers:
        return EMPTY.transfers
    moves = [(TRANSFERS.index(kind), source, to) for kind, source, to in plan.transfers]
    return np.array(moves, dtype=np.int32)
