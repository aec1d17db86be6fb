"""LoRA adapters: a request with one gets what the model with merged weights says, whatever else runs.

The reference is W + scale B A by our own arithmetic, in a checkpoint of its own. Each engine serves the base
model and several adapters in one batch; greedy tokens in float32 must be those of each model alone.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.errors import (
    AdapterFailed,
    CheckpointError,
    ConfigError,
    InferError,
    NameTaken,
    RequestError,
    UnknownModel,
)
from infer.execution.gpu.device import GpuDevice
from infer.execution.torch_device import TorchDevice
from infer.loader.adapter import LowRankPair
from infer.loader.find.source import resolve_model
from infer.loader.formats.checkpoint import read_header, write_safetensors
from infer.loader.load import load_model
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.speculative.adaptive import StepCosts
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.adapters import ATTENTION, make_adapter, merge, read_weights
from tests.support.books import check_books
from tests.support.thinned import thinned
from tests.support.toggles import CONTEXT_LEN, engine_knobs, pairwise_rows

ROOT: list[Path] = []
SIZES = Sizes(vocab_size=397, context_len=96)
COSTS = StepCosts(((1, 1e-3), (128, 4e-3)))
SETUPS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1, "rank": 8},
    "few": {"seed": 2, "rank": 3, "targets": r"\.(q_proj|v_proj|down_proj|c_attn)$", "use_rslora": True},
    "wide": {
        "seed": 3,
        "rank": 20,
        "rank_pattern": {"k_proj": 5},
        "alpha_pattern": {"o_proj": 40.0},
    },
}
PROMPTS = [[5, 9, 200, 31, 7], [17] * 23, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [60, 61]]


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ROOT.append(tmp_path_factory.mktemp("adapters"))
    yield ROOT[-1]


@functools.cache
def base(family: str) -> Path:
    path = ROOT[-1] / family
    make_checkpoint(family, path, sizes=SIZES, seed=1)
    return path


@functools.cache
def adapter(family: str, name: str) -> Path:
    """The directory of one of the adapters above, for a model; some adapt only its attention."""
    setup = SETUPS[name] | ({"targets": ATTENTION} if family in ("mixtral", "qwen3_moe", "gemma4") else {})
    return make_adapter(ROOT[-1] / f"{family}-{name}", base(family), **setup)


def make_engine(path: Path, *, on_gpu: bool = False, quantization: str = "none", **knobs: Any) -> Engine:
    source = resolve_model(str(path), show_progress=False)
    max_len = knobs.pop("max_seq_len", None)
    loaded = load_model(source, dtype="float32", device="cpu", quantization=quantization, max_seq_len=max_len)
    settings = EngineConfig.from_knobs(**({"num_blocks": 128, "block_size": 4} | knobs))
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: on_gpu):
        engine = build_engine(settings, loaded, step_costs=COSTS)
    assert isinstance(engine.device, GpuDevice if on_gpu else TorchDevice)
    return engine


def modules(family: str, names: tuple[str, ...] = tuple(SETUPS)) -> dict[str, Path]:
    return {name: adapter(family, name) for name in names}


def serve(
    engine: Engine, asked: list[tuple[str, int]], num_tokens: int = 12
) -> dict[tuple[str, int], list[int]]:
    """Serve (adapter, number of a prompt) pairs together; greedy ids by pair."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    made: dict[tuple[str, int], list[int]] = {pair: [] for pair in asked}
    for name, number in asked:
        prompt = tuple(PROMPTS[number])
        engine.add(Request(request_id=f"{name}/{number}", prompt=prompt, params=params, adapter=name))
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output
            name, _, place = output.request_id.partition("/")
            made[name, int(place)] += output.token_ids
        check_books(engine.scheduler)
    return made


@functools.cache
def merged(family: str, name: str) -> Path:
    """The directory of a model into whose weights an adapter was added."""
    return merge(ROOT[-1] / f"{family}-{name}-merged", base(family), adapter(family, name))


@functools.cache
def expected(family: str, name: str) -> list[list[int]]:
    """The greedy ids of all prompts, by a model with merged weights."""
    path = merged(family, name) if name else base(family)
    made = serve(make_engine(path), [("", number) for number in range(len(PROMPTS))])
    return [made["", number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("number", thinned(range(len(pairwise_rows())), keep=6))
def test_no_toggle_changes_a_token(number: int) -> None:
    knobs = engine_knobs(pairwise_rows()[number]) | {"max_seq_len": CONTEXT_LEN}
    engine = make_engine(base("llama"), lora_modules=modules("llama"), **knobs)
    assert serve(engine, MIXED) == {(name, place): expected("llama", name)[place] for name, place in MIXED}


def first_logprob(engine: Engine, name: str) -> float:
    """The logprob of the first token after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    engine.add(Request(request_id="first", prompt=tuple(PROMPTS[2]), params=params, adapter=name))
    (row,) = [row for _ in range(3) for output in engine.step() for row in output.logprobs]
    return row.logprob


MIXED = [(name, number) for number in range(len(PROMPTS)) for name in ("", *SETUPS)]


@pytest.mark.parametrize(
    ("family", "on_gpu"),
    thinned(
        ("llama", "qwen3", "gemma3", "gpt2", "qwen3_moe", "cohere2", "glm4", "phi3", "qwen3_5", "gemma4"),
        (False, True),
        keep=2,
    ),
)
def test_mixed_batch_says_what_merged_weights_say(family: str, on_gpu: bool) -> None:
    engine = make_engine(base(family), on_gpu=on_gpu, lora_modules=modules(family))
    made = serve(engine, MIXED)
    assert made == {(name, number): expected(family, name)[number] for name, number in MIXED}
    firsts = {name: first_logprob(engine, name) for name in ("", *SETUPS)}
    assert len({round(each, 3) for each in firsts.values()}) == len(firsts), "each is another model"
    for name in SETUPS:
        alone = first_logprob(make_engine(merged(family, name)), "")
        assert alone == pytest.approx(firsts[name], abs=1e-3)


FEATURES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_batch_size": 5},
    "recompute": {"num_blocks": 40, "preemption": "recompute"},
    "swap": {"num_blocks": 40, "preemption": "swap", "swap_blocks": 40},
    "naive": {"kv_cache_backend": "naive"},
    "drafts": {"speculative_method": "ngram", "adaptive_speculation": False},
    "plain": {"use_prefix_caching": False, "use_overlap": False},
}


@pytest.mark.parametrize(("feature", "on_gpu"), thinned(FEATURES, (False, True), keep=2))
def test_other_features_change_nothing(feature: str, on_gpu: bool) -> None:
    knobs = FEATURES[feature]
    engine = make_engine(base("qwen3"), on_gpu=on_gpu, lora_modules=modules("qwen3"), **knobs)
    for _ in range(2):  # the second time from the prefix cache, where there is one
        made = serve(engine, MIXED)
        assert made == {(name, number): expected("qwen3", name)[number] for name, number in MIXED}


def test_step_without_adapters_stays_a_recorded_program() -> None:
    engine = make_engine(base("llama"), lora_modules=modules("llama"), quantization="int8")
    plain = make_engine(base("llama"), quantization="int8")
    asked = [("", number) for number in range(len(PROMPTS))]
    assert serve(engine, asked) == serve(plain, asked)
    device, other = engine.device, plain.device
    assert isinstance(device, TorchDevice) and isinstance(other, TorchDevice)
    assert device._cpu is not None and other._cpu is not None
    program, alone = device._cpu._program, other._cpu._program
    assert program is not None and alone is not None and program.num_operations == alone.num_operations


def test_packed_base_takes_adapters() -> None:
    engine = make_engine(base("llama"), lora_modules=modules("llama"), quantization="int8")
    alone = {pair: serve(engine, [pair])[pair] for pair in MIXED[:8]}
    assert serve(engine, MIXED[:8]) == alone
    assert alone["", 0] != alone["all", 0] != alone["few", 0]


def test_prefixes_are_apart_for_each_load() -> None:
    engine = make_engine(base("llama"), enable_lora=True)
    engine.set_adapter("x", str(adapter("llama", "all")))
    assert serve(engine, [("x", 1), ("", 1)])["x", 1] == expected("llama", "all")[1]
    engine.set_adapter("x", None)
    engine.set_adapter("x", str(adapter("llama", "few")))
    made = serve(engine, [("x", 1), ("", 1)])
    assert made == {("x", 1): expected("llama", "few")[1], ("", 1): expected("llama", "")[1]}


def test_unloaded_adapter_serves_the_requests_that_began_with_it() -> None:
    engine = make_engine(base("llama"), max_loras=1, enable_lora=True)
    engine.set_adapter("x", str(adapter("llama", "all")))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add(Request(request_id="r", prompt=tuple(PROMPTS[0]), params=params, adapter="x"))
    ids = [id_ for output in engine.step() for id_ in output.token_ids]
    engine.set_adapter("x", None)
    with pytest.raises(UnknownModel, match="no adapter 'x' is loaded"):
        engine.add(Request(request_id="s", prompt=(1, 2), params=params, adapter="x"))
    with pytest.raises(ConfigError, match="or by running requests"):
        engine.set_adapter("y", str(adapter("llama", "few")))
    while engine.has_work:
        ids += [id_ for output in engine.step() for id_ in output.token_ids]
    assert ids == expected("llama", "all")[0]
    engine.set_adapter("y", str(adapter("llama", "few")))
    assert serve(engine, [("y", 0)])["y", 0] == expected("llama", "few")[0]


def test_adapter_is_served_on_if_its_successor_cannot_be_read() -> None:
    engine = make_engine(base("llama"), max_loras=1, enable_lora=True)
    engine.set_adapter("x", str(adapter("llama", "all")))
    reads, read = 0, LowRankPair.read

    def fail_late(pair: LowRankPair, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal reads
        reads += 1
        if reads == 3:
            raise OSError("the disk is gone")
        return read(pair, dtype)

    with mock.patch.object(LowRankPair, "read", fail_late), pytest.raises(OSError, match="the disk is gone"):
        engine.set_adapter("x", str(adapter("llama", "few")), replaces=True)
    assert serve(engine, [("x", 0)])["x", 0] == expected("llama", "all")[0]


def test_adapter_that_could_not_be_loaded_says_why_until_it_is(tmp_path: Path) -> None:
    engine = make_engine(base("llama"), max_loras=1, enable_lora=True)
    with pytest.raises(CheckpointError):
        engine.set_adapter("x", str(tmp_path))
    with pytest.raises(AdapterFailed, match=r"adapter 'x' could not be loaded: .*adapter_config\.json"):
        engine.add(Request(request_id="r", prompt=(1, 2), params=SamplingParams(), adapter="x"))
    with pytest.raises(UnknownModel):
        engine.set_adapter("x", None)
    with pytest.raises(UnknownModel, match="no adapter 'x' is loaded"):
        engine.add(Request(request_id="r", prompt=(1, 2), params=SamplingParams(), adapter="x"))
    engine.set_adapter("x", str(adapter("llama", "all")))
    assert serve(engine, [("x", 0)])["x", 0] == expected("llama", "all")[0]


def test_names_and_room_are_checked() -> None:
    engine = make_engine(base("llama"), enable_lora=True, max_lora_rank=8)
    engine.set_adapter("x", str(adapter("llama", "all")))
    with pytest.raises(NameTaken):
        engine.set_adapter("x", str(adapter("llama", "few")))
    with pytest.raises(ConfigError, match="rank 20, but max_lora_rank is 8"):
        engine.set_adapter("y", str(adapter("llama", "wide")))
    with pytest.raises(UnknownModel):
        engine.set_adapter("z", None)
    with pytest.raises(RequestError, match="no room for LoRA adapters"):
        make_engine(base("llama")).set_adapter("x", str(adapter("llama", "all")))


OUTER: dict[str, Any] = {"seed": 7, "targets": r"(embed_tokens|lm_head|q_proj)$", "rank": 5}


@pytest.mark.parametrize("family", ["llama", "cohere2", "gemma4"])  # the second scales its logits
def test_embedding_and_head_are_adapted(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, path := tmp_path / "base", sizes=SIZES, seed=1, tie_embeddings=False)
    outer = make_adapter(tmp_path / "outer", path, **OUTER)
    inner = make_adapter(tmp_path / "inner", path, **SETUPS["few"])
    merged = {
        name: merge(tmp_path / f"{name}-merged", path, directory)
        for name, directory in (("outer", outer), ("inner", inner))
    }
    asked = [(name, number) for number in range(len(PROMPTS)) for name in ("", "outer", "inner")]
    wanted = {
        (name, number): ids
        for name in ("", "outer", "inner")
        for (_, number), ids in serve(
            make_engine(merged.get(name, path)), [("", number) for number in range(len(PROMPTS))]
        ).items()
    }
    knobs: dict[str, Any] = {"lora_modules": {"outer": outer, "inner": inner}, "prefill_chunk_size": 7}
    logprobs = first_prompt_logprobs(make_engine(merged["outer"]), "")
    for on_gpu in (False, True):
        engine = make_engine(path, on_gpu=on_gpu, **knobs)
        assert serve(engine, asked) == wanted, on_gpu
        assert first_prompt_logprobs(engine, "outer") == pytest.approx(logprobs, abs=1e-3), on_gpu


def first_prompt_logprobs(engine: Engine, name: str) -> list[float]:
    """The logprobs of a prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine.add(Request(request_id="prompt", prompt=tuple(PROMPTS[2]), params=params, adapter=name))
    rows = [row for _ in range(6) for output in engine.step() for row in output.prompt_logprobs or ()]
    return [row.logprob for row in rows if row is not None]


def test_whole_weights_and_outer_matrices_without_room_are_refused(tmp_path: Path) -> None:
    outer = make_adapter(tmp_path / "outer", base("llama"), **OUTER)
    engine = make_engine(base("llama"), enable_lora=True)
    with pytest.raises(
        ConfigError, match="adapts the embedding and the head; memory for that is reserved only if"
    ):
        engine.adapters.load("x", str(outer))
    tensors = _stored(outer / "adapter_model.safetensors")
    own = read_weights(base("llama"))["lm_head.weight"]
    for change, is_refused in ((0.0, False), (1e-3, True)):
        whole = {"base_model.model.lm_head.base_layer.weight": own + change}
        write_safetensors(outer / "adapter_model.safetensors", tensors | whole)
        if is_refused:
            with pytest.raises(
                CheckpointError, match="lm_head.base_layer.weight', which is not the model's own"
            ):
                make_engine(base("llama"), lora_modules={"x": outer})
        else:
            make_engine(base("llama"), lora_modules={"x": outer})


def _stored(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, stored in read_header(path).items():
        tensors[name] = torch.empty(stored.shape)
        stored.copy_to(tensors[name])
    return tensors


def test_embedding_uses_the_adapter() -> None:
    engine = make_engine(base("llama"), lora_modules=modules("llama", ("all",)))
    merged = make_engine(merge(ROOT[-1] / "embedding-merged", base("llama"), adapter("llama", "all")))
    found = []
    for each, name in ((engine, "all"), (merged, "")):
        each.add(Request(request_id="e", prompt=tuple(PROMPTS[1]), pooling="mean", adapter=name))
        (output,) = [output for _ in range(3) for output in each.step()]
        found.append(torch.tensor(output.embedding))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"bias": "all"}, "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
    ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA'"),
    ({"lora_alpha": "much"}, "lora_alpha"),
    ({"r": 4}, "rank 8, but .*adapter_config.json says 4"),
    ({"r": "eight"}, "says 'eight'"),
    ({"rank_pattern": {"q_proj": 2}}, "q_proj' with rank 8, but .* says 2"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern"),
    ({"alpha_pattern": {"([a-z_.0-9]+)+!": 8.0}}, "too complex"),
    ({"alpha_pattern": {"(a|a)(a|a)(a|a)(a|a)": 8.0}}, "too complex"),
    ({"alpha_pattern": {r"(\w)\1{99999999999}": 8.0}}, "too complex|too large"),
    ({"alpha_pattern": {"q_proj(": 8.0}}, "alpha_pattern has 'q_proj\\('"),
    ({"alpha_pattern": dict.fromkeys(map(str, range(5000)), 8.0)}, "at most 4096"),
]


@pytest.mark.parametrize(("change", "said"), CONFIGS)
def test_config_that_cannot_be_served_is_refused_by_name(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_adapter(tmp_path, base("llama"), seed=0)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=said):
        make_engine(base("llama"), lora_modules={"x": tmp_path})


LAYER = "base_model.model.model.layers.0"
TENSORS: list[tuple[dict[str, tuple[int, ...]], str]] = [
    ({f"{LAYER}.self_attn.q_proj.lora_A.weight": (4, 8)}, "lora_A alone"),
    ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": (4,)}, "DoRA"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 8)}, "lora_A alone"),
    ({"base_model.model.model.norm.weight": (64,)}, "not a matrix of a LoRA adapter"),
    ({f"{LAYER}.other.lora_A.weight": (4, 8), f"{LAYER}.other.lora_B.weight": (8, 4)}, "another model"),
    (
        {f"{LAYER}.mlp.down_proj.lora_A.weight": (4, 8), f"{LAYER}.mlp.down_proj.lora_B.weight": (8, 4)},
        r"A \[4, 8\] and B \[8, 4\]",
    ),
    (
        {"base_model.model.lm_head.lora_A.weight": (4, 8), "base_model.model.lm_head.lora_B.weight": (8, 4)},
        r"A \[4, 8\] and B \[8, 4\]",
    ),
    ({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 8)}, "not a matrix of a LoRA adapter"),
    ({}, "no tensors"),
]


@pytest.mark.parametrize(("shapes", "said"), TENSORS)
def test_tensors_without_a_place_are_refused_by_name(
    shapes: dict[str, tuple[int, ...]], said: str, tmp_path: Path
) -> None:
    make_adapter(tmp_path, base("llama"), seed=0)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=said):
        make_engine(base("llama"), lora_modules={"x": tmp_path})


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    name = next(n for n in read_weights(base("qwen3_moe")) if ".experts.0.up_proj" in n).removesuffix(
        ".weight"
    )
    make_adapter(tmp_path, base("llama"), seed=0)
    tensors = {f"base_model.model.{name}.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="a matrix of experts"):
        make_engine(base("qwen3_moe"), lora_modules={"x": tmp_path})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    make_adapter(tmp_path, base("llama"), seed=0)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        make_engine(base("llama"), lora_modules={"x": tmp_path})


def test_missing_files_are_named(tmp_path: Path) -> None:
    for nowhere in (tmp_path / "nowhere", tmp_path / ("x" * 300), "~nobody-of-this-name/x"):
        with pytest.raises(InferError, match="is not a directory"):
            make_engine(base("llama"), lora_modules={"x": nowhere})
    make_adapter(tmp_path, base("llama"), seed=0)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickles are not opened"):
        make_engine(base("llama"), lora_modules={"x": tmp_path})


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"lora_modules": ("a=",)}, "NAME=DIRECTORY"),
        ({"lora_modules": {"a": 3}}, "must map names to paths"),
        ({"lora_modules": {"a": b"x"}}, "must map names to paths"),
        ({"lora_modules": ("a=x", "a=y")}, "one name"),
        ({"lora_modules": ("a=x",), "enable_lora": False}, "enable_lora is off"),
        ({"lora_modules": ("a=x", "b=y"), "max_loras": 1}, "max_loras must be from 2"),
        ({"enable_lora": True, "max_lora_rank": 512}, "at most 256"),
        ({"max_loras": 4}, "need enable_lora"),
        ({"enable_lora": True, "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"enable_lora": True, "deterministic": True}, "deterministic"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_knobs(**knobs)
