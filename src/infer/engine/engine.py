"""The engine loop: every `step()` goes through the same five phases.

    plan     the scheduler picks chunks and reserves blocks            (integers)
    order    the host half turns the plan into numbers                 (integers; engine/host_half.py)
    run      a device moves blocks, runs the model, samples            (tensors; execution/)
    commit   full blocks enter the prefix tree                         (integers)
    report   stop conditions are checked, finished sequences released  (integers; engine/requests.py)

With speculative decoding (engine/speculation.py), `propose` runs before the plan and `complete` after it.

A device runs a launched step without the host. With *overlap* the last two phases are delayed, so that the
CPU plans step N + 1 while the device computes step N:

    CPU      plan 1  launch 1  plan 2  launch 2  retire 1  plan 3  launch 3  retire 2 ...
    device           [ step 1           ][ step 2                   ][ step 3

`num_tokens` then counts a sampled token before the host knows its id; only the device needs the id. If a
sequence turns out to have stopped, tokens computed after the stop are not reported. The number of steps that
may be in flight when the next one is planned:

    0             the next step of some request depends on ids (forks, beams), or the next step should have
                  drafts, or the last one has
    1             a request waits or the last plan computes prompts, so that new requests wait for few steps
    2             some sequence is guided; the first of the two steps has been read
    steps_ahead   all sequences decode and no request waits: enough to cover one delay of the host

Integers decide this, never a clock, so a repeated run makes the same plans.

A step with *guided* sequences (engine/guided.py) launches the model first. It samples when the ids of the
previous step are known and the masks are filled. The ids are reported after the model of the next step is
launched, unless enough forced ids follow them to make appending worth it:

    CPU      plan 2  begin 2  retire 0  wait 1  fill masks  sample 2  plan 3  begin 3  retire 1 ...
    device   step 1                    ][ model 2                  ][ sampler 2 ][ model 3

A request whose constraint is still being compiled waits outside the scheduler's queue (`_compiling`). It
counts as waiting, may be aborted, and enters the queue in the step after the compilation.

A step is atomic: nothing counts as computed until the launch has succeeded. If the launch raises, the
requests of that plan end with an error, all others continue, and every block is accounted for. An interrupt
(Ctrl-C) is handled in the same way and raised again; the next step reports which requests it ended.

The engine works with token ids only. The detokenizer finds stop *strings* and calls `abort` for the sequence.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from infer.constraints.compiler import Compiler, Grammar
from infer.constraints.compiling import CompilingRequests
from infer.constraints.token_bytes import TokenBytes
from infer.engine.admission import admit, seed_of
from infer.engine.host_half import HostHalf
from infer.engine.live import LiveSnapshot, LiveView
from infer.engine.observer import EngineObserver
from infer.engine.phases import Phases
from infer.engine.requests import RequestTable, unserved
from infer.engine.speculation import Speculation
from infer.engine.stats import GRAMMAR_SECONDS, STEP_TOKENS, EngineForm, EngineStats, Histogram, StepPace
from infer.engine.stories import EngineStory, Stories
from infer.errors import ContextOverflow, DeviceLost, EngineError, RequestError
from infer.execution.device import DeviceHalf, PendingStep, StepResult
from infer.finish_reason import FinishReason
from infer.sampling.params import NO_TOKEN, SamplingParams
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

if TYPE_CHECKING:
    from infer.engine.adapters import Adapters  # these import torch, which a server does without
    from infer.kernels.runtime.communicator import RankGroup

logger = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 3
IDLE_S = 1.0  # idle seconds before background work begins


class _Flight(NamedTuple):
    """A step that was launched and is not reported yet."""

    plan: StepPlan
    step: PendingStep
    dropped: set[int]  # chunks whose sampled ids are discarded: forced ids took their place
    result: StepResult | None = None  # None: not read yet
    launched_at: float = 0.0  # time just before the launch; 0: steps are not timed


class Engine:
    """Requests in, `StepOutput`s out, one step at a time. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: DeviceHalf,
        *,
        context_len: int,
        model_len: int | None = None,
        family: str = "",
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        has_head: bool = True,
        form: EngineForm | None = None,
        observer: EngineObserver | None = None,
        steps_ahead: int = 0,
        prepare: Callable[[], bool] = lambda: False,
        phases: Phases | None = None,
        token_bytes: TokenBytes | None = None,
        speculation: Speculation | None = None,
        adapters: Adapters | None = None,
        rank_times: Callable[[], dict[str, Any]] = dict,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.phases = Phases() if phases is None else phases  # phases of the start
        self.context_len = context_len
        self._form = asdict(form or EngineForm())
        self.model_len = model_len or context_len  # the model's context; the engine may serve less
        self.family = family  # the model's architecture family
        self._device, self._host = device, HostHalf(scheduler.state, window_tokens=device.window_tokens)
        self.vocab_size = vocab_size
        self._eos_ids, self._has_head = eos_ids, has_head
        self._observer, self._is_observed = observer or EngineObserver(), observer is not None
        self._clock = clock
        self._requests = RequestTable(scheduler, clock, observer, speculation)
        self._guided = self._requests.guided
        self._empty_steps = 0
        self._unreported: list[StepOutput] = []  # outputs of an interrupted step; the next step returns them
        # the most steps in flight; 0, and always without a KV cache: each step is read before the next plan
        self._steps_ahead = steps_ahead if scheduler.keeps_cache else 0
        self.ranks: RankGroup | None = None  # the model's other ranks
        self.remake: Callable[[], Engine] | None = None  # rebuilds the engine on its weights; None: cannot
        self.prepare = prepare  # does one piece of warm-up work (captures, kernels); False: none is left
        self._flights: deque[_Flight] = deque()  # steps in flight, the oldest first
        self._adapters, self._rank_times = adapters, rank_times  # `rank_times` returns fields of the stats
        self.speculation = speculation
        self._has_drafts = False  # the last launched step has drafts, so it is read before the next plan
        self._wants_drafts = False  # the next step should have drafts
        self._is_guided = False  # the last launched step is guided: its masks need all previous ids
        self._token_bytes = token_bytes or TokenBytes(None, vocab_size=vocab_size)
        self._compile_s = Histogram(GRAMMAR_SECONDS)
        self._compiling: CompilingRequests[tuple[SequenceGroup, array[int]]] = CompilingRequests(
            Compiler(self._token_bytes), self._compile_s.observe
        )
        self._step_tokens = Histogram(STEP_TOKENS)
        self._stories: Stories | None = None  # None: no story is recorded, and events cost nothing
        self._live = LiveView(scheduler, clock)  # the live view for the server's pages
        self._pace, self._has_pace = StepPace(), False  # measured if a router chooses between engines
        self._ended_at = 0.0  # end of the last reported step

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request; raise a `RequestError` with the reason if it can never be served."""
        if self.is_serving(request.request_id):
            raise RequestError(
                f"request id {request.request_id!r} is already being served", param="request_id"
            )
        if request.pooling is not None and not self._device.can_embed:
            raise RequestError("this engine cannot embed: it has no model and makes up its tokens")
        if request.pooling is None and not self._has_head:
            raise RequestError(
                "this model has no language model head and cannot generate tokens; use /v1/embeddings, "
                "/v1/rerank or /v1/score"
            )
        slot = 0
        if request.adapter:
            request, slot = self.adapters.enter(request)
        try:
            group, tokens = admit(
                request,
                self.scheduler,
                number=self._requests.num_added,
                context_len=self.context_len,
                vocab_size=self.vocab_size,
                eos_ids=self._eos_ids,
                num_compiling=self._compiling.num_jobs if request.params.structured else len(self._compiling),
            )
        except ContextOverflow as error:
            raise error.of(self.model_len) from None
        group.adapter_slot = slot
        if request.params.structured is None:
            self._accept(group, tokens, None)
            return
        group.added_at = self._clock()
        grammar = self._compiling.begin(request.params.structured, request.request_id, (group, tokens))
        if grammar is not None:
            self._accept(group, tokens, grammar)
        elif self._stories is not None:
            self._stories.add(request, group.added_at)

    def _accept(self, group: SequenceGroup, tokens: array[int], grammar: Grammar | None) -> None:
        """Put an admitted request into the scheduler's queue."""
        self._observer.on_add(self.scheduler.step, group.request)
        self._requests.add(group, tokens, grammar)
        if self._stories is not None:
            self._stories.accept(group)

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters of the model; raises `RequestError` if the engine was built without LoRA."""
        if self._adapters is None:
            raise RequestError(
                "this engine has no room for LoRA adapters; start it with lora_modules or enable_lora",
                param="adapter",
            )
        return self._adapters

    def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        """Load the LoRA adapter in the directory `path` under a name; None: unload it.

        With `replaces` it takes the place of a loaded adapter with this name. Running requests keep the
        adapter they began with, even if it is unloaded.
        """
        if path is None:
            self.adapters.unload(name)
            return
        groups = [*self._requests.groups.values(), *(group for group, _ in self._compiling)]
        running = {group.adapter_slot for group in groups}
        self.adapters.load(name, path, running=running, replaces=replaces)

    def compile_aside(self, wake: Callable[[], None]) -> None:
        """Compile constraints in threads from now on; they call `wake` when `step` has to be called.

        Until then, `add` compiles constraints itself and raises their errors.
        """
        self._compiling.wake = wake

    def keep_stories(self, limit: int) -> None:
        """Record the stories of running requests and of the last `limit` that ended; 0: record none.

        Call this before the first request.
        """
        if limit:
            self._stories = Stories(limit, self.scheduler, self._step_tokens, self._clock)
            self._requests.stories = self._stories

    def use_idle_time(self) -> float | None:
        """Do one piece of background work; the first is due after `IDLE_S` idle seconds.

        Returns the idle seconds before the next piece; None: there is no more. The vocabulary for constraints
        is read in a thread. Steps are timed again, unless an observer records the run and its step costs.
        """
        self._token_bytes.start()
        if self.speculation is None or self._is_observed:
            return None
        return IDLE_S if self.num_requests else self.speculation.measure_again()

    def abort(self, request_id: str, index: int | None = None) -> list[StepOutput]:
        """End a request or one of its sequences at any stage; returns a last output for each that ended."""
        group = self._requests.groups.get(request_id)
        if group is None:
            waiting = self._compiling.abort(request_id) if index is None else None
            if waiting is not None and self._stories is not None:
                self._stories.end(request_id, FinishReason.ABORT)
            return [] if waiting is None else unserved(waiting[0].request, FinishReason.ABORT)
        if index is not None and group.has_joint_sequence:
            raise EngineError(f"request {request_id!r} has no sequence {index} yet; abort the whole request")
        self._observer.on_abort(self.scheduler.step, request_id, index)
        ended = [seq for seq in group.unfinished if index in (None, seq.index)]
        return self._requests.end(group, ended, FinishReason.ABORT)

    def is_serving(self, request_id: str) -> bool:
        """True if a request is waiting or running."""
        return request_id in self._requests.groups or request_id in self._compiling

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, a step is in flight, or an output is not yet returned.

        A request whose constraint is being compiled does not count: a step could do nothing for it.
        """
        return self.scheduler.has_work or bool(self._flights or self._unreported) or self._compiling.has_done

    @property
    def has_step_in_flight(self) -> bool:
        """True if the device is still working on a step: the next `step()` will report it."""
        return bool(self._flights)

    @property
    def device(self) -> DeviceHalf:
        """The device half that runs the engine's steps."""
        return self._device

    @property
    def num_requests(self) -> int:
        """The number of requests that wait or run."""
        return len(self._requests.groups) + len(self._compiling)

    def stats(self) -> EngineStats:
        """Return the current counts for metrics, health and the router."""
        pool = self.scheduler.pool
        usage = pool.usage()
        return EngineStats(
            num_steps=sum(self._step_tokens.counts),
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting + len(self._compiling),
            num_queued_tokens=self.scheduler.num_queued_tokens,
            token_s=self._pace.token_s,
            row_s=self._pace.row_s,
            max_batch_size=self.scheduler.config.max_batch_size,
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self._requests.num_prompt_tokens,
            num_output_tokens=self._requests.num_output_tokens,
            num_step_tokens=int(self._step_tokens.total),
            step_sizes=tuple(self._step_tokens.counts),
            num_queried_tokens=usage.num_queried_tokens,
            num_hit_tokens=usage.num_hit_tokens,
            num_host_hit_tokens=usage.num_host_hit_tokens,
            host_bytes_out=usage.num_blocks_out * pool.block_bytes,
            host_bytes_in=usage.num_blocks_in * pool.block_bytes,
            block_size=pool.block_size,
            num_blocks=usage.num_blocks,
            num_used_blocks=usage.num_used,
            num_cached_blocks=usage.num_cached,
            num_host_blocks=pool.num_host_blocks,
            num_used_host_blocks=pool.num_host_blocks - usage.num_free_host_blocks,
            num_grammar_failures=self._compiling.num_failures,
            grammar_s=self._compile_s.total,
            grammar_times=tuple(self._compile_s.counts),
            **self._draft_counts(),
            **self._rank_times(),
            **self._form,
        )

    def look(self) -> LiveSnapshot:
        """Return a snapshot for the live page; steps are recorded for the next seconds."""
        return self._live.look(group for group, _ in self._compiling)

    def _draft_counts(self) -> dict[str, Any]:
        if self.speculation is None:
            return {}
        totals = self.speculation.totals
        return {
            "num_draft_windows": totals.num_windows,
            "num_draft_tokens": totals.num_drafts,
            "num_accepted_tokens": totals.num_accepted,
            "accepted_by_position": self.speculation.accepted_by_position(),
            "draft_saved_s": totals.saved_s,
        }

    def explain(self, request_id: str) -> EngineStory | None:
        """Return the story of a running or ended request; None: the request is unknown or forgotten."""
        return None if self._stories is None else self._stories.tell(request_id)

    def watch_prefixes(self) -> None:
        """Track changes of the prefix cache and the pace of steps, for a router between engines."""
        self._has_pace = True
        self.scheduler.pool.tree.watch()

    def take_prefix_news(self) -> dict[int, bool]:
        """Return the prefixes added (True) or evicted since the last call, by hash (`chain_hashes`)."""
        return self.scheduler.pool.tree.take_news()

    def reset_prefix_cache(self) -> int:
        """Evict all cached prefixes; returns the number of blocks."""
        self._observer.on_reset(self.scheduler.step)
        return self.scheduler.pool.reset_prefix_cache()

    # -- the loop ---------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Plan, run, commit, report; returns the outputs in the order of the plan."""
        if self._compiling.has_done:
            self._unreported += self._take_compiled()
        outputs = self._step()
        if self._unreported:
            outputs = self._unreported + outputs
            self._unreported = []
        return outputs

    def _step(self) -> list[StepOutput]:
        num_flights, speculation = len(self._flights), self.speculation
        self._wants_drafts = num_flights > 0 and speculation is not None and speculation.is_due()
        if num_flights > self._num_ahead:  # a request has arrived; later ones can join the same plan
            return self._retire(all_but=num_flights - 1)
        if not num_flights and self._guided.guides:
            self._unreported += self._guided.jump(None, set())
        if not num_flights and speculation is not None:
            speculation.propose()
        plan = self.scheduler.plan()
        if self._stories is not None and self.scheduler.hold != self._stories.hold:
            self._stories.turn(self.scheduler.hold)
        sequences = plan.chunks.sequences
        if not plan.chunks and not plan.transfers:
            return self._retire(all_but=num_flights - 1) if num_flights else self._step_without_work()
        self._empty_steps = 0
        if not plan.chunks.is_repeated:
            for seq in sequences:
                if seq.group.queue_s is None:
                    self._requests.begin(seq)
        self._is_guided = self._guided.are_in(plan)
        try:
            is_unseen = speculation is not None and speculation.complete(plan)
            order = self._host.order(plan, awaits_masks=self._is_guided, is_unseen=is_unseen)
            launched_at = self._clock() if self._has_pace or self._live.is_on else 0.0
            step = self._device.run(order)
            if speculation is not None:
                speculation.settle(order)
            self._observer.on_order(order)
            self.scheduler.advance(plan)
        except DeviceLost:  # every further step would fail too: the supervisor must restart the engine
            raise
        except Exception as error:  # the requests of this plan end, and the engine continues
            names = [seq.group.request.request_id for seq in sequences]
            logger.exception("step %d failed for %s", plan.step, ", ".join(dict.fromkeys(names)))
            return self._retire() + self._give_up(plan, error)
        except BaseException as error:  # Ctrl-C: release the blocks before it is raised again
            self._unreported += self._give_up(plan, error)
            raise
        self._step_tokens.observe(self.scheduler.num_planned_tokens)
        self._has_drafts = plan.chunks.num_drafts > 0
        if self._is_guided:
            return self._sample(plan, step, launched_at)
        self._flights.append(_Flight(plan, step, set(), launched_at=launched_at))
        return self._retire(all_but=self._num_ahead)

    def _sample(self, plan: StepPlan, step: PendingStep, launched_at: float) -> list[StepOutput]:
        """Sample a launched step once all previous ids are known: guides need them to fill its masks.

        The device waits for the masks. The previous ids are reported while it samples.
        """
        outputs: list[StepOutput] = []
        try:
            outputs += self._retire(all_but=1)
            last = (self._flights[0].plan, self._read()) if self._flights else None
            masks = step.sample(*self._guided.fill(plan, last, step.masks))
            self._observer.on_masks(plan.step, masks)
        except DeviceLost:
            self._unreported += outputs + self._conclude_read()
            raise
        except Exception as error:
            logger.exception("step %d could not be sampled", plan.step)
            return outputs + self._conclude_read() + self._give_up(plan, error)
        except BaseException as error:
            self._unreported += outputs + self._conclude_read() + self._give_up(plan, error)
            raise
        dropped: set[int] = set()
        self._flights.append(_Flight(plan, step, dropped, launched_at=launched_at))
        if self._guided.may_jump(plan):
            outputs += self._retire(all_but=1)
            outputs += self._guided.jump(plan, dropped)
        return outputs + self._retire(all_but=self._num_ahead)

    def _take_compiled(self) -> list[StepOutput]:
        """Queue requests whose constraints are compiled; return the last outputs of failed requests."""
        outputs: list[StepOutput] = []
        for (group, tokens), result in self._compiling.take():
            if isinstance(result, Grammar):
                group.seed = seed_of(group.request, self.scheduler, self._requests.num_added)
                try:
                    self._accept(group, tokens, result)
                    continue
                except RequestError as refused:  # an observer refused it; only this request fails
                    error = refused
            else:
                error = result
            outputs += unserved(group.request, FinishReason.ERROR, error)
            if self._stories is not None:
                self._stories.end(group.request.request_id, FinishReason.ERROR, str(error))
        return outputs

    @property
    def _num_ahead(self) -> int:
        """The number of steps that may be in flight when the next one is planned."""
        requests = self._requests
        if requests.waiting_for_ids or self._has_drafts or self._wants_drafts:
            return 0
        if requests.queued_joint and self.scheduler.num_free_places > 0:  # the next plan may let one in
            return 0
        if self._is_guided:  # the first of two has been read
            return min(self._steps_ahead, 2)
        is_quiet = self.scheduler.all_decode and not self.scheduler.num_waiting
        return self._steps_ahead if is_quiet else min(self._steps_ahead, 1)

    def _retire(self, *, all_but: int = 0) -> list[StepOutput]:
        """Wait for the steps in flight, except the last `all_but`, and report their results."""
        outputs: list[StepOutput] = []
        while len(self._flights) > all_but:
            try:
                self._read()
            except BaseException:
                self._unreported += outputs
                raise
            outputs += self._conclude(self._flights.popleft())
        return outputs

    def _conclude_read(self) -> list[StepOutput]:
        """Report the results of the steps that have been read."""
        outputs: list[StepOutput] = []
        while self._flights and self._flights[0].result is not None:
            outputs += self._conclude(self._flights.popleft())
        return outputs

    def _read(self) -> StepResult:
        """Return the result of the oldest step in flight; wait for it if it has not been read."""
        flight = self._flights[0]
        if flight.result is not None:
            return flight.result
        try:
            result = flight.step.wait()
        except DeviceLost:
            raise
        except Exception as error:
            raise DeviceLost(f"what step {flight.plan.step} computed cannot be read") from error
        for number in flight.dropped:
            result.ids[number] = result.logprobs[number] = ()
        self._flights[0] = flight._replace(result=result)
        return result

    def _conclude(self, flight: _Flight) -> list[StepOutput]:
        """Report the results of a step that has been read."""
        plan, step, _, result, launched_at = flight
        assert result is not None
        if launched_at:
            now = self._clock()
            seconds, self._ended_at = now - max(launched_at, self._ended_at), now
            if self._has_pace:
                self._pace.observe(plan.chunks, seconds)
            if self._live.is_on:
                self._live.note(plan, result.ids, seconds, in_graph=step.in_graph)
        if plan.chunks.num_drafts:
            if self.speculation is not None:
                self.speculation.judge(plan, result.ids)
            self.scheduler.retract(plan, result.ids)
        self.scheduler.commit(plan)
        self._observer.on_step(plan, result.ids)
        if result.is_whole:
            return self._requests.report(plan, result)
        broken = [  # sequences that ended meanwhile are left out: their ids are not reported
            seq
            for seq, ids in zip(plan.chunks.sequences, result.ids, strict=True)
            if NO_TOKEN in ids and seq.finish_reason is None
        ]
        failed: list[StepOutput] = []
        for group in {id(seq.group): seq.group for seq in broken}.values():
            failed += self._fail(group.unfinished, _why_no_token(group.request.params))
        return failed + self._requests.report(plan, result)

    def _give_up(self, plan: StepPlan, error: BaseException) -> list[StepOutput]:
        """End the requests of a plan that failed; other sequences whose blocks it moved start over."""
        self._host.forget(plan)
        outputs = self._fail(plan.chunks.sequences, f"{type(error).__name__} in step {plan.step}")
        self.scheduler.abandon(plan)
        return outputs

    def _step_without_work(self) -> list[StepOutput]:
        """Handle an empty plan: normal when idle, but a bug if it repeats while requests wait."""
        if not self.scheduler.has_work:
            return []
        self._empty_steps += 1
        if self._empty_steps < MAX_EMPTY_STEPS:
            return []
        self._empty_steps = 0
        stuck = self.scheduler.sequences()
        logger.error("no progress: %s; usage %s", stuck[:8], self.scheduler.usage())
        return self._fail(stuck, "the scheduler found no room for this request in the KV cache")

    def _fail(self, sequences: Seq[Sequence], reason: str) -> list[StepOutput]:
        """End the requests of these sequences with an error."""
        self._observer.on_failure(self.scheduler.step, reason)
        outputs = []
        for group in {id(seq.group): seq.group for seq in sequences}.values():
            outputs += self._requests.end(group, group.unfinished, FinishReason.ERROR, error=reason)
        return outputs


def _why_no_token(params: SamplingParams) -> str:
    """Return why a request has no next token; only a request with constraints can have caused it itself."""
    broken = (
        "the logits of this request are not finite: the weights are probably damaged, or their values "
        "overflow the dtype (try dtype=float32)"
    )
    if params.is_guided or params.min_tokens or params.logit_bias:
        return (
            "the request's own parameters (its constraint, min_tokens, logit_bias, bad_words or "
            "allowed_token_ids) forbid every token, "
            f"or {broken}"
        )
    return broken
