"""A model that several ranks share answers as one rank alone does, whatever its family, format and settings.

Ranks share layers (tensor parallelism), or each has some of them (pipeline parallelism), or both.

Ranks are threads here (tests/support/rank_threads.py); test_rank_processes.py has processes.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from random import Random
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch

from infer import LLM, SamplingParams
from infer.client import load
from infer.config.settings import LoadConfig
from infer.constraints.description import Structured
from infer.engine import machine, speculation_build
from infer.errors import ConfigError
from infer.execution.gpu import device as gpu_device
from infer.execution.gpu.graphs import StepGraphs, StepSize
from infer.execution.gpu.step_ids import StepIds
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.order import StepOrder
from infer.execution.rank_ring import RankMessage
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.loader import load as loader
from infer.loader import rank_placement
from infer.loader.find.source import resolve_model
from infer.loader.rank_placement import rank_device
from infer.models.registry import FAMILIES
from infer.scheduling.request import Request
from infer.speculative.adaptive import StepCosts
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support import gloo_ranks
from tests.support.checkpoints import UNCUT_FAMILIES, reference_model
from tests.support.rank_threads import RankThreads
from tests.support.thinned import thinned
from tests.unit.loader.tiny_files import write_gguf

SIZES = Sizes(hidden_size=128, vocab_size=300, num_layers=3, num_experts=3)  # two kv heads: four ranks repeat
PROMPTS = [list(range(5, 45)), [7, 8, 9, 7, 8, 9], [100, 200]]
COSTS = StepCosts(((1, 1e-3), (128, 4e-3)), gap_s=1e-9, is_ahead=True)  # drafts pay, if some are right
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=2)
STAGES = ((1, 2), (1, 3), (2, 2))  # ranks that share layers, stages
CUT_FAMILIES = [family.name for family in FAMILIES if family.name not in UNCUT_FAMILIES]
ROUNDED_FAMILIES = ("llama", "gemma3", "gpt2", "mixtral", "qwen3_moe", "qwen2_moe")
RECIPES = {
    "gptq": Recipe(scheme="gptq", group_size=32, symmetric=False),
    "gptq-act-order": Recipe(scheme="gptq", group_size=32, act_order=True, symmetric=False),
    "awq": Recipe(scheme="awq", group_size=32),
    "ct-w4a16": Recipe(scheme="ct-w4a16", group_size=32),
    "gptq-64": Recipe(scheme="gptq", group_size=64),
    "ct-int8": Recipe(scheme="ct-int8"),
    "fp8-channel": Recipe(scheme="fp8-channel"),
}


@pytest.fixture(autouse=True)
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RankProcesses", RankThreads)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def checkpoint(root: Path, family: str, recipe: str = "") -> Path:
    plain = root / family
    if not plain.exists():
        experts: dict[str, Any] = (
            {"moe_intermediate_size": 128} if family in ("qwen3_moe", "qwen2_moe") else {}
        )
        make_checkpoint(family, plain, sizes=SIZES, seed=3, **experts)
    path = root / f"{family}-{recipe}" if recipe else plain
    if not path.exists():
        quantize_checkpoint(resolve_model(str(plain)), path, RECIPES[recipe])
    return path


def answers(
    path: Path,
    size: int | tuple[int, int],
    params: SamplingParams = GREEDY,
    prompts: Any = PROMPTS,
    **knobs: Any,
) -> list[tuple[int, ...]]:
    """The ids of all outputs of a model that this many ranks share, or ranks and stages."""
    return [ids for ids, _ in outputs(path, size, params, prompts, **knobs)]


def outputs(
    path: Path, size: int | tuple[int, int], params: SamplingParams, prompts: Any = PROMPTS, **knobs: Any
) -> list[tuple[tuple[int, ...], Any]]:
    """Ids and whole outputs."""
    defaults: dict[str, Any] = {
        "device": "cpu", "quantization": "none", "kv_cache_memory": "4MiB", "max_seq_len": 96,
        "record_cpu_step": False,
    }  # fmt: skip
    num_ranks, num_stages = size if isinstance(size, tuple) else (size, 1)
    ranks = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    with LLM(path, **(defaults | ranks | knobs)) as llm:
        made = llm.generate(prompts, params)
    return [(tuple(output.token_ids), output) for each in made for output in each.outputs]


_BY_ONE: dict[tuple[object, ...], list[tuple[int, ...]]] = {}


def by_one(path: Path, params: SamplingParams = GREEDY, **knobs: Any) -> list[tuple[int, ...]]:
    """The ids of all outputs of one rank, computed once for equal settings and the same device half.

    Its steps are not timed: how many drafts pay decides no id.
    """
    half = machine.has_gpu_kernels(torch.device("cpu")), isinstance(vars(load)["load_model"], partial)
    key = path, *half, repr(params), repr(knobs)
    if key not in _BY_ONE:
        with mock.patch.object(speculation_build, "measure_step_costs", lambda *args, **facts: COSTS):
            _BY_ONE[key] = answers(path, 1, params, **knobs)
    return _BY_ONE[key]


# -- the device half of a GPU, on the kernels' references ------------------------------------------------


class ToldIds:
    """`GpuCommunicator.first` on a CPU: rank 0 waits for no other rank."""

    def __init__(self) -> None:
        self._told: defaultdict[int, SimpleQueue[torch.Tensor]] = defaultdict(SimpleQueue)

    def first(self, ranks: SharedCommunicator, x: torch.Tensor) -> None:
        everyone = ranks.everyone()
        if everyone.rank == 0:
            for rank in range(1, everyone.size):
                self._told[rank].put(x.clone())
        else:
            x.copy_(self._told[everyone.rank].get(timeout=60))

    def clear(self) -> None:
        self._told.clear()


@pytest.fixture
def gpu_half(monkeypatch: pytest.MonkeyPatch) -> None:
    told, start = ToldIds(), RankThreads.__init__

    def begin(ranks: RankThreads, *args: Any) -> None:
        told.clear()
        start(ranks, *args)

    monkeypatch.setattr(RankThreads, "__init__", begin)
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    monkeypatch.setattr(SharedCommunicator, "first", lambda ranks, x: told.first(ranks, x), raising=False)
    monkeypatch.setattr(SharedCommunicator, "alone", lambda ranks: nullcontext(), raising=False)
    monkeypatch.setattr(SharedCommunicator, "pass_ids", lambda ranks, ids: None, raising=False)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is timed at a start, which takes longer than all steps of a test; all drafts pay."""
    monkeypatch.setattr(speculation_build, "measure_step_costs", lambda *args, **facts: COSTS)


@pytest.fixture
def gpu_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as on the GPUs of several machines."""
    monkeypatch.setenv(gloo_ranks.FOLDER, str(tmp_path))
    gloo_ranks.install(monkeypatch.setattr)


FEW_TIMED: dict[str, Any] = {"max_batch_size": 4}  # fewer sizes of steps are timed at the start
GPU_KNOBS: list[dict[str, Any]] = [
    {},
    {"use_overlap": False},
    {"prefill_chunk_size": 5, "max_batch_size": 2},
    {"block_size": 4, "num_blocks": 32, "kv_cache_memory": None, "preemption": "swap", "swap_blocks": 40},
    {"speculative_method": "ngram", "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("knobs", thinned(GPU_KNOBS, keep=2), ids=str)
def test_steps_that_run_ahead_answer_the_same(
    knobs: dict[str, Any], root: Path, gpu_half: None, known_costs: None
) -> None:
    path = checkpoint(root, "llama")
    alone = by_one(path, **knobs)
    for size in (2, (1, 3)):
        assert answers(path, size, **knobs) == alone, size


@pytest.mark.parametrize(
    ("knobs", "size"),
    thinned([*GPU_KNOBS, {"deterministic": True}], [(2, 1), (1, 2), (1, 3), (2, 2)], keep=2),
    ids=str,
)
def test_gpus_on_several_nodes_answer_the_same(
    knobs: dict[str, Any],
    size: tuple[int, int],
    root: Path,
    gpu_nodes: None,
    known_costs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages compute parts at the same time, and speculation is judged by rank 0."""
    path = checkpoint(root, "llama")
    monkeypatch.setattr(gpu_device, "MIN_PART", 1)
    assert answers(path, size, nnodes=size[1] if size[1] > 1 else 2, **knobs) == by_one(path, **knobs)


def test_no_rank_launches_a_step_before_all_are_ready_for_its_size(
    root: Path, gpu_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that ranks share, no kernel is loaded for a rank while another one's waits for it."""
    path, ready, early = checkpoint(root, "llama"), defaultdict[StepSize, set[int]](set), list[StepSize]()
    loaded = list[WarmUp]()
    ensure, forward = StepGraphs.ensure, StepGraphs.forward

    def capture_slowly(graphs: StepGraphs, size: StepSize) -> bool:
        sleep(0.02 * (len(ready[size]) == 0))  # whoever comes first
        found = ensure(graphs, size)
        ready[size].add(id(graphs))
        return found

    def watch(graphs: StepGraphs, size: StepSize) -> None:
        if len(ready[size]) < 4:
            early.append(size)
        forward(graphs, size)

    monkeypatch.setattr(WarmUp, "load", lambda warm_up: loaded.append(warm_up))
    monkeypatch.setattr(StepGraphs, "ensure", capture_slowly)
    monkeypatch.setattr(StepGraphs, "forward", watch)
    answers(path, (2, 2), nnodes=2, **GPU_KNOBS[-1], **FEW_TIMED)
    assert len(loaded) == 4 and len(ready) > 4 and not early, early


@pytest.mark.parametrize(
    ("family", "recipe", "size", "quantization"),
    [
        ("qwen3_moe", "", (2, 2), "none"),
        ("llama", "gptq", (2, 1), "auto"),
        ("llama", "gptq", (1, 2), "auto"),
        ("gemma3", "", (1, 2), "none"),
        ("gpt2", "", (1, 3), "none"),
        ("qwen3_next", "", (1, 2), "none"),
    ],
)
def test_every_kind_of_model_answers_the_same_on_gpus_of_several_nodes(
    family: str,
    recipe: str,
    size: tuple[int, int],
    quantization: str,
    root: Path,
    gpu_nodes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts, packed words, tied heads, windows and states are where they should be."""
    if recipe:
        monkeypatch.setattr("infer.client.load.load_model", partial(loader.load_model, home="cuda"))
    path, nnodes = checkpoint(root, family, recipe), max(size[1], 2)
    found = answers(path, size, nnodes=nnodes, quantization=quantization)
    assert found == by_one(path, quantization=quantization)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "qwen3_moe", "qwen3_next"])
def test_stages_on_gpus_answer_the_same(family: str, root: Path, gpu_half: None) -> None:
    """Tied heads, windows and learned positions are where they should be, and so are states."""
    path = checkpoint(root, family)
    assert answers(path, (1, 2)) == by_one(path)


@pytest.mark.parametrize("knobs", thinned(GPU_KNOBS[1:] + GPU_KNOBS[:1], keep=2), ids=str)
def test_stages_on_gpus_compute_parts_at_the_same_time(
    knobs: dict[str, Any], root: Path, gpu_half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage launches the next part before it takes the ids of the last one."""
    path, went_on = checkpoint(root, "llama"), list[int]()
    alone, go_on = by_one(path, **knobs), StepIds.go_on

    def watch(ids: StepIds, order: StepOrder) -> None:
        go_on(ids, order)
        went_on.append(len(ids.awaited))

    monkeypatch.setattr(gpu_device, "MIN_PART", 1)
    monkeypatch.setattr(StepIds, "go_on", watch)
    assert answers(path, (1, 3), **knobs) == alone
    assert max(went_on) == 2


def test_a_model_that_drafts_ahead_of_the_host_answers_the_same(root: Path, gpu_half: None) -> None:
    """Rank 0 has it, and the other ranks are told its drafts."""
    path, draft = checkpoint(root, "llama"), root / "draft"
    make_checkpoint("llama", draft, sizes=replace(SIZES, num_layers=1), seed=3)
    knobs: dict[str, Any] = {"draft_model": str(draft), "num_speculative_tokens": 3, **FEW_TIMED}
    knobs["adaptive_speculation"] = False  # on a CPU, drafts would not pay
    params = replace(GREEDY, max_tokens=24, logprobs=None)
    assert answers(path, 2, params, **knobs) == by_one(path, params, **knobs)


@pytest.mark.parametrize(("family", "recipe"), [("llama", "gptq"), ("qwen3_moe", ""), ("gpt_oss", "")])
def test_weights_in_the_forms_of_a_gpu_are_cut_right(
    family: str, recipe: str, root: Path, gpu_half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.client.load.load_model", partial(loader.load_model, home="cuda"))
    path = checkpoint(root, family, recipe)
    assert answers(path, 2, quantization="auto") == by_one(path, quantization="auto")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=10, temperature=1.0, seed=3, n=3, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0, use_beam_search=True, n=2, best_of=3),
        SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=2, repetition_penalty=1.3),
        SamplingParams(max_tokens=8, temperature=0, structured=Structured(kind="regex", text="[a-c]{4}")),
    ],
    ids=["fork", "beams", "prompt_logprobs", "masks"],
)
def test_rank_0_alone_samples(params: SamplingParams, root: Path, gpu_half: None) -> None:
    path = checkpoint(root, "llama")
    alone = by_one(path, params)
    for size in (2, (1, 2)):
        assert answers(path, size, params) == alone, size


# -- families and formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_every_family_answers_the_same(family: str, root: Path) -> None:
    path = checkpoint(root, family)
    alone = by_one(path)
    assert answers(path, 2) == alone
    if family in ("llama", "qwen3_moe", "gpt2"):
        assert answers(path, 4) == alone  # more ranks than kv heads, but in GPT-2


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT_FAMILIES)
def test_every_family_answers_the_same_with_four_ranks(family: str, root: Path) -> None:
    assert answers(checkpoint(root, family), 4) == by_one(checkpoint(root, family))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe", "qwen3_next"])
def test_stages_answer_the_same(family: str, root: Path) -> None:
    path = checkpoint(root, family)
    assert answers(path, (1, 2)) == by_one(path)


NODES = [  # every second one is slow
    ("llama", "gptq-act-order", (2, 1), 2),
    ("llama", "", (2, 1), 2),
    ("llama", "", (1, 3), 3),
    ("llama", "", (1, 2), 2),
    ("mixtral", "", (4, 1), 4),
    ("qwen3_moe", "", (2, 1), 2),
    ("qwen3_moe", "", (2, 2), 4),
    ("llama", "", (2, 2), 2),
]


@pytest.mark.parametrize("case", thinned(NODES, keep=2), ids=str)
def test_ranks_on_several_nodes_answer_the_same(
    case: tuple[str, str, tuple[int, int], int], root: Path
) -> None:
    family, recipe, size, nnodes = case
    path = checkpoint(root, family, recipe)
    assert answers(path, size, nnodes=nnodes) == by_one(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.name != "gemma4"])
def test_every_family_that_can_be_cut_answers_the_same_in_stages(family: str, root: Path) -> None:
    path = checkpoint(root, family)
    alone = by_one(path)
    for size in STAGES if family in CUT_FAMILIES else STAGES[:2]:
        assert answers(path, size) == alone, size


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", "int8"),
        ("mixtral", "int4"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in product(ROUNDED_FAMILIES, ("int8", "int4"))
        ),
    ],
)
def test_rounded_weights_answer_the_same(family: str, quantization: str, root: Path) -> None:
    path = checkpoint(root, family)
    alone = by_one(path, quantization=quantization)
    assert answers(path, 2, quantization=quantization) == alone
    assert answers(path, (1, 2), quantization=quantization) == alone


@pytest.mark.parametrize("quantization", ["auto", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recipe",
    [
        "gptq-act-order",
        "ct-int8",
        "fp8-channel",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gptq", "gptq-64", "awq", "ct-w4a16")),
    ],
)
def test_quantized_files_answer_the_same(recipe: str, quantization: str, root: Path) -> None:
    path = checkpoint(root, "llama", recipe)
    alone = by_one(path, quantization=quantization)
    assert answers(path, 2, quantization=quantization) == alone
    assert answers(path, (2, 2), quantization=quantization) == alone


@pytest.mark.parametrize("kind", ["Q4_1", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_gguf_answers_the_same(kind: str, root: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 300}
    reference = reference_model("llama", num_hidden_layers=1, **sizes)
    path, tokenizer = write_gguf(tmp_path / "m.gguf", reference, kind=kind), str(checkpoint(root, "llama"))
    knobs: dict[str, Any] = {"quantization": "auto", "tokenizer": tokenizer}
    assert answers(path, 2, **knobs) == by_one(path, **knobs)


def test_idle_time_does_not_touch_what_ranks_have_cached(root: Path) -> None:
    path = checkpoint(root, "llama")
    knobs: dict[str, Any] = {"device": "cpu", "quantization": "none", "kv_cache_memory": "4MiB"}
    knobs |= {"max_seq_len": 96, "record_cpu_step": False, "speculative_method": "ngram"}
    with LLM(path, tensor_parallel_size=2, **knobs) as llm:
        before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        assert llm._engine is not None
        for _ in range(24):
            llm._engine.use_idle_time()
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == before


# -- settings and requests -----------------------------------------------------------------------------

SAMPLED = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
FREQUENT = ("several", "beams", "penalties", "constraint", "chunks", "swap", "n-grams")
SETTINGS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "sampled": (SAMPLED, {}),
    "several": (replace(SAMPLED, n=3), {}),
    "beams": (SamplingParams(max_tokens=6, n=2, temperature=0, use_beam_search=True), {}),
    "penalties": (replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias={17: 2.0}), {}),
    "min tokens": (SamplingParams(max_tokens=8, min_tokens=6, temperature=0), {}),
    "constraint": (
        SamplingParams(max_tokens=8, temperature=0, structured=Structured(kind="regex", text="[a-z]{6}")),
        {},
    ),
    "no prefix cache": (GREEDY, {"use_prefix_caching": False}),
    "chunks": (GREEDY, {"prefill_chunk_size": 7, "max_num_batched_tokens": 16}),
    "recompute": (GREEDY, {"kv_cache_memory": None, "num_blocks": 5, "preemption": "recompute"}),
    "swap": (
        GREEDY,
        {"kv_cache_memory": None, "num_blocks": 5, "swap_blocks": 8, "preemption": "swap"},
    ),
    "measured costs": (GREEDY, {"swap_blocks": 8, "itl_target_ms": 500.0}),
    "contiguous": (GREEDY, {"kv_cache_backend": "contiguous"}),
    "naive": (GREEDY, {"kv_cache_backend": "naive"}),
    "int8 cache": (GREEDY, {"kv_cache_dtype": "int8"}),
    "reference": (GREEDY, {"attention_backend": "torch_ref", "mlp_backend": "torch_ref"}),
    "n-grams": (GREEDY, {"speculative_method": "ngram", "num_speculative_tokens": 3}),
    "bfloat16": (replace(GREEDY, max_tokens=2), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    "setting", [each if each in FREQUENT else pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS]
)
def test_settings_and_requests_answer_the_same(setting: str, root: Path) -> None:
    params, knobs = SETTINGS[setting]
    path = checkpoint(root, "qwen2")  # biases of qkv
    alone = by_one(path, params, **knobs)
    for size in (2, (1, 2)):
        assert answers(path, size, params, **knobs) == alone, size


@pytest.mark.slow
@pytest.mark.parametrize("size", STAGES[1:])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_and_requests_answer_the_same_in_stages(
    setting: str, size: tuple[int, int], root: Path
) -> None:
    params, knobs = SETTINGS[setting]
    path = checkpoint(root, "qwen2")
    assert answers(path, size, params, **knobs) == by_one(path, params, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("swap_blocks", [0, 20])
def test_mixed_traffic_answers_the_same_in_stages(family: str, swap_blocks: int, root: Path) -> None:
    check_mixed_traffic(family, swap_blocks, root)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("min_part", [1, 8])
def test_mixed_traffic_answers_the_same_in_stages_of_gpus(
    family: str, min_part: int, root: Path, gpu_half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device, "MIN_PART", min_part)
    check_mixed_traffic(family, 20, root)


def check_mixed_traffic(family: str, swap_blocks: int, root: Path) -> None:
    """Requests of all kinds come and go while others are preempted."""
    path = checkpoint(root, family)
    knobs: dict[str, Any] = {"num_blocks": 64 if family == "qwen3_next" else 40, "swap_blocks": swap_blocks}
    knobs |= {"max_batch_size": 7, "prefill_chunk_size": 24, "max_seq_len": 96, "record_cpu_step": False}

    def serve(num_stages: int) -> tuple[dict[tuple[str, int], list[int]], set[str]]:
        rng, made, aborted = Random(swap_blocks), dict[tuple[str, int], list[int]](), set[str]()
        waiting = [(rng.randrange(60), mixed_request(number, rng)) for number in range(30)]
        with LLM(path, device="cpu", quantization="none", pipeline_parallel_size=num_stages, **knobs) as llm:
            engine, num_calls = llm.engine, 0
            while waiting or engine.has_work:
                for pair in [pair for pair in waiting if pair[0] <= num_calls]:
                    waiting.remove(pair)
                    engine.add(pair[1])
                for output in engine.step():
                    made.setdefault((output.request_id, output.index), []).extend(output.token_ids)
                num_calls += 1
                name = str(rng.randrange(30))
                if num_calls % 13 == 0 and engine.is_serving(name):
                    engine.abort(name)
                    aborted.add(name)
        return made, aborted

    alone, gone = serve(1)
    for num_stages in (2, 3):
        made, also_gone = serve(num_stages)
        wanted = {key: ids for key, ids in alone.items() if key[0] not in gone | also_gone}
        assert {key: made.get(key) for key in wanted} == wanted


def mixed_request(number: int, rng: Random) -> Request:
    """A request of one of several kinds, with a prompt of some length."""
    prompt = tuple(rng.randrange(5, 290) for _ in range(rng.choice([1, 2, 5, 17, 33, 60])))
    params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=rng.choice([0.0, 1.0]), seed=number)
    kinds: list[dict[str, Any]] = [
        {}, {"n": 3, "temperature": 1.0}, {"frequency_penalty": 1.0, "logprobs": 2}, {"prompt_logprobs": 1},
        {"structured": Structured(kind="regex", text="[a-z]{6}")},
    ]  # fmt: skip
    return Request(request_id=str(number), prompt=prompt, params=replace(params, **rng.choice(kinds)))


@pytest.mark.parametrize("overlaps", [True, False])
def test_stages_work_at_the_same_time(overlaps: bool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kinds, send = checkpoint(root, "qwen2"), list[int](), RankThreads.send

    def watch(ranks: RankThreads, kind: int, body: bytes) -> None:
        kinds.append(kind)
        send(ranks, kind, body)

    monkeypatch.setattr(RankThreads, "send", watch)
    assert answers(path, (1, 3), use_overlap=overlaps) == by_one(path)
    # ids of a step come in three parts, a prompt's row each, while the next one is under way
    assert (
        kinds.count(RankMessage.AHEAD) >= 6
        and kinds.count(RankMessage.IDS) == 3 * kinds.count(RankMessage.AHEAD)
    ) is overlaps


def test_a_draft_model_drafts_on_rank_0(root: Path) -> None:
    path = checkpoint(root, "qwen2")
    alone = by_one(path)
    knobs: dict[str, Any] = {"draft_model": str(path), "num_speculative_tokens": 3}
    knobs["adaptive_speculation"] = False  # on a CPU, drafts would not pay
    for size in (2, (1, 2)):
        assert answers(path, size, **knobs) == alone, size


def test_logprobs_and_embeddings_are_those_of_one_rank(root: Path) -> None:
    path, found = checkpoint(root, "qwen2"), []
    params = replace(GREEDY, prompt_logprobs=2)
    for size, num_stages in ((1, 1), (2, 1), (1, 2)):
        with LLM(path, device="cpu", quantization="none", tensor_parallel_size=size, max_seq_len=96,
                 pipeline_parallel_size=num_stages, kv_cache_memory="4MiB",
                 record_cpu_step=False) as llm:  # fmt: skip
            made = llm.generate(PROMPTS, params)
            vectors = llm.embed(PROMPTS)
        numbers = [each.logprob for one in made for each in one.outputs[0].logprobs or ()]
        numbers += [each.logprob for one in made for each in one.prompt_logprobs or () if each is not None]
        found.append((numbers, [value for vector in vectors for value in vector]))
    (logprobs, vectors_1), *others = found
    for logprobs_2, vectors_2 in others:
        assert len(logprobs) > 60 and logprobs_2 == pytest.approx(logprobs, abs=1e-4)
        assert vectors_2 == pytest.approx(vectors_1, abs=1e-4)


# -- what cannot be shared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "family", "recipe", "message"),
    [
        (3, "llama", "", r"2 kv heads cannot be shared equally by 3 ranks .* can be shared by 1, 2, 4$"),
        (8, "llama", "", r"4 heads cannot be shared equally by 8 ranks .* can be shared by 1, 2, 4$"),
        (4, "llama", "gptq-64", "a group of 64 columns straddles the cut at column 32"),
        (65, "llama", "", "tensor_parallel_size must be at most 64, got 65"),
        (0, "llama", "", "tensor_parallel_size must be a positive integer, got 0"),
        ((1, 4), "llama", "", "pipeline_parallel_size=4 .* which has 3 layers; ask for no more stages than"),
        ((2, 33), "llama", "", r"tensor_parallel_size \* pipeline_parallel_size must be at most 64"),
        ((2, 2), "qwen3_next", "", "cannot be shared by ranks: its layers keep a state"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    size: int | tuple[int, int], family: str, recipe: str, message: str, root: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        answers(checkpoint(root, family, recipe), size)


def test_each_rank_gets_a_gpu_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(device: str, size: int, stages: int = 1, nnodes: int = 1) -> list[str]:
        load = LoadConfig(
            device=device, tensor_parallel_size=size, pipeline_parallel_size=stages, nnodes=nnodes
        )
        return [rank_device(load, number) for number in range(load.num_ranks)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for asked, size in product(("auto", "cuda"), ((2, 1), (1, 2))):
        assert devices(asked, *size) == ["cuda:0", "cuda:1"]
    assert devices("cuda:1", 4) == ["cuda:1"] * 4
    assert devices("cpu", 4) == ["cpu"] * 4 and devices("auto", 1) == ["auto"]
    assert devices("auto", 2, 2, nnodes=2) == ["cuda:0", "cuda:1"] * 2
    assert devices("cuda:1", 2, nnodes=2) == ["cuda:1"] * 2
    with pytest.raises(
        ConfigError, match="needs as many GPUs, 4 on each of 2 machines, and this machine has 2"
    ):
        devices("auto", 4, 2, nnodes=2)
    with pytest.raises(
        ConfigError, match="NCCL, which joins them, needs a GPU for each; device=cuda:0 is one"
    ):
        devices("cuda:0", 2, 2, nnodes=2)
    few = r"needs as many GPUs, 4 in all, and this machine has 2; .*device=cuda:0"
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 and pipeline_parallel_size=2 " + few):
        devices("auto", 2, 2)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        devices("cuda:2", 2)
    monkeypatch.setattr(rank_placement, "is_amd", lambda: True)
    with pytest.raises(ConfigError, match="needs GPUs of NVIDIA"):
        devices("cuda:0", 2)
