"""Decide, once per step, which tokens of which sequences to run.

There is no prefill phase and no decode phase. Every sequence is some number of tokens behind
(`num_pending`), and each step spends a token budget on catching up:

    budget 8:   A one behind [1]   B one behind [1]   C prompt of 20 -> chunk of [6]     next step: 6 more

Who is one behind goes first (its client is watching), then prompts already begun, then newcomers in the
policy's order; the `prefill_first` policy turns that round. A newcomer gets room for all the tokens it
has, so prompts never fight each other half way. When the cache is full the running sequence with the
largest key is preempted: it gives back its blocks and recomputes later, or leaves them in host memory.

Nobody waits for ever: whoever has waited `max_wait_steps` for its next token, preemptions included, is
promoted to the front of every policy and is then the last to be preempted; whoever is one behind is
served at least every `max_decode_gap` steps.

The scheduler sees integers only: no tensors, no tokenizer, no clock. That is why its tests need no
GPU and no sleep(), and why a simulator can run it a thousand times faster than a model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from functools import partial
from operator import attrgetter

from infer.cache.kv_pool import KVCachePool
from infer.config.resolve import ResolvedScheduler
from infer.scheduling.lockstep import Lockstep
from infer.scheduling.plan import COPY, SWAP_IN, SWAP_OUT, Chunk, PlanDraft, StepPlan
from infer.scheduling.policies import make_policy
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.sequence import Sequence
from infer.scheduling.waiting_queue import WaitingQueue

BACKLOG_TOKENS = 2048  # of prompts that wait; with more of them they are computed at full speed:
HURRIED_TOKENS = 8192  # of prompts in a step, and whoever decodes waits for them
_sort_key = attrgetter("sort_key")


class Scheduler:
    """The queues, and the rule that turns them into a `StepPlan`. One engine thread owns it."""

    def __init__(
        self,
        pool: KVCachePool,
        config: ResolvedScheduler,
        *,
        cost: PreemptionCost | None = None,
        keeps_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.config = config
        self.policy = make_policy(config.scheduler_policy)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.cost = cost or PreemptionCost()
        self.keeps_cache = keeps_cache  # False: every step starts from an empty cache (the naive baseline)
        self.step = 0
        self.running: list[Sequence] = []  # by sort_key: the first is the most urgent
        self.planned: list[Sequence] = []  # of the last plan: one for each of its chunks
        self.num_planned_tokens = 0  # of the last plan: how many tokens the model will see
        self.all_decode = False  # of the last plan: whether it has a token for each that runs, and no prompt
        self.num_preemptions = 0
        self._by_id: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(config.max_wait_steps)
        self._lockstep = Lockstep()  # where the last plan comes again and again
        self._num_beams = 0  # running
        self._slots_used = 0  # running sequences, counting those a running one will fork into
        self._decode_gap = 0  # steps in a row in which somebody one behind was left out
        self._rotation = 0
        self._batch_is_closed = False  # static batching: the batch is full and decodes

    # -- the queues -------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        seq.sort_key = self.policy.key(seq)
        self._by_id[seq.seq_id] = seq
        self._waiting.push(seq, self.step)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child run beside its parent on shared blocks; whoever writes first gets a copy."""
        if self.keeps_cache:
            self.pool.commit(parent.seq_id, parent.tokens, parent.num_computed)
            self.pool.fork(parent.seq_id, child.seq_id)
        else:
            self.pool.match_prefix(child.seq_id, ())
        child.num_computed = parent.num_computed
        parent.num_reserved = child.num_reserved = 0
        if parent.num_slots > 1:  # the child moves into one of the places its parent was admitted with
            parent.num_slots -= 1
            self._slots_used -= 1
        child.sort_key = (parent.sort_key[0], child.arrival)
        self._by_id[child.seq_id] = child
        self._run(child)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence at any stage of its life and give back what it holds."""
        del self._by_id[seq.seq_id]
        if seq.is_running:
            self._stop_running(seq)
        else:
            self._waiting.remove(seq)
        self.pool.release(seq.seq_id)

    @property
    def has_work(self) -> bool:
        """Whether any sequence still has tokens to make."""
        return bool(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not at the moment."""
        return len(self._by_id) - len(self.running)

    def sequences(self) -> list[Sequence]:
        """Every live sequence, running or waiting."""
        return list(self._by_id.values())

    # -- one step ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the work of one step and reserve the blocks it needs."""
        self.step += 1
        draft = PlanDraft(self._max_num_batched_tokens)
        may_admit = self.num_waiting > 0 and self._slots_used < self.config.max_batch_size
        again = None if may_admit else self._lockstep.next_chunks(partial(self._reserve, draft=draft))
        if again is not None:
            return draft.to_plan(self.step, again)
        one_behind = [  # at its max_total the last token is under way
            s for s in self.running if s.num_tokens - s.num_computed == 1 and s.num_tokens < s.max_total
        ]
        further_behind: list[Sequence] = []
        if len(one_behind) < len(self.running):
            further_behind = [seq for seq in self.running if seq.num_tokens - seq.num_computed != 1]
        if self.policy.rotates and one_behind:
            self._rotation %= len(one_behind)
            one_behind = one_behind[self._rotation :] + one_behind[: self._rotation]

        if self.config.batching_mode == "static":
            self._plan_static(one_behind, further_behind, draft)
        elif self.policy.prompts_first and self._decode_gap < self.config.max_decode_gap:
            self._continue_prompts(further_behind, draft)
            self._admit(draft)
            self._decode(one_behind, draft)
        else:
            self._decode(one_behind, draft)
            self._limit_prompts(further_behind, draft)
            self._continue_prompts(further_behind, draft)
            self._admit(draft)
        self.planned = draft.sequences
        self.num_planned_tokens = draft.num_tokens
        plan = draft.to_plan(self.step)
        self.all_decode = not further_behind and draft.num_tokens == len(plan.chunks) == len(one_behind) > 0
        may_change = may_admit or self._num_beams or self.policy.rotates or not self.keeps_cache
        self._lockstep.note(plan.chunks, draft.sequences, goes_on=self.all_decode and not may_change)
        return plan

    def _plan_static(
        self, one_behind: list[Sequence], further_behind: list[Sequence], draft: PlanDraft
    ) -> None:
        """Fill a batch and compute its prompts, then decode until the last of it is done; then the next."""
        if not self.running:
            self._batch_is_closed = False
        self._continue_prompts(further_behind, draft)
        if not self._batch_is_closed:
            self._admit(draft)
            self._batch_is_closed = not draft.chunks
        if self._batch_is_closed:
            self._decode(one_behind, draft)
            if not draft.chunks and self._waiting:
                first = self._waiting.first(self.step)
                if first.is_beam and first.was_admitted:  # the others wait for it to come back
                    self._admit(draft)

    def advance(self, plan: StepPlan, sequences: Seq[Sequence]) -> None:
        """The step is under way: counts move on, and sampled tokens get their place before they are known."""
        if self._lockstep.advance(plan.chunks):
            return
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            seq.num_computed = stop = chunk.stop
            if chunk.num_samples:
                seq.num_tokens = stop + 1

    def commit(self, plan: StepPlan, sequences: Seq[Sequence]) -> None:
        """The step has run and its inputs are known: full blocks enter the prefix tree."""
        if self._lockstep.commit(plan.chunks, self.pool):
            return
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            # who does not run left, or was preempted, while the step was under way
            if chunk.stop >= seq.next_commit and seq.is_running:
                if self.keeps_cache:
                    seq.next_commit = self.pool.commit(seq.seq_id, seq.tokens, chunk.stop)
                else:
                    self._forget_cache(seq)

    def abandon(self, plan: StepPlan) -> None:
        """The step did not run, its own requests are gone: whoever else it moved blocks for starts over."""
        for seq in map(self._by_id.get, plan.preempted):
            if seq is not None and seq.is_swapped:  # on its way out
                seq.is_swapped = False
                self._forget_cache(seq)
        moved = {transfer.destination for transfer in plan.transfers if transfer.kind != SWAP_OUT}
        for seq in [s for s in self.running if not moved.isdisjoint(self.pool.block_table(s.seq_id))]:
            self._stop_running(seq)  # beams that came in without a chunk of their own
            self._forget_cache(seq)
            self._waiting.push(seq, self.step)

    def _forget_cache(self, seq: Sequence) -> None:
        self.pool.release(seq.seq_id)
        seq.num_computed = seq.num_reserved = 0
        if seq.is_running:  # the naive baseline: it stays, and starts over in the next step
            self.pool.match_prefix(seq.seq_id, ())

    def _decode(self, one_behind: list[Sequence], draft: PlanDraft) -> None:
        """Serve those that are one token behind, as far as the budget goes."""
        num_behind = len(one_behind)
        if self._num_beams or num_behind > draft.budget:
            num_served = self._decode_one_by_one(one_behind, draft)
        else:  # this is what most steps do: no call but for who needs a block
            for seq in [seq for seq in one_behind if seq.num_tokens > seq.num_reserved]:
                self._reserve(seq, seq.num_tokens, draft)
            if draft.preempted:
                one_behind = [seq for seq in one_behind if seq.is_running]
            draft.chunks += [
                Chunk(seq.seq_id, seq.num_computed, seq.num_tokens, seq.num_samples) for seq in one_behind
            ]
            draft.sequences += one_behind
            draft.budget -= (num_served := len(one_behind))
        self._rotation += num_served
        self._decode_gap = self._decode_gap + 1 if num_served < num_behind else 0

    def _decode_one_by_one(self, one_behind: list[Sequence], draft: PlanDraft) -> int:
        """The same with an eye on the budget and on beams; returns how many are served."""
        num_served = 0
        for seq in one_behind:
            if not draft.budget:
                break
            if seq.is_beam:
                num_served += self._decode_beams(seq, draft)
            elif self._reserve(seq, seq.num_tokens, draft):
                self._add_chunk(seq, seq.num_tokens, draft)
                num_served += 1
        return num_served

    def _limit_prompts(self, further_behind: list[Sequence], draft: PlanDraft) -> None:
        """Keep a step short while somebody decodes: few tokens of prompts, unless many wait behind them."""
        limit = self.config.prefill_tokens_while_decoding
        if limit is not None and draft.chunks:
            backlog = self._waiting.backlog(further_behind, self.step)
            draft.limit(limit if backlog <= BACKLOG_TOKENS else max(limit, HURRIED_TOKENS))

    def _decode_beams(self, seq: Sequence, draft: PlanDraft) -> int:
        """Beams advance together or not at all: each step chooses among the continuations of all of them."""
        beams = seq.group.unfinished
        is_ready = all(beam.is_running and beam.num_pending == 1 for beam in beams)
        if seq is not beams[0] or not is_ready or draft.budget < len(beams):
            return 0
        if not all(self._reserve(beam, beam.num_tokens, draft) for beam in beams):
            return 0  # one of them was preempted, and with it all
        for beam in beams:
            self._add_chunk(beam, beam.num_tokens, draft)
        return len(beams)

    def _continue_prompts(self, further_behind: list[Sequence], draft: PlanDraft) -> None:
        for seq in further_behind:
            length = self._chunk_len(seq, draft.budget)
            if length == 0 or not self._may_prefill(draft):
                break
            stop = seq.num_computed + length
            if seq.is_running and (stop <= seq.num_reserved or self._reserve(seq, stop, draft)):
                self._add_chunk(seq, stop, draft)
                draft.num_prefills += 1

    def _admit(self, draft: PlanDraft) -> None:
        """Let waiting sequences in, strictly in order, while budget, slots and blocks last."""
        # A preemption means memory is short: admitting newcomers now would only preempt again.
        while self._waiting and draft.budget and not draft.preempted and self._may_prefill(draft):
            seq = self._waiting.first(self.step)
            group = seq.group.unfinished if seq.is_beam else [seq]
            num_slots = self._slots_used + sum(member.num_slots for member in group)
            last_id_is_late = seq.num_tokens > len(seq.tokens)
            if num_slots > self.config.max_batch_size or last_id_is_late:
                break
            # Beams that came back one by one could wait for each other for ever, each holding blocks.
            if len(group) > 1 and sum(map(self._num_blocks, group)) > self.pool.num_free_blocks:
                break
            if not all(self._admit_one(member, draft) for member in group):
                break

    def _admit_one(self, seq: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence its blocks and its first chunk, or leave everything as it was."""
        pool, seq_id = self.pool, seq.seq_id
        if seq.is_swapped:
            # What can be evicted counts as free, so with enough of it neither swap_in nor reserve can fail.
            can_start = seq.is_beam or self._chunk_len(seq, draft.budget) > 0
            has_room = self._num_blocks(seq) <= pool.num_free_blocks
            pairs = pool.swap_in(seq_id) if can_start and has_room else None
            if pairs is None:
                return False
            draft.transfer(SWAP_IN, pairs)
            seq.is_swapped = False
        elif self.running and self._waiting.is_refused(seq, pool.num_free_blocks, self.step):
            return False
        else:
            self._match_prefix(seq)
        length = self._chunk_len(seq, draft.budget)
        # A beam comes in with the others of its group, even if its chunk has to wait.
        copies = pool.reserve(seq_id, seq.num_tokens) if length or seq.is_beam else None
        if copies is None:
            self._forget_cache(seq)
            if length:
                self._waiting.refuse(seq, pool.num_free_blocks, self.step)
            return False
        draft.transfer(COPY, copies)
        seq.num_reserved, seq.next_commit = seq.num_tokens, 0
        if not seq.was_admitted:  # later its own blocks are among those it finds
            seq.num_cached = seq.num_computed
        self._waiting.remove(seq)
        self._run(seq)
        if length:
            self._add_chunk(seq, seq.num_computed + length, draft)
            draft.num_prefills += 1
        return True

    def _match_prefix(self, seq: Sequence) -> None:
        """Enter a sequence into the cache, further ahead where the prefix tree knows its start."""
        request = seq.group.request
        # prompt logprobs need the logits of every position
        known = () if request.params.prompt_logprobs is not None else seq.tokens
        seq.num_computed = self.pool.match_prefix(seq.seq_id, known, request.cache_salt)

    # -- small parts ------------------------------------------------------------------------------

    def _chunk_len(self, seq: Sequence, budget: int) -> int:
        """How many of its pending tokens fit this step; without chunking all of them or none."""
        pending = seq.num_tokens - seq.num_computed
        if seq.is_beam and seq.num_tokens > seq.num_prompt:
            pending -= 1  # it was preempted, and its last token is computed with those of the other beams
        if self.config.use_chunked_prefill and self.keeps_cache:
            return min(pending, budget, self.config.prefill_chunk_size)
        return pending if pending <= budget else 0

    def _may_prefill(self, draft: PlanDraft) -> bool:
        """Whether the step may take one more chunk of a prompt; the beams of a request come in together."""
        limit = self.config.max_prefill_chunks_per_step
        return limit is None or draft.num_prefills < limit

    def _num_blocks(self, seq: Sequence) -> int:
        return -(-seq.num_tokens // self.pool.block_size)

    def _add_chunk(self, seq: Sequence, stop: int, draft: PlanDraft) -> None:
        num_samples = seq.num_samples if stop == seq.num_tokens else 0
        draft.chunks.append(Chunk(seq.seq_id, seq.num_computed, stop, num_samples))
        draft.sequences.append(seq)
        draft.budget -= stop - seq.num_computed

    def _reserve(self, seq: Sequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Make room for its first `num_tokens`, preempting from the back; False: it was preempted itself."""
        while seq.is_running:
            copies = self.pool.reserve(seq.seq_id, num_tokens)
            if copies is not None:
                block_size = self.pool.block_size
                seq.num_reserved = -(-num_tokens // block_size) * block_size
                draft.grown.append(seq.seq_id)
                if copies:
                    draft.transfer(COPY, copies)
                return True
            self._preempt(self.running[-1], draft)
        return False

    def _preempt(self, victim: Sequence, draft: PlanDraft) -> None:
        """Take back a sequence's blocks; the beams of one search go together."""
        group = [victim] if not victim.is_beam else [s for s in victim.group.sequences if s.is_running]
        for seq in group:
            self._stop_running(seq)
            draft.drop(seq)
            pairs = None
            if self.cost.prefers_swap(self.config.preemption, seq.num_computed):
                pairs = self.pool.swap_out(seq.seq_id, seq.num_computed)
            if pairs is None:
                self._forget_cache(seq)
            else:
                draft.transfer(SWAP_OUT, pairs)
                seq.is_swapped = True
                seq.num_reserved = 0
            draft.preempted.append(seq.seq_id)
            self.num_preemptions += 1
            self._waiting.push(seq, self.step)

    def _run(self, seq: Sequence) -> None:
        self._lockstep.end()
        seq.is_running = seq.was_admitted = True
        insort(self.running, seq, key=_sort_key)
        self._num_beams += seq.is_beam
        self._slots_used += seq.num_slots

    def _stop_running(self, seq: Sequence) -> None:
        self._lockstep.end()
        place = bisect_left(self.running, seq.sort_key, key=_sort_key)
        assert self.running[place] is seq, f"{seq} is not where the running list should have it"
        del self.running[place]
        seq.is_running = False
        self._num_beams -= seq.is_beam
        self._slots_used -= seq.num_slots
