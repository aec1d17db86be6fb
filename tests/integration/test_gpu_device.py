"""The device half of a GPU, on the CPU: the same code over the kernels' references gives the same tokens.

State on the device, ids that arrive some steps late, rows that are padding: none of it may change a token.
What a GPU adds (the kernels themselves, CUDA graphs) is in tests/gpu.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from infer.config.profiles.cpu import CPU
from infer.engine import machine
from infer.engine.engine import Engine
from infer.execution.gpu import graphs, step_inputs
from infer.execution.gpu import masks as device_masks
from infer.execution.gpu import rows as device_rows
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.readback import PendingIds, PendingTensor
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.host_sampling import num_kept
from infer.execution.order import StepOrder
from infer.kernels.runtime.profiles import using_profile
from infer.models.model import Model
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.request import Request, StepOutput
from tests.support.checkpoints import FAMILIES, MORE_FAMILIES
from tests.support.masked import mask_steps
from tests.support.thinned import thinned
from tests.support.tiny import drain, make_engine, random_prompts, run_engine

NUM_PROMPTS = 10
HAS_GPU_KERNELS = machine.has_gpu_kernels


def make_params(number: int) -> SamplingParams:
    """Greedy, drawn from everything, drawn from the likeliest."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": number},
    ]
    return SamplingParams(**kinds[number % 3], max_tokens=6 + number, ignore_eos=True)


PLAIN = [(prompt, make_params(number)) for number, prompt in enumerate(random_prompts(NUM_PROMPTS))]
ON_HOST = [  # in part: the step that forks, and all of a beam search
    (PLAIN[1][0], SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)),
    (PLAIN[2][0], SamplingParams(temperature=0.0, use_beam_search=True, n=2, best_of=3, max_tokens=6)),
]


ASKING_KNOBS: list[dict[str, Any]] = [
    {},
    {"use_overlap": False},
    {"use_cuda_graphs": False},
    {"max_batch_size": 3, "prefill_chunk_size": 5},
    {"block_size": 2, "num_blocks": 40, "preemption": "recompute", "prefill_chunk_size": 7},
    {"block_size": 2, "num_blocks": 40, "preemption": "swap", "swap_blocks": 40},
    {"kv_cache_backend": "naive"},
    {"deterministic": True},
]


def make_asking(number: int) -> SamplingParams:
    """More than filters: what changes logits by what came before, and what reports them."""
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.9, "seed": number},
        {"logit_bias": dict.fromkeys(range(0, 300, 7), 6.5)},
        {"min_tokens": 7, "stop_token_ids": tuple(range(0, 300, 3)), "temperature": 1.0, "seed": 5},
        {"logprobs": 3, "temperature": 1.0, "seed": number},
        {"prompt_logprobs": 2, "logprobs": 0},
        {
            "repetition_penalty": 0.8, "frequency_penalty": -0.3, "logit_bias": {5: 4.0, 299: -100.0},
            "logprobs": 20, "prompt_logprobs": 0, "temperature": 0.8, "top_p": 0.9, "seed": 1,
            "min_tokens": 3, "stop_token_ids": (1, 2, 3, 5),
        },
        {"n": 2, "frequency_penalty": 1.1, "logprobs": 1, "temperature": 1.0, "seed": 9},
        {"n": 1, "best_of": 2, "presence_penalty": -0.5, "temperature": 1.0, "seed": 8},
    ]  # fmt: skip
    asked = kinds[number % len(kinds)]
    return SamplingParams(**({"temperature": 0.0} | asked), max_tokens=8 + number % 12, ignore_eos=True)


ASKING = [(prompt, make_asking(number)) for number, (prompt, _) in enumerate((*PLAIN, *PLAIN[3:]))]


def run_on_cpu(family: str, requests: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    """What the device half of the CPU makes of it, whatever a fixture says."""
    with mock.patch.object(machine, "has_gpu_kernels", HAS_GPU_KERNELS):
        engine = make_engine(family)
    assert not isinstance(engine._device, GpuDevice)
    return run_engine(engine, requests)


@functools.cache
def expected(family: str, with_host: bool) -> list[list[list[int]]]:
    return run_on_cpu(family, PLAIN + ON_HOST * with_host)


def report(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[RowLogprobs | None]]]:
    """The tokens of each output, and the logprobs of its prompt and of its tokens, one behind the other."""
    for number, (prompt, params) in enumerate(requests):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    tokens: dict[tuple[int, int], list[int]] = {}
    rows: dict[tuple[int, int], list[RowLogprobs | None]] = {}
    for output in drain(engine):
        assert output.finish_reason != "error", output
        key = int(output.request_id), output.index
        tokens.setdefault(key, []).extend(output.token_ids)
        rows.setdefault(key, []).extend((*(output.prompt_logprobs or ()), *output.logprobs))
    return tokens, rows


@functools.cache
def expected_report() -> Any:
    with mock.patch.object(machine, "has_gpu_kernels", HAS_GPU_KERNELS):
        engine = make_engine("qwen3")
    return report(engine, ASKING)


def check_report(engine: Engine) -> None:
    """Raise unless an engine reports of `ASKING` what the CPU's does: the ids, and their logprobs nearly."""
    (tokens, rows), (known_tokens, known_rows) = report(engine, ASKING), expected_report()
    assert tokens == known_tokens
    assert sorted(rows) == sorted(known_rows)
    for key, known in known_rows.items():
        assert len(rows[key]) == len(known)
        for row, wanted in zip(rows[key], known, strict=True):
            assert (row is None) == (wanted is None)
            if row is None:
                continue
            assert (row.token_id, row.rank, len(row.top)) == (wanted.token_id, wanted.rank, len(wanted.top))
            assert row.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [i for i, _ in row.top] == [i for i, _ in wanted.top]
            assert [v for _, v in row.top] == pytest.approx([v for _, v in wanted.top], abs=1e-4)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)


def make_device_engine(family: str, **knobs: Any) -> Engine:
    engine = make_engine(family, **knobs)
    assert isinstance(engine._device, GpuDevice)
    return engine


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("family", "use_overlap"), thinned(FAMILIES + MORE_FAMILIES, (True, False), keep=3))
def test_state_on_the_device_changes_no_token(family: str, use_overlap: bool) -> None:
    engine = make_device_engine(family, use_overlap=use_overlap)
    assert engine._steps_ahead == (CPU.steps.steps_ahead if use_overlap else 0)
    assert run_engine(engine, PLAIN) == expected(family, False)


@pytest.mark.usefixtures("on_device")
def test_only_a_small_model_has_several_steps_ahead() -> None:
    with using_profile(replace(CPU, steps=replace(CPU.steps, small_weights=100))):
        assert make_device_engine("llama")._steps_ahead == 1
        assert make_device_engine("llama", use_overlap=False)._steps_ahead == 0
        assert make_device_engine("llama", kv_cache_backend="naive")._steps_ahead == 0


STARTS = [prompt[:20] for prompt, _ in PLAIN]
STOPS = [STARTS[0], STARTS[1], STARTS[0] + STARTS[2][:3], STARTS[4], STARTS[0][:5] + STARTS[3]]


def run_with_leavers(engine: Engine) -> list[list[int]]:
    """Prompts that start alike, ends at ids that are known late, one that leaves, one that comes late."""
    tokens: list[list[int]] = [[] for _ in range(len(STOPS) + 1)]

    def add(number: int, prompt: list[int]) -> None:
        params = SamplingParams(
            temperature=float(number % 2),
            frequency_penalty=0.5 * (number % 3),
            seed=number,
            max_tokens=24,
            stop_token_ids=(*range(number, 256, 11),),
        )
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))

    def take(outputs: list[StepOutput]) -> None:
        for output in outputs:
            tokens[int(output.request_id)] += output.token_ids
        assert engine.scheduler.pool.audit_blocks() == []

    for number, prompt in enumerate(STOPS):
        add(number, prompt)
    while len(tokens[4]) < 4 and engine.is_serving("4"):
        take(engine.step())
    add(5, STARTS[5])
    while engine.has_work:
        if len(tokens[1]) >= 5:
            take(engine.abort("1"))
        take(engine.step())
    tokens[1] = tokens[1][:5]  # those that were on their way when it left are its own, or lost
    return tokens


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    "knobs", [{}, {"block_size": 2, "num_blocks": 36, "preemption": "recompute"}], ids=str
)
def test_steps_ahead_change_no_token(knobs: dict[str, Any]) -> None:
    found = {}
    for steps_ahead in (0, 1, 3):
        with using_profile(replace(CPU, steps=replace(CPU.steps, steps_ahead=steps_ahead))):
            engine = make_device_engine("qwen3", **knobs)
        assert engine._steps_ahead == steps_ahead
        found[steps_ahead] = run_with_leavers(engine)
        assert bool(engine.scheduler.num_preemptions) is bool(knobs)
    assert found[0] == found[1] == found[3]
    assert len({len(tokens) for tokens in found[0]}) > 3, "they stop at ids"


class LateDevice:
    """Whatever is sent or launched runs as late as it may: when a step's ids are waited for.

    On a CPU nothing is copied on the way, so a write to memory that was sent would change what arrives.
    """

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        self.longest = 0
        for module, name in (
            (device_rows, "enter_rows"),
            (device_rows, "apply_table_diffs"),
            (device_rows, "advance_rows"),
            (device_rows, "send_into"),
            (device_masks, "send_into"),
            (step_inputs, "send_into"),
        ):
            monkeypatch.setattr(module, name, self.later(getattr(module, name)))
        for name in ("forward", "sample"):
            monkeypatch.setattr(device.graphs, name, self.later(getattr(device.graphs, name)))
        monkeypatch.setattr(device._readback, "take", self.take)
        for steps, name in (
            (device._ragged, "start"),
            (device._sized, "start_mixed"),
        ):  # these compute at once
            monkeypatch.setattr(steps, name, self.at_once(getattr(steps, name)))

    def later(self, work: Callable[..., object]) -> Callable[..., None]:
        return lambda *args: self.queue.append(functools.partial(work, *args))

    def at_once(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.catch_up(len(self.queue))
            sample = work(*args)
            self.catch_up(len(self.queue))
            return sample

        return run

    def take(self, step: int, ids_S: torch.Tensor, num_rows: int, asked: None = None) -> PendingIds:
        assert asked is None, "logprobs would be of logits that are not there yet"
        buffer = torch.zeros(len(ids_S), dtype=torch.int64)
        work = functools.partial(buffer.copy_, ids_S)
        self.queue.append(work)
        event = SimpleNamespace(synchronize=lambda: self.arrive(work))
        return PendingIds(step, PendingTensor(buffer, event), num_rows, num_kept)  # type: ignore[arg-type]

    def arrive(self, work: Callable[[], object]) -> None:
        self.longest = max(self.longest, len(self.queue))
        if work in self.queue:
            self.catch_up(self.queue.index(work) + 1)

    def catch_up(self, count: int) -> None:
        for work in self.queue[:count]:
            work()
        del self.queue[:count]


@pytest.mark.usefixtures("on_device")
def test_a_device_that_is_late_gets_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    known, asked = (
        run_with_leavers(make_device_engine("qwen3", block_size=2)),
        run_on_cpu("qwen3", ASKING[:4]),
    )
    engine = make_device_engine("qwen3", block_size=2)
    with torch.inference_mode(), monkeypatch.context() as patch:
        late = LateDevice(engine._device, patch)
        assert run_with_leavers(engine) == known
        assert run_engine(engine, PLAIN) == expected("qwen3", False), "a request leaves in every step"
        assert run_engine(engine, ASKING[:4]) == asked, "counted where they are sampled"
    assert late.longest > 3 * 2


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("knobs", thinned(ASKING_KNOBS, keep=2))
def test_penalties_biases_bans_and_logprobs_are_those_of_the_cpu(knobs: dict[str, Any]) -> None:
    engine = make_device_engine("qwen3", **knobs)
    check_report(engine)
    assert bool(engine.scheduler.num_preemptions) is ("num_blocks" in knobs)


def allow(request_id: str, position: int) -> set[int] | None:
    """Other ids at every position for half of the requests, some of which are free now and then."""
    number = int(request_id)
    if number % 2 or number % 4 == 0 and position % 3 == 1:
        return None
    return {299, *range((number + position) % 7, 300, 5 + 11 * (number % 3))}


@functools.cache
def expected_under_masks() -> Any:
    with mock.patch.object(machine, "has_gpu_kernels", HAS_GPU_KERNELS):
        engine = make_engine("qwen3")
    mask_steps(engine, allow)
    return report(engine, ASKING)[0]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("knobs", thinned(({}, *ASKING_KNOBS), keep=2))  # the others than above, and none
def test_rows_under_masks_have_the_tokens_of_the_cpu(knobs: dict[str, Any]) -> None:
    """Beside rows that have none: those have the tokens that they would have alone."""
    engine = make_device_engine("qwen3", **knobs)
    counts = mask_steps(engine, allow)
    tokens, known = report(engine, ASKING)[0], expected_under_masks()
    assert tokens == known
    free = expected_report()[0]
    for (number, index), ids in tokens.items():
        allowed = [allow(str(number), position) for position in range(len(ids))]
        assert all(a is None or token_id in a for token_id, a in zip(ids, allowed, strict=True))
        assert (ids == free[number, index]) is (number % 2 == 1)
    assert 0 in counts and max(counts) > 1
    assert bool(engine.scheduler.num_preemptions) is ("num_blocks" in knobs)


@pytest.mark.usefixtures("on_device")
def test_steps_under_masks_are_sized_and_overlap() -> None:
    engine = make_device_engine("qwen3")
    device: Any = engine._device
    device._ragged.start = ragged = mock.Mock(wraps=device._ragged.start)
    mask_steps(engine, lambda request_id, position: (7, 11))
    engine.add(Request(request_id="0", prompt=tuple(PLAIN[0][0]), params=make_params(9)))
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(len(engine._flights))
    assert max(depths) == CPU.steps.steps_ahead and ragged.call_count == 0


@pytest.mark.usefixtures("on_device")
def test_a_beam_search_beside_penalties_changes_no_token() -> None:
    """Its steps are sampled on the host, where the device counts nothing; those behind it are not."""
    beams = (PLAIN[2][0], SamplingParams(temperature=0.0, use_beam_search=True, n=2, max_tokens=3))
    requests = [ASKING[0], ASKING[1], beams, ASKING[6]]
    assert run_engine(make_device_engine("qwen3"), requests) == run_on_cpu("qwen3", requests)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 6])
def test_steps_overlap_whatever_a_request_asks_of_the_sampler(number: int) -> None:
    """And they are sized steps, which a GPU has graphs of, but for a prompt whose logprobs are asked for."""
    engine, (prompt, params) = make_device_engine("qwen3"), ASKING[number]
    device: Any = engine._device
    engine.add(Request(request_id="plain", prompt=(1, 2, 3), params=make_params(9)))
    engine.step()
    engine.add(Request(request_id="asks", prompt=tuple(prompt), params=params))
    depths: list[int] = []
    ragged = mock.Mock(wraps=device._ragged.start)
    device._ragged.start = ragged
    while engine.is_serving("asks") and len(depths) < 7:
        engine.step()
        depths.append(len(engine._flights))
    assert max(depths) == CPU.steps.steps_ahead
    assert 0 not in depths
    assert ragged.call_count == int(params.prompt_logprobs is not None)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("use_overlap", [True, False])
def test_requests_that_are_sampled_on_the_host_go_side_by_side(use_overlap: bool) -> None:
    """Forks and beams among plain requests."""
    engine = make_device_engine("qwen3", use_overlap=use_overlap)
    assert run_engine(engine, PLAIN + ON_HOST) == expected("qwen3", True)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    "knobs",
    [
        {"preemption": "recompute"},
        {"preemption": "swap", "swap_blocks": 40},
        {"preemption": "recompute", "use_prefix_caching": False},
    ],
    ids=str,
)
def test_preemption_changes_no_token(knobs: dict[str, Any]) -> None:
    """Rows are given back and entered again, tokens are sent anew."""
    engine = make_device_engine("llama", block_size=2, num_blocks=30, prefill_chunk_size=5, **knobs)
    assert run_engine(engine, PLAIN) == expected("llama", False)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    "knobs",
    [
        {"kv_cache_backend": "contiguous", "max_batch_size": 3},
        {"batching_mode": "static", "max_batch_size": 4},
        {"kv_cache_backend": "naive"},
        {"scheduler_policy": "prefill_first", "max_batch_size": 4, "prefill_chunk_size": 3},
        {"prefill_chunk_size": 1},  # one token of a prompt is no row that decodes
        {"max_num_batched_tokens": 11, "max_batch_size": 8},
        {"prefill_tokens_while_decoding": 4, "max_batch_size": 4},
        {"kv_cache_backend": "contiguous", "max_seq_len": 100},
    ],
    ids=str,
)
def test_toggles_change_no_token(knobs: dict[str, Any]) -> None:
    assert run_engine(make_device_engine("llama", **knobs), PLAIN) == expected("llama", False)


@pytest.mark.usefixtures("on_device")
def test_a_request_for_the_host_may_leave_before_its_first_step_is_read() -> None:
    """The others of that step were sampled on the host too: the device does not have their tokens."""
    engine = make_device_engine("llama")
    (prompt, params), tokens = PLAIN[9], list[int]()
    engine.add(Request(request_id="stays", prompt=tuple(prompt), params=params))
    for _ in range(3):
        tokens += [i for output in engine.step() for i in output.token_ids]
    asks = SamplingParams(temperature=0.0, n=2, max_tokens=20, ignore_eos=True)
    engine.add(Request(request_id="leaves", prompt=tuple(PLAIN[1][0]), params=asks))
    tokens += [i for output in engine.step() if output.request_id == "stays" for i in output.token_ids]
    engine.abort("leaves")
    while engine.has_work:
        tokens += [i for output in engine.step() for i in output.token_ids]
    assert [tokens] == expected("llama", False)[9]


@pytest.mark.usefixtures("on_device")
def test_a_batch_that_goes_on_is_not_looked_at_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come or go are noticed; as long as none does, only new blocks are sent."""
    engine = make_device_engine("llama", block_size=4)
    device: Any = engine._device
    looked_at: list[int] = []
    apply = device.rows.apply

    def look(order: StepOrder) -> None:
        looked_at.append(order.step)
        apply(order)

    monkeypatch.setattr(device.rows, "apply", look)
    requests = [(prompt[:8], SamplingParams(temperature=0.0, max_tokens=20)) for prompt, _ in PLAIN[:2]]
    requests += [(PLAIN[3][0][:8], SamplingParams(temperature=0.0, max_tokens=12))]
    assert run_engine(engine, requests) == run_on_cpu("llama", requests)
    assert len(looked_at) <= 4, "prompts, the first step that decodes, and when one of three has left"
    assert engine.scheduler.step > 20


def warm_up_of(engine: Engine) -> WarmUp:
    """What prepares the device half of an engine."""
    device: Any = engine._device
    warm_up = device.graphs.warm_up.__self__
    assert isinstance(warm_up, WarmUp)
    return warm_up


@pytest.mark.usefixtures("on_device")
def test_padding_ahead_of_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all sizes run, with and without rows; the cache stays as it was."""
    engine = make_device_engine("llama", max_num_batched_tokens=1500)
    device: Any = engine._device
    sizes: list[int] = []
    forward, warm_up = device.launcher.forward, warm_up_of(engine)

    def note(model: Model, num_tokens: int, *others: Any, **named: Any) -> torch.Tensor:
        sizes.append(num_tokens)
        hidden_TD: torch.Tensor = forward(model, num_tokens, *others, **named)
        return hidden_TD

    monkeypatch.setattr(device.launcher, "forward", note)
    monkeypatch.setattr(warm_up, "_pads", True)  # as on a GPU
    while engine.prepare():
        pass
    assert sizes[:5] == [512, 768, 1032, 1288, 1500]
    assert len(sizes[5:]) == len([*device.rare_orders()])
    assert list(warm_up.phases) == ["compile", "try", "capture"]
    assert all(bool(part.isnan().all()) for part in (*device.store.keys, *device.store.values))
    assert run_engine(engine, PLAIN) == expected("llama", False)


@pytest.mark.usefixtures("on_device")
def test_padding_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_device_engine("llama")
    device: Any = engine._device
    monkeypatch.setattr(warm_up_of(engine), "_pads", True)
    with monkeypatch.context() as starved:
        no_room = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
        starved.setattr(device.launcher, "forward", no_room)
        while engine.prepare():
            pass
    assert run_engine(engine, PLAIN) == expected("llama", False)


@pytest.mark.usefixtures("on_device")
def test_steps_of_prompts_alone_are_padded_to_sizes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_of_few = replace(CPU.graphs, mixed_tokens=(4, 8), prompt_tokens=(12, 20, 40, 80))
    long = [(prompt, params) for prompt, params in PLAIN if len(prompt) > 8]
    with using_profile(replace(CPU, graphs=sizes_of_few)):
        engine = make_device_engine("qwen3", max_batch_size=2)
    device: Any = engine._device
    sizes: set[graphs.StepSize] = set()
    forward = device.graphs._forward

    def note(size: graphs.StepSize) -> torch.Tensor:
        sizes.add(size)
        logits_SV: torch.Tensor = forward(size)
        return logits_SV

    monkeypatch.setattr(device.graphs, "_forward", note)
    assert run_engine(engine, long) == run_on_cpu("qwen3", long)
    assert max(size.num_tokens for size in sizes if size.num_rows == 0) > 8
    assert max(size.num_tokens for size in sizes if size.num_rows) <= 8


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("late", [{"n": 2, "seed": 1}, {"use_beam_search": True, "n": 2, "temperature": 0.0}])
def test_a_fork_that_arrives_between_steps_changes_no_penalty(late: dict[str, Any]) -> None:
    """Its first step is drawn on the host, which must know every token of the rows that count theirs."""
    counted = SamplingParams(  # two ids take turns: the one that is counted less
        temperature=0.0, frequency_penalty=2.0, logit_bias={5: 50.0, 6: 49.0}, max_tokens=14, ignore_eos=True
    )
    known = run_engine(make_device_engine("llama"), [([5, 6, 7], counted)])[0][0]
    for num_before in range(3, 9):
        engine = make_device_engine("llama")
        engine.add(Request(request_id="counted", prompt=(5, 6, 7), params=counted))
        outputs = [output for _ in range(num_before) for output in engine.step()]
        engine.add(Request(request_id="late", prompt=(9, 8), params=SamplingParams(**late, max_tokens=4)))
        outputs += drain(engine)
        made = [id_ for output in outputs if output.request_id == "counted" for id_ in output.token_ids]
        assert made == known, num_before


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("family", thinned(FAMILIES + MORE_FAMILIES, keep=2))
def test_rare_orders_of_padding_run_and_leave_the_tokens_as_they_are(family: str) -> None:
    """Each can run, or the warm-up would only log that it cannot; what follows is not changed by it."""
    engine = make_device_engine(family)
    device = engine._device
    assert isinstance(device, GpuDevice)
    results = [device.run_half(order, masks) for order, masks in device.rare_orders()]
    assert len(results) == 8
    assert sum(bool(result.prompt_logprobs) for result in results) == 3
    assert sum(bool(result.pooled) for result in results) == 2
    assert [len(result.ids[0]) for result in results] == [1, 1, 1, 1, 2, 2, 0, 0]
    assert run_engine(engine, PLAIN + ON_HOST) == expected(family, True)
