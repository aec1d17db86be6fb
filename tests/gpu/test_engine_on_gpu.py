"""The engine on a GPU: the same greedy tokens as on the CPU, for every family, whatever the toggles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer import LLM, SamplingParams
from infer.errors import InferError
from infer.execution.gpu.graphs import StepGraphs, StepSize
from infer.kernels.linear import compiled as compiled_linears
from infer.kernels.linear import pdl
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime.profiles import device_profile, using_profile
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "olmoe",
    "gpt_oss",
    "gpt2",
)
EVERYTHING = ("qwen3", "gemma3")  # one group of layers, and several; the other families share the rest
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
TOGGLES: list[dict[str, Any]] = [
    {"kv_cache_backend": "contiguous"},
    {"kv_cache_backend": "naive"},
    {"attention_backend": "naive"},
    {"attention_backend": "triton"},
    {"attention_backend": "flash"},
    {"attention_backend": "sdpa"},
    {"attention_backend": "sdpa", "decode_attention_backend": "torch_ref"},
    {"decode_attention_backend": "torch_ref"},
    {"decode_attention_backend": "triton"},
    {"mlp_backend": "torch_ref"},
    {"attention_backend": "torch_ref", "mlp_backend": "torch_ref"},
    {"use_cuda_graphs": False},
    {"use_overlap": False},
    {"use_cuda_graphs": False, "use_overlap": False},
    {"max_batch_size": 3},
    {"block_size": 4, "num_blocks": 24, "preemption": "recompute"},
    {"block_size": 4, "num_blocks": 24, "preemption": "swap", "swap_blocks": 40},
    {"prefill_chunk_size": 5, "use_prefix_caching": False},
    {"deterministic": True},
    {"deterministic": True, "use_cuda_graphs": False, "max_batch_size": 3},
]


def toggles_of(family: str) -> list[dict[str, Any]]:
    """All of them, or every third: the other families take turns, so that two of them have each."""
    some = TOGGLES if family in EVERYTHING else TOGGLES[FAMILIES.index(family) % 3 :: 3]
    refused = ("flash",) if family in ("gemma2", "gpt_oss") else ()  # which has neither soft caps nor sinks
    return [knobs for knobs in some if knobs.get("attention_backend") not in refused]


def tokens_of(directory: str, device: str, *asked: SamplingParams, **knobs: Any) -> list[list[list[int]]]:
    llm = LLM(directory, device=device, dtype="float32", **(FEW_SIZES | knobs))
    return [[answer.token_ids for answer in llm.generate(PROMPTS, params)] for params in asked]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def make(family: str) -> str:
        make_checkpoint(family, root / family)
        return str(root / family)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_makes_the_tokens_of_the_cpu(family: str, checkpoints: Callable[[str], str]) -> None:
    """Greedy ones whatever the toggles, and with a seed those that are sampled."""
    directory = checkpoints(family)
    greedy, seeded = tokens_of(directory, "cpu", GREEDY, SEEDED)
    assert tokens_of(directory, "cuda", GREEDY, SEEDED) == [greedy, seeded]
    for knobs in toggles_of(family):
        assert tokens_of(directory, "cuda", GREEDY, **knobs) == [greedy], knobs


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_sequences_far_longer_than_their_windows(tmp_path: Path, family: str) -> None:
    """Blocks behind a window are freed and given to others while prompts and outputs grow."""
    make_checkpoint(family, tmp_path, sizes=Sizes(num_layers=5, context_len=512, window=24))
    prompts = [
        [(11 * i + 7 * j) % 200 + 10 for j in range(length)] for i, length in enumerate((300, 5, 170, 90))
    ]
    prompts.append(prompts[0][:250] + prompts[1])  # begins alike, far beyond the window
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    small: dict[str, Any] = {"block_size": 16, "prefill_chunk_size": 32, "max_batch_size": 4}
    small["num_blocks"] = {"mistral": 14}.get(family, 60)

    def tokens_on(device: str, **more: Any) -> list[list[int]]:
        llm = LLM(str(tmp_path), device=device, dtype="float32", **(FEW_SIZES | more))
        return [answer.token_ids for answer in llm.generate(prompts, params)]

    expected = tokens_on("cpu", kv_cache_backend="contiguous")
    variants: list[dict[str, Any]] = [
        {},
        {"use_cuda_graphs": False},
        {"deterministic": True},
        {"attention_backend": "triton"},
    ]
    for knobs in variants:
        assert tokens_on("cuda", **small, **knobs) == expected, knobs


@pytest.mark.parametrize("family", EVERYTHING)
def test_steps_ahead_change_no_token(family: str, checkpoints: Callable[[str], str]) -> None:
    """Prompts that come while others decode, ends at ids that the host learns late, a cache too small."""
    ends = tuple(range(0, 256, 16))
    params = [
        SamplingParams(
            temperature=number % 2, seed=number, max_tokens=40, stop_token_ids=ends * (number % 3 > 0)
        )
        for number in range(12)
    ]
    prompts = [PROMPTS[number % 5][: 3 + number] + [number] for number in range(12)]
    known: list[list[int]] = []
    own = device_profile(torch.device("cuda"))
    for num_blocks in (None, 40):
        for steps_ahead in (0, 1, 3):
            knobs: dict[str, Any] = {"block_size": 4, "num_blocks": num_blocks, **FEW_SIZES}
            steps = dataclasses.replace(own.steps, steps_ahead=steps_ahead)
            with using_profile(dataclasses.replace(own, steps=steps)):
                llm = LLM(checkpoints(family), device="cuda", dtype="float32", **knobs)
            assert llm.engine._steps_ahead == steps_ahead
            for _ in range(3):  # the first captures its graphs on the way
                answers = [answer.token_ids for answer in llm.generate(prompts, params)]
                known = known or answers
                assert answers == known, (steps_ahead, num_blocks)
            assert llm.engine.scheduler.pool.audit_blocks() == []


@pytest.fixture(scope="module")
def qwen3(checkpoints: Callable[[str], str]) -> str:
    return checkpoints("qwen3")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])  # the last has windows
def test_attention_in_cuda_makes_the_tokens_of_triton(family: str, tmp_path: Path) -> None:
    """Heads of 64 in float16; two tokens may change places where their logits are a rounding apart."""
    make_checkpoint(family, tmp_path / family, sizes=Sizes(hidden_size=256))
    own = device_profile(torch.device("cuda"))
    tuned = dataclasses.replace(own.attention, projected_heads=4)  # two rows are few, more are many

    def generate(backend: str, params: SamplingParams, **knobs: Any) -> list[Any]:
        how: dict[str, Any] = FEW_SIZES | {"max_batch_size": 4, "attention_backend": backend} | knobs
        with using_profile(dataclasses.replace(own, attention=tuned)):
            llm = LLM(str(tmp_path / family), device="cuda", dtype="float16", **how)
            device: Any = llm.engine._device
            assert device.launcher.attention.work.backend == backend
            return llm.generate(PROMPTS, params)

    known = generate("triton", dataclasses.replace(GREEDY, logprobs=5))
    for backend in ("auto", "cuda"):
        assert_same_tokens(generate(backend, GREEDY), known, tolerance=0.02)
    for backend in ("triton", "cuda"):
        assert_same_tokens(generate(backend, GREEDY, use_cuda_graphs=False), known, tolerance=0.02)


def assert_same_tokens(answers: list[Any], known: list[Any], *, tolerance: float) -> None:
    """Of greedy answers; `known` say what was likely where they part, which may be a rounding's doing."""
    for answer, expected in zip(answers, known, strict=True):
        pairs = zip(answer.token_ids, expected.token_ids, expected.outputs[0].logprobs or (), strict=True)
        for token, wanted, row in pairs:
            if token != wanted:
                likely = dict(row.top)
                assert likely[wanted] - likely[token] < tolerance, (token, wanted)
                break


@pytest.mark.parametrize(
    ("family", "use_cuda_graphs"),
    [("llama", False), ("qwen3", True), ("qwen2", False), ("gemma3", True), ("gpt2", True)],
)
def test_linears_that_hold_their_weights_early_make_the_tokens_of_triton(
    family: str, use_cuda_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and five; with and without a bias, and with norms between that are launches of their own."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    make_checkpoint(family, tmp_path / family, sizes=Sizes(hidden_size=256))

    def generate(params: SamplingParams) -> tuple[list[Any], int]:
        launches = Mock(wraps=pdl.launch)
        with monkeypatch.context() as patch:
            patch.setattr(pdl, "launch", launches)
            how: dict[str, Any] = FEW_SIZES | {"use_cuda_graphs": use_cuda_graphs}
            llm = LLM(str(tmp_path / family), device="cuda", dtype="bfloat16", **how)
            answers = [*llm.generate(PROMPTS[:1], params), *llm.generate(PROMPTS, params)]
        return answers, launches.call_count

    ours, num_launches = generate(GREEDY)
    assert num_launches > 0
    monkeypatch.setattr(compiled_linears, "is_for", lambda device: False)
    known, num_launches = generate(dataclasses.replace(GREEDY, logprobs=5))
    assert num_launches == 0
    assert_same_tokens(ours, known, tolerance=0.15)


def test_a_thousand_greedy_decodes_are_the_same_bits(qwen3: str) -> None:
    """Races between kernels show as a token that changes from run to run."""
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", use_prefix_caching=False, **FEW_SIZES)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    first = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
    for _ in range(1000 // len(PROMPTS)):
        assert [answer.token_ids for answer in llm.generate(PROMPTS, params)] == first


def test_nothing_is_compiled_once_everything_is_prepared(tmp_path: Path) -> None:
    """Batches of every size, prompts of all lengths alone and beside others, all ways to sample: at once."""
    make_checkpoint("qwen3", tmp_path, sizes=Sizes(context_len=4096))
    knobs: dict[str, Any] = {"max_batch_size": 24, "max_num_batched_tokens": 4096}
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", **knobs)
    while llm.engine.prepare():
        pass
    graphs = len(llm.engine._device.graphs._graphs)  # type: ignore[attr-defined]
    lengths = [1, 2, 15, 16, 17, 33, 100, 128, 300, 512, 513, 700, 1024, 1300, 2047, 2048, 2500, 3333, 4000]
    with count_compilations() as compiled:
        for count in (1, 2, 3, 5, 8, 13, 17, 24):
            for extra in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
                prompts = [[5 + i + count] * lengths[(3 * i + count) % len(lengths)] for i in range(count)]
                params = [
                    SamplingParams(max_tokens=3 + i % 9, ignore_eos=True, seed=1, **extra)
                    for i in range(count)
                ]
                llm.generate(prompts, params)
    assert compiled == []
    assert len(llm.engine._device.graphs._graphs) == graphs  # type: ignore[attr-defined]


def test_prompts_from_a_graph_have_the_tokens_of_prompts_that_are_launched(tmp_path: Path) -> None:
    """Of small models, steps of prompts alone are captured; alone and several, whole and behind a prefix."""
    make_checkpoint("qwen3", tmp_path, sizes=Sizes(context_len=4096))
    prompts = [[(7 * i + j) % 200 + 10 for j in range(length)] for i, length in enumerate((600, 650, 1500))]
    batches = [*([prompt] for prompt in prompts), prompts, [prompts[2] + prompts[0]]]

    def tokens(*, prepared: bool, **knobs: Any) -> list[list[list[int]]]:
        knobs |= {"max_batch_size": 4, "max_num_batched_tokens": 4096}
        llm = LLM(str(tmp_path), device="cuda", dtype="float32", **knobs)
        while prepared and llm.engine.prepare():
            pass
        device: Any = llm.engine._device
        assert (StepSize(0, 640) in device.graphs._graphs) is prepared
        return [[answer.token_ids for answer in llm.generate(batch, GREEDY)] for batch in batches]

    assert tokens(prepared=True) == tokens(prepared=False) == tokens(prepared=False, use_cuda_graphs=False)


def test_a_short_step_from_a_graph_has_the_tokens_of_one_that_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model in the place of a large one: 960 tokens of prompts beside a row that decodes."""
    make_checkpoint("qwen3", tmp_path, sizes=Sizes(context_len=4096))
    own = device_profile(torch.device("cuda"))
    profile = dataclasses.replace(
        own,
        graphs=dataclasses.replace(own.graphs, launched_layer=1, short_parts=2),
        steps=dataclasses.replace(own.steps, small_mixed_tokens=960, small_busy_tokens=1024),
    )
    prompts = [[(7 * i + j) % 200 + 10 for j in range(length)] for i, length in enumerate((10, 2040, 1500))]
    taken: list[StepSize | None] = []
    size_for = StepGraphs.size_for

    def spy(self: StepGraphs, num_rows: int, num_tokens: int) -> StepSize | None:
        taken.append(size_for(self, num_rows, num_tokens))
        return taken[-1]

    monkeypatch.setattr(StepGraphs, "size_for", spy)

    def tokens(*, prepared: bool) -> list[list[int]]:
        knobs: dict[str, Any] = {"max_batch_size": 64, "max_num_batched_tokens": 2048}
        with using_profile(profile):
            llm = LLM(str(tmp_path), device="cuda", dtype="float32", **knobs)
            while prepared and llm.engine.prepare():
                pass
        return [answer.token_ids for answer in llm.generate(prompts, GREEDY)]

    launched = tokens(prepared=False)
    assert StepSize(32, 992) not in taken  # it is not captured while others wait
    assert tokens(prepared=True) == launched
    assert StepSize(32, 992) in taken


def test_out_of_memory_ends_the_request_and_not_the_engine(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(qwen3, device="cuda", dtype="float32", **FEW_SIZES)
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    device: Any = llm.engine._device
    real = device._sized.start_decode

    def starve(*args: Any, **kwargs: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(device._sized, "start_decode", starve)
    with pytest.raises(InferError, match="OutOfMemoryError"):
        llm.generate([[1, 2, 3, 4]], GREEDY)
    monkeypatch.setattr(device._sized, "start_decode", real)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bfloat16") for family in FAMILIES), ("qwen3", "float32")]
)
def test_deterministic_numbers_do_not_depend_on_the_batch(
    family: str, dtype: str, checkpoints: Callable[[str], str]
) -> None:
    """Alone, together, in chunks of a prompt, preempted: the same log-probabilities to the last bit."""
    asking = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)

    def build(**knobs: Any) -> LLM:
        knobs |= {"deterministic": True, **FEW_SIZES}
        return LLM(checkpoints(family), device="cuda", dtype=dtype, **knobs)

    def numbers(llm: LLM, *batches: list[list[int]]) -> list[Any]:
        answers = [answer for batch in batches for answer in llm.generate(batch, asking)]
        return [(a.token_ids, [row.logprob for row in a.outputs[0].logprobs or ()]) for a in answers]

    alone = numbers(build(use_prefix_caching=False), *([prompt] for prompt in PROMPTS))
    variants: list[dict[str, Any]] = [{}, {"prefill_chunk_size": 5}, {"block_size": 4, "num_blocks": 24}]
    for knobs in variants:
        llm = build(**knobs)
        assert numbers(llm, PROMPTS) == alone, knobs
        found = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        assert found == [ids for ids, _ in alone], knobs


def test_graphs_of_an_engine_that_is_gone_do_not_spoil_a_capture(qwen3: str) -> None:
    """Garbage that holds graphs, and a collector that runs at every turn."""

    class Cycle:
        def __init__(self) -> None:
            self.self, self.graph = self, torch.cuda.CUDAGraph()
            work = torch.zeros(8, device="cuda")
            work += 1
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                work += 1

    thresholds = gc.get_threshold()
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", **FEW_SIZES)
    gc.disable()
    try:
        for _ in range(3):
            Cycle()
        gc.set_threshold(1)
        gc.enable()
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) > 1
        device: Any = llm.engine._device
        assert not device.graphs._uncaptured
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


@pytest.mark.usefixtures("real_freezing")
def test_an_engine_is_frozen_while_it_lives_and_its_memory_comes_back(qwen3: str) -> None:
    def build() -> LLM:
        return LLM(qwen3, device="cuda", dtype="bfloat16", **FEW_SIZES)

    first = build()  # libraries get what they keep for themselves, such as memory for every stream
    while first.engine.prepare():
        pass
    del first
    gc.unfreeze()
    gc.collect()
    always = gc.get_freeze_count()  # Python's own immortal objects, from 3.12 on
    before = torch.cuda.memory_allocated()
    llm = build()
    built = gc.get_freeze_count()
    while llm.engine.prepare():
        pass
    assert always < built < gc.get_freeze_count()
    held = torch.cuda.memory_allocated()
    del llm
    gc.collect()
    assert gc.get_freeze_count() == always
    assert torch.cuda.memory_allocated() - before < (held - before) / 10


def test_a_prepared_engine_needs_no_more_memory_for_a_prompt(qwen3: str) -> None:
    """Neither does the capture of a graph give away what was there."""
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", **FEW_SIZES)
    while llm.engine.prepare():
        pass
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(2):
        llm.generate([[9] * 100], GREEDY)
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocations


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of the kernels that Triton compiles meanwhile, and of the files in CUDA C++."""
    import triton

    compiled: list[str] = []
    before, make_cubin = triton.knobs.runtime.jit_post_compile_hook, build.make_cubin

    def count(source: Path, arch: str, defines: Mapping[str, int]) -> bytes:
        compiled.append(f"{source.name} {defines}")
        return make_cubin(source, arch, defines)

    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **facts: compiled.append(
        str(facts.get("repr"))
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "make_cubin", count)
            yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
