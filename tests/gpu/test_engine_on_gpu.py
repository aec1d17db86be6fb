"""The engine on a GPU: the same greedy tokens as on the CPU, for every family, whatever the toggles."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer import LLM, SamplingParams
from infer.config import resolve
from infer.errors import InferError
from infer.execution.gpu.graphs import StepSize
from infer.kernels.attention import decode
from infer.kernels.linear import compiled as compiled_linears
from infer.kernels.linear import pdl
from infer.kernels.runtime import cuda_build as build
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gpt2")
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TOGGLES: list[dict[str, Any]] = [
    {},
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


def tokens_of(directory: str, device: str, **knobs: Any) -> list[list[int]]:
    llm = LLM(directory, device=device, dtype="float32", **(FEW_SIZES | knobs))
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / str(request.param)
    make_checkpoint(request.param, directory)
    return str(directory)


def test_a_gpu_makes_the_tokens_of_the_cpu(checkpoint: str) -> None:
    expected = tokens_of(checkpoint, "cpu")
    for knobs in TOGGLES:
        assert tokens_of(checkpoint, "cuda", **knobs) == expected, knobs


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"use_cuda_graphs": False}, {"deterministic": True}, {"attention_backend": "triton"}],
    ids=str,
)
def test_sequences_far_longer_than_their_windows(tmp_path: Path, family: str, knobs: dict[str, Any]) -> None:
    """Blocks behind a window are freed and given to others while prompts and outputs grow."""
    make_checkpoint(family, tmp_path, sizes=Sizes(num_layers=5, context_len=512, window=24))
    prompts = [
        [(11 * i + 7 * j) % 200 + 10 for j in range(length)] for i, length in enumerate((300, 5, 170, 90))
    ]
    prompts.append(prompts[0][:250] + prompts[1])  # begins alike, far beyond the window
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    small: dict[str, Any] = {"block_size": 16, "prefill_chunk_size": 32, "max_batch_size": 4}
    small["num_blocks"] = {"mistral": 14, "gemma3": 60}[family]

    def tokens_on(device: str, **more: Any) -> list[list[int]]:
        llm = LLM(str(tmp_path), device=device, dtype="float32", **more)
        return [answer.token_ids for answer in llm.generate(prompts, params)]

    assert tokens_on("cuda", **small, **knobs) == tokens_on("cpu", kv_cache_backend="contiguous")


def test_sampling_with_a_seed_is_the_same_on_both(checkpoint: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    on_cpu = LLM(checkpoint, device="cpu", dtype="float32").generate(PROMPTS, params)
    on_gpu = LLM(checkpoint, device="cuda", dtype="float32", **FEW_SIZES).generate(PROMPTS, params)
    assert [a.token_ids for a in on_gpu] == [a.token_ids for a in on_cpu]


def test_steps_ahead_change_no_token(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for num_blocks in (None, 40):
        for steps_ahead in (0, 1, 3):
            monkeypatch.setattr(resolve, "STEPS_AHEAD", steps_ahead)
            knobs: dict[str, Any] = {"block_size": 4, "num_blocks": num_blocks, **FEW_SIZES}
            llm = LLM(checkpoint, device="cuda", dtype="float32", **knobs)
            assert llm.engine._steps_ahead == steps_ahead
            for _ in range(3):  # the first captures its graphs on the way
                answers = [answer.token_ids for answer in llm.generate(prompts, params)]
                known = known or answers
                assert answers == known, (steps_ahead, num_blocks)
            assert llm.engine.scheduler.pool.audit_blocks() == []


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / "qwen3"
    make_checkpoint("qwen3", directory)
    return str(directory)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])  # the last has windows
@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_attention_in_cuda_makes_the_tokens_of_triton(
    family: str, use_cuda_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 64 in float16; two tokens may change places where their logits are a rounding apart."""
    make_checkpoint(family, tmp_path / family, sizes=Sizes(hidden_size=256))
    monkeypatch.setattr(decode, "PROJECTED_HEADS", 4)  # two rows are few, more are many

    def generate(backend: str, params: SamplingParams) -> list[Any]:
        knobs: dict[str, Any] = {"attention_backend": backend, "use_cuda_graphs": use_cuda_graphs}
        llm = LLM(str(tmp_path / family), device="cuda", dtype="float16", max_batch_size=4, **knobs)
        runner: Any = llm.engine._runner
        assert runner._work.backend == backend
        return llm.generate(PROMPTS, params)

    known = generate("triton", dataclasses.replace(GREEDY, logprobs=5))
    for backend in ("triton", "auto", "cuda"):
        assert_same_tokens(generate(backend, GREEDY), known, tolerance=0.02)


def assert_same_tokens(answers: list[Any], known: list[Any], *, tolerance: float) -> None:
    """Of greedy answers; `known` say what was likely where they part, which may be a rounding's doing."""
    for answer, expected in zip(answers, known, strict=True):
        pairs = zip(answer.token_ids, expected.token_ids, expected.outputs[0].logprobs or (), strict=True)
        for token, wanted, row in pairs:
            if token != wanted:
                likely = dict(row.top)
                assert likely[wanted] - likely[token] < tolerance, (token, wanted)
                break


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("use_cuda_graphs", [True, False])
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
            llm = LLM(
                str(tmp_path / family), device="cuda", dtype="bfloat16", use_cuda_graphs=use_cuda_graphs
            )
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
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", use_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    first = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
    for _ in range(1000 // len(PROMPTS)):
        assert [answer.token_ids for answer in llm.generate(PROMPTS, params)] == first


def test_nothing_is_compiled_once_everything_is_prepared(tmp_path: Path) -> None:
    """Batches of every size, prompts of all lengths alone and beside others, all ways to sample: at once."""
    make_checkpoint("qwen3", tmp_path, sizes=Sizes(context_len=4096))
    llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", max_batch_size=24)
    while llm.engine.prepare():
        pass
    graphs = len(llm.engine._runner._graphs._graphs)  # type: ignore[attr-defined]
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
    assert len(llm.engine._runner._graphs._graphs) == graphs  # type: ignore[attr-defined]


def test_prompts_from_a_graph_have_the_tokens_of_prompts_that_are_launched(tmp_path: Path) -> None:
    """Of small models, steps of prompts alone are captured; alone and several, whole and behind a prefix."""
    make_checkpoint("qwen3", tmp_path, sizes=Sizes(context_len=4096))
    prompts = [[(7 * i + j) % 200 + 10 for j in range(length)] for i, length in enumerate((600, 650, 1500))]
    batches = [*([prompt] for prompt in prompts), prompts, [prompts[2] + prompts[0]]]

    def tokens(*, prepared: bool, **knobs: Any) -> list[list[list[int]]]:
        llm = LLM(str(tmp_path), device="cuda", dtype="float32", max_batch_size=4, **knobs)
        while prepared and llm.engine.prepare():
            pass
        runner: Any = llm.engine._runner
        assert (StepSize(0, 640) in runner._graphs._graphs) is prepared
        return [[answer.token_ids for answer in llm.generate(batch, GREEDY)] for batch in batches]

    assert tokens(prepared=True) == tokens(prepared=False) == tokens(prepared=False, use_cuda_graphs=False)


def test_out_of_memory_ends_the_request_and_not_the_engine(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(qwen3, device="cuda", dtype="float32")
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    runner: Any = llm.engine._runner
    real = runner._launch_decode

    def starve(*args: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(runner, "_launch_decode", starve)
    with pytest.raises(InferError):
        llm.generate([[1, 2, 3, 4]], GREEDY)
    monkeypatch.setattr(runner, "_launch_decode", real)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_numbers_do_not_depend_on_the_batch(checkpoint: str, dtype: str) -> None:
    """Alone, together, in chunks of a prompt, preempted: the same log-probabilities to the last bit."""
    asking = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)

    def numbers(params: SamplingParams, one_by_one: bool = False, **knobs: Any) -> list[Any]:
        llm = LLM(checkpoint, device="cuda", dtype=dtype, deterministic=True, **FEW_SIZES, **knobs)
        batches = [[prompt] for prompt in PROMPTS] if one_by_one else [PROMPTS]
        answers = [answer for batch in batches for answer in llm.generate(batch, params)]
        return [(a.token_ids, [row.logprob for row in a.outputs[0].logprobs or ()]) for a in answers]

    alone = numbers(asking, one_by_one=True, use_prefix_caching=False)
    variants: list[dict[str, Any]] = [{}, {"prefill_chunk_size": 5}, {"block_size": 4, "num_blocks": 24}]
    for knobs in variants:
        assert numbers(asking, **knobs) == alone, knobs
        assert [ids for ids, _ in numbers(GREEDY, **knobs)] == [ids for ids, _ in alone], knobs


def test_graphs_of_an_engine_that_is_gone_do_not_spoil_a_capture(checkpoint: str) -> None:
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
    llm = LLM(checkpoint, device="cuda", dtype="bfloat16", **FEW_SIZES)
    gc.disable()
    try:
        for _ in range(3):
            Cycle()
        gc.set_threshold(1)
        gc.enable()
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) > 1
        runner: Any = llm.engine._runner
        assert not runner._graphs._uncaptured
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_an_engine_is_frozen_while_it_lives_and_its_memory_comes_back(qwen3: str) -> None:
    def build() -> LLM:
        return LLM(qwen3, device="cuda", dtype="bfloat16", max_batch_size=4)

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
    llm = LLM(qwen3, device="cuda", dtype="bfloat16", max_batch_size=4)
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
