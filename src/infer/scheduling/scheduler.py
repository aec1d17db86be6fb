"""Decide, once per step, which tokens of which sequences to run.

There is no prefill phase and no decode phase. Every sequence has some pending tokens (`num_pending`), and
each step spends a token budget on computing them:

    budget 8:   A decodes [1]   B decodes [1]   C prompt of 20 -> chunk of [6]     next step: 6 more

Decoding sequences go first, because their clients are watching. Prompts already begun come next, and then new
sequences in the policy's order; the `prefill_first` policy puts prompts first. A long prompt leaves a share
of each step to shorter ones, so that new sequences need not wait for all of it. A new sequence gets blocks
for all of its tokens, so prompts never compete for blocks half way. When the cache is full, the running
sequence with the largest key is preempted: its blocks are recomputed later, or swapped to host memory. Blocks
evicted from the prefix tree also leave copies there, if copying is cheaper than computing.

No sequence starves. A sequence that has waited `max_wait_steps` for its next token, including preemptions, is
promoted to the front of every policy and is then the last to be preempted. A decoding sequence is left out of
at most `max_decode_gap` steps in a row, or of as many as the budget forces: if a step serves S of R
sequences, a round takes ceil(R / S) steps. So sequences that were left out are served early enough that even
the last of them keeps this limit:

    R 9, S 4, max_decode_gap 5      three steps serve all, so a sequence is due after being left out 3 times
    left out at most 5 times        3, and 2 more while other due sequences go first

If decoding uses the whole budget for `max_wait_steps` steps in a row, prompts get turns like one more
decoding sequence: a token in every ceil((R + 1) / S) steps, before the others, or a whole prompt without
chunked prefill.

The scheduler counts tokens, blocks and steps: it has no tensors, no tokenizer, no clock. So its tests need no
GPU and no sleep(), and a simulator can run it a thousand times faster than a model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from infer.cache.layout import COPY, STATE, SWAP_IN, SWAP_OUT, Transfer, TransferKind
from infer.cache.paged_pool import PagedKVCachePool, PoolUsage
from infer.config.resolve import ResolvedScheduler
from infer.config.speculation import MAX_DRAFTS
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import PlanDraft, StepPlan
from infer.scheduling.policies import find_policy
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.sequence import Sequence
from infer.scheduling.waiting_queue import WaitingQueue
from infer.scheduling.watch import BATCH_CLOSED, BATCH_FULL, CACHE_FULL, NEXT_STEP, NO_TOKENS, SequenceWatch


class Scheduler:
    """Plans each step from the running and the waiting sequences. One engine thread owns it."""

    def __init__(
        self,
        pool: PagedKVCachePool,
        config: ResolvedScheduler,
        *,
        cost: PreemptionCost | None = None,
        keeps_cache: bool = True,
        max_seq_len: int | None = None,
        spans: Seq[int] = (),
    ) -> None:
        """`spans`: as in `BatchState`."""
        self.pool = pool
        self.config = config
        self.policy = find_policy(config.scheduler_policy)
        self._token_budget = config.max_num_batched_tokens
        self.cost = cost or PreemptionCost()
        pool.keep_evicted(self.cost.favors_host)
        self.keeps_cache = keeps_cache  # False: every step starts from an empty cache (the naive baseline)
        self.step = 0
        longest = pool.longest() if max_seq_len is None else min(max_seq_len, pool.longest())
        max_blocks = -(-longest // pool.block_size)
        # twice the batch size, because a beam search forks new beams before it drops old ones
        self.state = BatchState(
            2 * config.max_batch_size,
            max_blocks,
            block_size=pool.block_size,
            num_tables=len(pool.windows),
            spans=spans,
        )
        self._max_drafts = min(MAX_DRAFTS, self._token_budget - 1)
        self.running = self.state.sequences  # sequences by sort_key: the first is the most urgent
        self.num_planned_tokens = 0  # tokens that the model computes in the last plan
        self.all_decode = False  # the last plan decodes with every running sequence and has no prompt
        self.num_preemptions = 0
        self.hold = NEXT_STEP  # why the last plan admitted no more sequences: one of HOLDS
        self.watch: SequenceWatch | None = None
        self.num_forks = 0
        self._by_id: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(config.max_wait_steps)
        self._num_beams = 0  # running beams
        self._slots_used = 0  # running sequences, including those they will fork into
        self._has_left_out = False  # a sequence that could decode was not in the last plan
        self._due_after = 0  # steps after which a sequence that was left out goes first
        self._without_prompts = 0  # consecutive steps without prompt tokens while a prompt waited
        self._prompts_take_turns = False  # prompts waited too long, and decoding still fills every step
        self._rotation = 0
        self._goes_round = False  # decoding sequences take turns in the plan being made
        self._recent_tokens, self._counted_at = 0.0, 0  # decaying sum of prompt tokens, and its step
        self._batch_is_closed = False  # static batching: the batch is full and decodes

    # -- the queues -------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Put a new sequence into the waiting queue."""
        seq.sort_key = self.policy.key(seq)
        self._by_id[seq.seq_id] = seq
        self._waiting.push(seq, self.step)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run a child that shares its parent's blocks; the first to write the last block gets a copy."""
        if self.keeps_cache:
            self.pool.commit(parent.seq_id, parent.tokens, parent.num_computed)
            self.pool.fork(parent.seq_id, child.seq_id, parent.num_computed)
        else:
            self.pool.match_prefix(child.seq_id, ())
        self.num_forks += 1
        child.num_tokens, child.num_computed = parent.num_tokens, parent.num_computed
        if parent.num_slots > 1:  # the child takes one of the batch places reserved by its parent
            parent.num_slots -= 1
            self._slots_used -= 1
        child.sort_key = (parent.sort_key[0], child.arrival)
        self._by_id[child.seq_id] = child
        self._run(child)
        self.state.enter_tables(child, self.pool.block_tables(child.seq_id))
        for seq in (parent, child):  # both must reserve again before they write the shared block
            seq.num_reserved = seq.num_computed

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence in any state and release its blocks."""
        del self._by_id[seq.seq_id]
        if seq.is_running:
            self._stop_running(seq)
        else:
            self._waiting.remove(seq)
        self.pool.release(seq.seq_id)

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self._by_id)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that do not run: new, or preempted."""
        return len(self._by_id) - len(self.running)

    @property
    def num_queued_tokens(self) -> int:
        """The number of prompt tokens that are not computed yet, of waiting and running sequences."""
        if self.all_decode:
            return self._waiting.num_tokens
        pending = int((self.state.num_tokens - self.state.num_computed).sum())
        return self._waiting.num_tokens + max(pending - len(self.running), 0)

    @property
    def num_free_places(self) -> int:
        """The number of sequences that can be added to the batch."""
        return self.config.max_batch_size - self._slots_used

    @property
    def may_admit(self) -> bool:
        """True if the next plan may admit a waiting sequence: the cache probably has room."""
        if not self.num_waiting or self.num_free_places <= 0:
            return False
        seq, num_free = self._waiting.first(self.step + 1), self.pool.num_free_blocks
        if seq.is_swapped:
            return self.pool.blocks_of(seq.num_tokens) <= num_free
        return not (self.running and self._waiting.is_refused(seq, num_free, self.step + 1))

    def sequences(self) -> list[Sequence]:
        """Return all sequences, running and waiting."""
        return list(self._by_id.values())

    # -- one step ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the work of one step and reserve the blocks it needs."""
        self.step += 1
        num_waiting = self.num_waiting
        may_admit = num_waiting > 0 and self._slots_used < self.config.max_batch_size
        self.hold = BATCH_FULL if num_waiting and not may_admit else NEXT_STEP
        state, may_repeat = self.state, self.state.num_steady > 0 and not may_admit
        short = state.short() if may_repeat else None
        if short is not None and not len(short):
            state.num_steady -= 1
            return StepPlan(self.step, state.planned_chunks(decodes_all=True))
        draft = PlanDraft(self._token_budget, self.config.max_prefill_chunks_per_step)
        if short is not None:
            self._reserve_last(short, draft)
        if may_repeat and state.num_steady > 0:  # 0: a sequence was preempted
            state.num_steady -= 1
            return draft.to_plan(self.step, state.planned_chunks(decodes_all=True))
        draft.budget, draft.num_tokens = self._token_budget, 0  # dropped tokens were in the last plan
        pending, decodes = state.begin_plan()
        places = decodes.nonzero()[0]
        num_decoding = len(places)
        prompts: list[Sequence] = []
        if num_decoding < len(self.running):
            prompts = [self.running[place] for place in ((pending > 0) & ~decodes).nonzero()[0].tolist()]
        has_prompts, num_prompts = bool(prompts) or may_admit, draft.num_prompts
        turn_len = self._turn_of_prompts(prompts) if has_prompts else 0
        num_steps = self._steps_of_round(num_decoding, turn_len)
        takes_turn = turn_len > 0 and self._without_prompts >= num_steps - 1
        self._due_after = max(self.config.max_decode_gap + 1 - num_steps, 0)
        self._goes_round = self.policy.rotates and num_decoding + state.num_drafts > self._token_budget
        if self._goes_round:
            self._rotation %= num_decoding
            places = np.roll(places, -self._rotation)

        if self.config.batching_mode == "static":
            self._plan_static(places, prompts, draft)
        elif self.policy.prompts_first and not self._is_one_due():
            decoding = [self.running[place] for place in places.tolist()]
            self._plan_prompts(prompts, draft)
            self._decode(state.places_of(decoding), num_decoding, draft)
        else:
            if takes_turn:
                decoding = [self.running[place] for place in places.tolist()]
                self._take_turn(prompts, turn_len, draft)
                prompts = [seq for seq in prompts if seq.is_running and not seq.num_planned]
                places = state.places_of(decoding)
            self._decode(places, num_decoding, draft)
            self._limit_prompts(prompts, draft)
            self._plan_prompts(prompts, draft)
        is_served = draft.num_prompts < num_prompts
        self._without_prompts = self._without_prompts + 1 if has_prompts and not is_served else 0
        if not has_prompts or (is_served and not takes_turn):  # prompts make progress without turns
            self._prompts_take_turns = False
        # True: every sequence that was ready to decode is in the plan, and nothing else
        is_uniform = not (prompts or is_served) and draft.num_tokens - state.num_drafts == num_decoding
        decodes_all = is_uniform and draft.num_turns == 1 and num_decoding == len(self.running)
        if self._has_left_out:
            self._has_left_out = state.count_left_out()
        chunks = state.planned_chunks(decodes_all=decodes_all, in_turn=draft.num_turns > 1)
        self.num_planned_tokens = draft.num_tokens
        self.all_decode = is_uniform and len(chunks) == num_decoding > 0
        if decodes_all and self.keeps_cache and not (may_admit or self._num_beams):
            state.settle()
        return draft.to_plan(self.step, chunks)

    def _plan_static(self, places: np.ndarray, prompts: list[Sequence], draft: PlanDraft) -> None:
        """Fill a batch and compute its prompts; decode until its last sequence ends; begin the next batch."""
        if not self.running:
            self._batch_is_closed = False
        decoding = [self.running[place] for place in places.tolist()]
        self._continue_prompts(prompts, draft)
        if not self._batch_is_closed:
            self._admit(draft)
            self._batch_is_closed = not draft.num_tokens
        if self._batch_is_closed:
            self.hold = BATCH_CLOSED if self._waiting else NEXT_STEP
            self._decode(self.state.places_of(decoding), len(decoding), draft)
            if not draft.num_tokens and self._waiting:
                first = self._waiting.first(self.step)
                if first.is_beam and first.was_admitted:  # the other beams wait for this preempted one
                    self._admit(draft)

    def advance(self, plan: StepPlan) -> None:
        """Count a launched step; sampled tokens count before they are known."""
        self.state.advance(plan.chunks)

    def commit(self, plan: StepPlan) -> None:
        """Add the blocks that a step has filled to the prefix tree, now that their tokens are known."""
        chunks, commit = plan.chunks, self.pool.commit
        filled = self.state.filled(chunks)
        if not len(filled):
            return
        for number, end in zip(filled.tolist(), chunks.ends[filled].tolist(), strict=True):
            seq = chunks.sequences[number]
            if self.keeps_cache:
                tokens = seq.tokens
                stop = end if end < len(tokens) else len(tokens)  # ids of drafts may still be unknown
                seq.next_commit = commit(seq.seq_id, tokens, stop)
            else:
                self._forget_cache(seq)

    def propose(self, seq: Sequence, drafts: Seq[int]) -> None:
        """Let a running sequence with one pending token compute drafts next, MAX_DRAFTS at most."""
        self.state.propose(seq, drafts[: self._max_drafts])

    def retract(self, plan: StepPlan, ids: Seq[Seq[int]]) -> None:
        """Remove the drafts that a step has rejected: a chunk keeps as many as it returned ids, less one.

        Call this before `commit`, which adds only the remaining tokens to the prefix tree. Recurrent layers
        do not write drafts into their state, so with such layers accepted drafts are computed once more.
        """
        num_refused, num_kept = np.zeros((2, len(ids)), dtype=np.int64)
        for number, (seq, sampled) in enumerate(zip(plan.chunks.sequences, ids, strict=True)):
            if seq.drafts:
                num_refused[number] = len(seq.drafts) + 1 - len(sampled)
                num_kept[number] = max(len(sampled) - 1, 0)
                seq.drafts = ()
                if seq.ticket:  # it was preempted after the launch
                    self._waiting.num_tokens -= int(num_refused[number])
        self.state.retract(plan.chunks, num_refused, num_kept if STATE in self.pool.windows else None)

    def abandon(self, plan: StepPlan) -> None:
        """Undo a failed step after its requests ended; other sequences whose blocks it moved start over."""
        for seq in map(self._by_id.get, plan.preempted):
            if seq is not None and seq.is_swapped:  # its blocks were not copied
                seq.is_swapped = False
                self._forget_cache(seq)
        moved = {transfer.destination for transfer in plan.transfers if transfer.kind != SWAP_OUT}
        self.pool.tree.forget_copies(move.destination for move in plan.transfers if move.kind == SWAP_OUT)
        tables_of = self.pool.block_tables
        for seq in [s for s in self.running if not all(map(moved.isdisjoint, tables_of(s.seq_id)))]:
            self._stop_running(seq)  # a beam that was admitted without a chunk
            self._forget_cache(seq)
            self._waiting.push(seq, self.step)

    def _forget_cache(self, seq: Sequence) -> None:
        self.pool.release(seq.seq_id)
        seq.num_computed = seq.num_reserved = 0
        if seq.is_running:  # naive cache backend: it keeps running and starts over in the next step
            self.pool.match_prefix(seq.seq_id, ())

    def _decode(self, places: np.ndarray, num_behind: int, draft: PlanDraft) -> None:
        """Plan these columns, as far as the budget goes; preempt the last sequences if blocks run out."""
        state, first_turn = self.state, draft.num_turns
        if self._has_left_out:
            places = state.due_first(places, self._due_after)
        if self._num_beams:
            places = self._with_whole_beams(places, draft.budget)
        left_out: list[Sequence] = []
        if len(places) + state.num_drafts > draft.budget:
            num_fitting = int(np.count_nonzero(state.decode_len[places].cumsum() <= draft.budget))
            left_out = [self.running[place] for place in places[num_fitting:].tolist()]
            places = places[:num_fitting]
        num_served = len(places)
        has_order = self._num_beams or self._goes_round
        draft.num_turns += num_served if has_order else 1
        served = places if has_order or num_served < len(self.running) else slice(None)  # a slice is faster
        state.turn[served] = np.arange(first_turn, draft.num_turns) if has_order else first_turn
        state.num_planned[served] = state.decode_len[served]
        draft.spend(int(state.decode_len[served].sum()) if state.num_drafts else num_served)
        if len(short := state.short(places)):
            self._reserve_last(short, draft)
            if draft.preempted:
                num_served = int(np.count_nonzero((state.num_planned > 0) & (state.turn >= first_turn)))
        self._rotation += num_served
        self._has_left_out = self._has_left_out or num_served < num_behind
        left_places = state.places_of(left_out)
        if draft.preempted and len(left_places) and state.decode_len[left_places[0]] <= draft.budget:
            self._decode(left_places, num_behind - num_served, draft)  # uses tokens of preempted sequences

    def _steps_of_round(self, num_decoding: int, turn_len: int) -> int:
        """Return the number of steps in which every decoding sequence gets a turn, and prompts `turn_len`.

        A sequence that is due this many steps before its gap ends is served in time, even if all are due.
        """
        state, budget = self.state, self._token_budget
        if num_decoding + state.num_drafts + turn_len <= budget:
            return 1
        # all beams of a search advance together; count them as one search
        longest = max(int(state.decode_len.max()), min(self._num_beams, budget))
        return -(-(num_decoding + -(-turn_len // longest)) // (budget // longest))

    def _turn_of_prompts(self, prompts: list[Sequence]) -> int:
        """Return the tokens of a turn of prompts; 0: prompts have not waited long enough to get turns."""
        self._prompts_take_turns |= self._without_prompts >= self.config.max_wait_steps
        if not self._prompts_take_turns:
            return 0
        if self.config.use_chunked_prefill and self.keeps_cache:
            return 1
        first = prompts[0] if prompts else self._waiting.first(self.step)
        return min(first.num_pending, self._token_budget)

    def _take_turn(self, prompts: list[Sequence], turn_len: int, draft: PlanDraft) -> None:
        """Give prompts `turn_len` tokens before the decoding sequences."""
        kept, draft.budget = draft.budget - turn_len, turn_len
        self._plan_prompts(prompts, draft)
        draft.budget += kept

    def _is_one_due(self) -> bool:
        """Return True if a decoding sequence has been left out so often that it is due."""
        return int(self.state.left_out.max(initial=0)) >= self._due_after

    def _with_whole_beams(self, places: np.ndarray, budget: int) -> np.ndarray:
        """Return these columns without incomplete beam searches: all beams must be in the same step."""
        kept: list[int] = []
        for place in places.tolist():
            seq = self.running[place]
            if not seq.is_beam:
                kept.append(place)
                budget -= seq.num_pending
                continue
            beams = seq.group.unfinished
            is_ready = all(beam.is_running and beam.num_pending == 1 for beam in beams)
            if seq is beams[0] and is_ready and len(beams) <= budget:
                kept += [beam.place for beam in beams]
                budget -= len(beams)
        return np.array(kept, dtype=np.int64)

    def _limit_prompts(self, prompts: list[Sequence], draft: PlanDraft) -> None:
        """Limit the prompt tokens of a step with decoding sequences, so that it stays short.

        The limit is higher if many tokens wait. Several short prompts get at most `packed_step_tokens`.
        """
        if not (prompts or self._waiting):
            return
        tuned, num_prompts = self.config.profile, len(prompts) + self.num_waiting
        num_tokens = self._waiting.num_tokens + sum([seq.num_pending for seq in prompts])
        if num_prompts > 1 and num_tokens <= tuned.short_prompt * num_prompts:
            draft.budget = min(draft.budget, self.config.packed_step_tokens)
        limit, num_rows = self.config.prefill_tokens_while_decoding, draft.num_tokens
        if limit is None or not num_rows:
            return
        if self.config.hurries:
            short = self.config.busy_step_tokens - -(-num_rows // tuned.row_padding) * tuned.row_padding
            if self._hurries_often() and num_prompts <= num_rows and num_tokens <= short * num_prompts:
                limit = short
            elif self._waiting.backlog(prompts, self.step) > tuned.backlog_tokens:
                limit = max(limit, tuned.hurried_tokens)
        draft.budget = min(draft.budget, limit)

    def _hurries_often(self) -> bool:
        """Return True if hurried steps would be frequent, but would not take most of the time."""
        tuned = self.config.profile
        self._recent_tokens *= (1.0 - 1.0 / tuned.recent_steps) ** (self.step - self._counted_at)
        self._counted_at = self.step
        share = self._recent_tokens / (tuned.recent_steps * tuned.hurried_tokens)  # hurried steps among all
        return 1 / tuned.rare < share < 1 / tuned.often

    def _plan_prompts(self, prompts: list[Sequence], draft: PlanDraft) -> None:
        """Continue prompts that have begun, then admit others; a long prompt leaves a share to short ones."""
        if prompts and self.config.use_chunked_prefill and self.keeps_cache:
            kept = self._share_of_first(prompts[0], draft)
            draft.set_aside(kept)
            self._serve_shorter(prompts, draft)
            draft.set_aside(-kept)
            prompts = [seq for seq in prompts if seq.is_running and not seq.num_planned]
        self._continue_prompts(prompts, draft)
        self._admit(draft)

    def _share_of_first(self, seq: Sequence, draft: PlanDraft) -> int:
        """Return the tokens of this step that are kept for the first prompt, even if others are shorter."""
        if min(draft.budget, draft.num_prompts) == 1:  # the step cannot be shared: alternate
            return self._chunk_len(seq, draft.budget) * (self.step % 2)
        return self._chunk_len(seq, -(-draft.budget // self.config.profile.first_share))

    def _serve_shorter(self, prompts: list[Sequence], draft: PlanDraft) -> None:
        """Spend the budget on prompts with fewer pending tokens than the first, the shortest first."""
        first, shorter = prompts[0], sorted(prompts[1:], key=lambda seq: seq.num_pending)
        may_admit = True
        while draft.budget > 0 and draft.num_prompts > 0:
            least = shorter[0].num_pending if shorter else first.num_pending
            if may_admit and self._is_next_due(first, least):
                may_admit = not draft.preempted and self._admit_next(draft)
            elif shorter and least < first.num_pending:
                self._continue_prompts([shorter.pop(0)], draft)
            else:
                return

    def _is_next_due(self, first: Sequence, least: int) -> bool:
        """Return True if a sequence should be admitted before `first` ends: one more urgent or much shorter.

        Sequences are admitted strictly in order, so a long one may have to be admitted before a short one.
        """
        if not self._waiting:
            return False
        urgency, shortest = self._waiting.first(self.step).sort_key[0], self._waiting.shortest()
        if urgency != first.sort_key[0] or urgency != shortest.sort_key[0]:
            return urgency < first.sort_key[0]
        much_shorter = self.config.profile.much_shorter
        return shortest.num_tokens < least and shortest.num_tokens * much_shorter <= first.num_pending

    def _continue_prompts(self, prompts: list[Sequence], draft: PlanDraft) -> None:
        for seq in prompts:
            length = self._chunk_len(seq, draft.budget)
            if length == 0 or draft.num_prompts <= 0:
                break
            stop = seq.num_computed + length
            if seq.is_running and stop > seq.num_reserved:
                self._reserve([seq], [stop], draft)
            if seq.is_running:
                self._add_prompt(seq, length, draft)

    def _admit(self, draft: PlanDraft) -> None:
        """Admit waiting sequences, strictly in order, while budget, batch places and blocks last."""
        # After a preemption, memory is short: admitting a sequence now would only preempt again.
        while self._waiting and draft.budget and not draft.preempted and draft.num_prompts > 0:
            if not self._admit_next(draft):
                return
        if not self._waiting:
            self.hold = NEXT_STEP
        elif self.hold == NEXT_STEP:
            self.hold = CACHE_FULL if draft.preempted else NO_TOKENS

    def _admit_next(self, draft: PlanDraft) -> bool:
        """Admit the next sequence; False: nothing has changed."""
        seq = self._waiting.first(self.step)
        group = seq.group.unfinished if seq.is_beam else [seq]
        num_slots = self._slots_used + sum(member.num_slots for member in group)
        is_on_its_way = seq.num_tokens > len(seq.tokens)  # True: its last id is still on the device
        if is_on_its_way or num_slots > self.config.max_batch_size:
            self.hold = CACHE_FULL if is_on_its_way else BATCH_FULL
            return False
        # Beams admitted one by one could wait for each other forever while holding blocks.
        num_blocks = sum(self.pool.blocks_of(member.num_tokens) for member in group)
        if len(group) > 1 and num_blocks > self.pool.num_free_blocks:
            self.hold = CACHE_FULL
            return False
        return all(self._admit_one(member, draft) for member in group)

    def _admit_one(self, seq: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence its blocks and its first chunk; False: nothing has changed."""
        pool, seq_id = self.pool, seq.seq_id
        if seq.is_swapped:
            # Evictable blocks count as free, so with enough of them neither swap_in nor reserve can fail.
            can_start = seq.is_beam or self._chunk_len(seq, draft.budget) > 0
            has_room = pool.blocks_of(seq.num_tokens) <= pool.num_free_blocks
            pairs = pool.swap_in(seq_id) if can_start and has_room else None
            if pairs is None:
                self.hold = CACHE_FULL if can_start else NO_TOKENS
                return False
            self._transfer(SWAP_IN, pairs, draft)
            seq.is_swapped = False
        elif self.running and self._waiting.is_refused(seq, pool.num_free_blocks, self.step):
            self.hold = CACHE_FULL
            return False
        else:
            self._match_prefix(seq)
        length = self._chunk_len(seq, draft.budget)
        # A beam is admitted together with its group, even if its chunk has to wait.
        copies = pool.reserve(seq_id, seq.num_tokens, seq.num_computed) if length or seq.is_beam else None
        if copies is None:
            self._forget_cache(seq)
            self.hold = CACHE_FULL if length else NO_TOKENS
            if length:
                self._waiting.refuse(seq, pool.num_free_blocks, self.step)
            return False
        self._transfer(COPY, copies, draft)
        if not seq.was_admitted:  # a preempted sequence also finds its own blocks
            seq.num_cached, seq.num_from_host = seq.num_computed, pool.host_tokens(seq_id)
        self._waiting.remove(seq)
        self._run(seq)
        self.state.enter_tables(seq, pool.block_tables(seq_id))
        if self.watch is not None:
            self.watch.on_admit(seq)
        if length:
            self._add_prompt(seq, length, draft)
        return True

    def _match_prefix(self, seq: Sequence) -> None:
        """Enter a sequence into the cache, with the blocks that the prefix tree has of its start."""
        request = seq.group.request
        # prompt logprobs need the logits of every position, and a mean the hidden states
        reads_all = request.params.prompt_logprobs is not None or request.pooling == "mean"
        known = () if reads_all else seq.tokens
        seq.num_computed = self.pool.match_prefix(seq.seq_id, known, request.cache_salt)

    # -- helpers ----------------------------------------------------------------------------------

    def _chunk_len(self, seq: Sequence, budget: int) -> int:
        """Return the number of pending tokens that fit into this step; without chunking, all or none."""
        pending = seq.num_tokens - seq.num_computed
        if seq.is_beam and seq.num_tokens > seq.num_prompt:
            pending -= 1  # a preempted beam's last token is computed with the other beams' tokens
        if self.config.use_chunked_prefill and self.keeps_cache:
            return min(pending, budget, self.config.prefill_chunk_size)
        return pending if pending <= budget else 0

    def _add_prompt(self, seq: Sequence, length: int, draft: PlanDraft) -> None:
        seq.num_planned, seq.turn = length, draft.num_turns
        draft.num_turns += 1
        draft.spend(length)
        draft.num_prompts -= 1
        self._recent_tokens += length
        if self.watch is not None:
            self.watch.on_chunk(seq, length, len(self.running))

    def _reserve_last(self, places: np.ndarray, draft: PlanDraft) -> None:
        """Reserve slots for the last tokens of these columns."""
        sequences = [self.running[place] for place in places.tolist()]
        self._reserve(sequences, self.state.num_wanted[places].tolist(), draft)

    def _reserve(self, sequences: Seq[Sequence], num_tokens: Seq[int], draft: PlanDraft) -> None:
        """Reserve slots for `num_tokens` of each running sequence, in order; preempts the last if needed."""
        pool, write_tables = self.pool, self.state.write_tables
        for seq, count in zip(sequences, num_tokens, strict=True):
            while seq.is_running:
                copies = pool.reserve(seq.seq_id, count, seq.num_computed)
                if copies is not None:
                    write_tables(seq, pool.block_tables(seq.seq_id), draft.table_changes)
                    if copies or pool.moves:
                        self._transfer(COPY, copies, draft)
                    break
                self._preempt(self.running[-1], draft)

    def _transfer(self, kind: TransferKind, pairs: list[tuple[int, int]], draft: PlanDraft) -> None:
        """Plan transfers, after the pool's pending moves: evicted blocks out, and host prefixes in."""
        draft.transfers += self.pool.take_moves()
        draft.transfers += [Transfer(kind, source, destination) for source, destination in pairs]

    def _preempt(self, victim: Sequence, draft: PlanDraft) -> None:
        """Preempt a sequence: release its blocks and its part of the plan; beams of a search go together."""
        group = [victim] if not victim.is_beam else [s for s in victim.group.sequences if s.is_running]
        for seq in group:
            num_computed, num_planned = seq.num_computed, seq.num_planned
            draft.drop(seq.row, num_planned, len(self.state.tenancy))
            self._stop_running(seq)
            pairs = None
            if self.cost.prefers_swap(self.config.preemption, seq.num_computed):
                pairs = self.pool.swap_out(seq.seq_id, seq.num_computed)
            if pairs is None:
                self._forget_cache(seq)
            else:
                self._transfer(SWAP_OUT, pairs, draft)
                seq.is_swapped = True
            draft.preempted.append(seq.seq_id)
            self.num_preemptions += 1
            self._waiting.push(seq, self.step)
            if self.watch is not None:
                self.watch.on_preempt(seq, num_computed, num_planned, len(pairs or ()))

    def _run(self, seq: Sequence) -> None:
        seq.was_admitted = True
        self.state.enter(seq)
        self._num_beams += seq.is_beam
        self._slots_used += seq.num_slots

    def _stop_running(self, seq: Sequence) -> None:
        self.state.leave(seq)
        self._num_beams -= seq.is_beam
        self._slots_used -= seq.num_slots

    # -- statistics -------------------------------------------------------------------------------

    def usage(self) -> PoolUsage:
        """Return the usage of the cache, with unfilled slots; walks over all sequences."""
        return self.pool.usage({seq_id: seq.num_computed for seq_id, seq in self._by_id.items()})
