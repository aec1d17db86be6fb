from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.cache import host_bytes, memory
from infer.cache.memory import size_cache
from infer.cli.flags import knobs_from
from infer.cli.main import build_parser
from infer.cli.serve import read_models
from infer.config.knobs import parse_bytes
from infer.config.profiles.generic import GENERIC
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine import build, cache_fit
from infer.errors import ConfigError
from infer.execution import cpu_step
from infer.loader import dtype as dtypes
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from infer.loader.weight_plan import plan_weights
from infer.tools import memory_needs
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.adapters import make_adapter

Infer = Callable[..., Any]

# The published config of Llama 3.1 8B: 8.03 billion parameters, 128 KiB of cache per token in 16 bits.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    make_checkpoint("llama", folder, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


_PLANS: dict[str, Any] = {}


def plan_once(headers: Any, **options: Any) -> Any:
    """`plan_weights`, computed once for equal shapes: many tests ask for five forms of 32 layers."""
    key = repr((headers, options, dtypes.cpu_has_amx()))
    if key not in _PLANS:
        _PLANS[key] = plan_weights(headers, **options)
    return _PLANS[key]


@pytest.fixture(autouse=True)
def _small_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.bench.roofline.copy_bandwidth", lambda *_, **__: 1e10)
    monkeypatch.setattr(memory_needs, "plan_weights", plan_once)
    monkeypatch.setattr(memory_needs, "GPU_RUNTIME_BYTES", 0)  # so that tiny models fit tiny memories
    monkeypatch.setattr(memory, "GRAPH_WORKSPACE", 0)
    monkeypatch.setattr(cache_fit, "GRAPH_WORKSPACE", 0)


def planned(infer: Infer, *arguments: str | Path) -> dict[str, Any]:
    outcome = infer("plan", *map(str, arguments), "--json")
    assert outcome.code == 0, outcome.err
    plan: dict[str, Any] = json.loads(outcome.out)
    return plan


def test_the_weights_are_those_that_loading_makes(infer: Infer, model: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(resolve_model(str(model)), dtype=dtype, device="cpu").model
        tensors = [*loaded.parameters(), *loaded.buffers()]
        plan = planned(infer, model, "--dtype", dtype, "--gpu-memory", "100MiB")
        assert plan["weights"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert plan["num_parameters"] == sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_every_family_can_be_planned(infer: Infer, family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / family)
    loaded = load_model(resolve_model(str(tmp_path / family)), dtype="float32", device="cpu").model
    plan = planned(infer, tmp_path / family, "--gpu-memory", "200MiB")
    assert plan["dtype"] == "float32"
    assert plan["num_parameters"] == sum(parameter.numel() for parameter in loaded.parameters())


def test_a_config_alone_is_enough(infer: Infer, shape: Path) -> None:
    for given in (shape, shape / "config.json"):
        plan = planned(infer, given, "--gpu-memory", "24GiB")
        assert plan["model"] == "llama-8b"
        assert plan["num_parameters"] == 8_030_261_248
        assert plan["dtype"] == "bfloat16"
        assert plan["kv_bytes_per_token"] == 128 << 10
        assert plan["total"] <= plan["memory"] == 24 << 30
        assert plan["num_cache_tokens"] > 30_000
        assert plan["stored_bytes"] == 0
        text = infer("plan", str(given), "--gpu-memory", "24GiB").out
        assert f"once the weights are there: infer serve --model {shape} --max-seq-len" in text
    assert "8,030 M parameters in bfloat16" in text
    assert "The model's context is 131072 tokens; this cache serves sequences of up to" in text


@pytest.mark.parametrize(
    ("num_layers", "where", "mixed"),
    [
        (32, ("--gpu-memory", "24GiB"), 128),
        (6, ("--gpu-memory", "24GiB"), 8192),  # 1.3 billion weights in the layers
        (6, ("--gpu-memory", "24GiB", "--prefill-tokens-while-decoding", "96"), 96),
        (6, ("--gpu-memory", "24GiB", "--no-use-chunked-prefill", "--max-seq-len", "4096"), None),
        (1, ("--device", "cpu", "--num-blocks", "8"), 128),
    ],
)
def test_a_plan_says_how_many_prompt_tokens_join_a_step_that_decodes(
    infer: Infer, tmp_path: Path, num_layers: int, where: tuple[str, ...], mixed: int | None
) -> None:
    shape = LLAMA_8B | {"num_hidden_layers": num_layers, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert planned(infer, tmp_path, *where)["prefill_tokens_while_decoding"] == mixed


def test_the_model_may_be_named_by_place_by_flag_or_in_a_file(
    infer: Infer, model: Path, tmp_path: Path
) -> None:
    asked = ("--gpu-memory", "24GiB")
    (tmp_path / "knobs.yaml").write_text("model: nowhere/to/be/found")
    by_place = planned(infer, model, *asked)
    assert planned(infer, "--model", model, *asked) == by_place
    assert planned(infer, model, "--model", model, *asked) == by_place
    assert planned(infer, "--model", model, "--config", tmp_path / "knobs.yaml", *asked) == by_place
    assert planned(infer, model, "--config", tmp_path / "knobs.yaml", *asked) == by_place


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "config.json"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}, "config.json"),
        ({"quant_algo": "FP8"}, "hf_quant_config.json"),
        ({"quant_method": "fbgemm_fp8"}, "config.json"),
    ],
)
def test_fp8_is_planned_alike_whatever_the_config_calls_it(
    infer: Infer, tmp_path: Path, settings: dict[str, Any], file: str
) -> None:
    raw = LLAMA_8B | {"num_hidden_layers": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    expected = planned(infer, config, "--gpu-memory", "24GiB")["weights"]
    if file == "config.json":
        config.write_text(json.dumps(raw | {"quantization_config": settings}))
    else:
        config.write_text(json.dumps(raw))
        whole = {"producer": {"name": "modelopt"}, "quantization": settings}
        (tmp_path / file).write_text(json.dumps(whole))
    assert planned(infer, config, "--gpu-memory", "24GiB")["weights"] == expected


def test_another_format_of_modelopt_is_refused_by_name(infer: Infer, tmp_path: Path) -> None:
    raw = LLAMA_8B | {"quantization_config": {"quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    outcome = infer("plan", str(tmp_path / "config.json"), "--gpu-memory", "24GiB")
    assert outcome.code == 2 and "is quantized with 'modelopt NVFP4', which is not supported" in outcome.err


def test_a_config_that_is_not_there_is_no_hub_id(infer: Infer) -> None:
    outcome = infer("plan", "nope/config.json")
    assert outcome.code == 2
    assert outcome.err.startswith(
        "infer: error: model 'nope/config.json': there is no such file or directory"
    )


def test_two_names_for_the_model_are_refused(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--model", "another", "--gpu-memory", "24GiB")
    assert outcome.code == 2
    assert f"two models are named, '{shape}' and --model 'another'; give one of them" in outcome.err


def test_a_gpu_of_a_few_bytes_is_a_unit_forgotten(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--gpu-memory", "80")
    assert (outcome.code, outcome.out) == (2, "")
    assert "gpu_memory needs a unit, such as 80MiB or 80GiB, got '80'" in outcome.err
    assert infer("plan", str(shape), "--gpu-memory", str(24 * 2**30)).code == 0


def test_a_gpu_that_is_not_here_can_be_planned_for_by_its_memory(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--device", "cuda:99")
    assert (outcome.code, outcome.out) == (2, "")
    assert "device is 'cuda:99', but this machine has" in outcome.err
    assert (
        "; use cpu or auto, or plan for a GPU elsewhere with --gpu-memory 24GiB instead of --device"
        in outcome.err
    )


def test_the_printed_flags_name_the_adapters(infer: Infer, model: Path, tmp_path: Path) -> None:
    named = [f"{name}={make_adapter(tmp_path / name, model, seed=0)}" for name in ("a", "b")]
    command = infer("plan", str(model), "--lora-modules", *named).out.splitlines()[-1]
    args = build_parser().parse_args(shlex.split(command.removeprefix("Start with: infer ")))
    ((_, config),) = read_models(args, knobs_from(args, with_server=True))[0].items()
    assert config.adapters.lora_modules == tuple(named)


@pytest.mark.parametrize(
    "knobs",
    [
        ["--gpu-memory", "48MiB"],
        ["--gpu-memory", "24MiB", "--block-size", "8", "--max-batch-size", "4", "--dtype", "float32"],
        ["--gpu-memory", "48MiB", "--kv-cache-backend", "contiguous", "--max-seq-len", "50"],
        ["--gpu-memory", "48MiB", "--num-blocks", "11"],
        ["--gpu-memory", "48MiB", "--kv-cache-memory", "200KiB"],
        ["--gpu-memory", "48MiB", "--no-use-chunked-prefill", "--swap-blocks", "3"],
    ],
)
def test_the_printed_flags_give_the_planned_cache(infer: Infer, model: Path, knobs: list[str]) -> None:
    plan = planned(infer, model, *knobs)
    text = infer("plan", str(model), *knobs).out
    command = text.splitlines()[-1].removeprefix("Start with: infer ")
    args = build_parser().parse_args(shlex.split(command))
    ((_, config),) = read_models(args, knobs_from(args, with_server=True))[0].items()
    assert config.load.model == str(model)
    max_seq_len = config.load.max_seq_len or 256
    assert max_seq_len == plan["max_seq_len"]
    scheduler = resolve_scheduler(config, max_seq_len, GENERIC.steps.usual)
    made = size_cache(
        config.cache,
        scheduler,
        max_seq_len=max_seq_len,
        bytes_per_token=plan["kv_bytes_per_token"],
        free_bytes=0,
    )
    assert (made.num_blocks, made.block_size) == (plan["num_blocks"], plan["block_size"])


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ([], []),
        (["--dtype", "auto", "--cpu-weights", "auto", "--block-size", "16", "--max-seq-len", "256"], []),
        (["--dtype", "float32"], ["--dtype", "float32"]),
        (["--cpu-weights", "int8", "--device", "cpu"], ["--quantization", "int8", "--device", "cpu"]),
        (["--max-seq-len", "100"], ["--max-seq-len", "100"]),
        (["--no-use-chunked-prefill"], ["--no-use-chunked-prefill"]),
    ],
)
def test_flags_that_are_so_by_default_are_not_printed(
    infer: Infer, model: Path, asked: list[str], printed: list[str]
) -> None:
    found = planned(infer, model, "--num-blocks", "40", *asked)["flags"]
    assert found == [*printed, "--num-blocks", "40"]


@pytest.mark.parametrize(
    ("config", "has_c", "needs_workspace"),
    [("", True, False), ("", False, True), ("attention_backend: sdpa", True, True)],
)
def test_attention_that_reads_in_place_is_charged_no_workspace(
    infer: Infer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    has_c: bool,
    needs_workspace: bool,
) -> None:
    monkeypatch.setattr(cpu_step, "library", lambda: object() if has_c else None)
    (tmp_path / "knobs.yaml").write_text(config)
    asked = ("--device", "cpu", "--dtype", "float32", "--config", tmp_path / "knobs.yaml")
    plan = planned(infer, model, *asked)
    assert (plan["workspace"] > 0) == needs_workspace
    assert plan["total"] == plan["weights"] + plan["activations"] + plan["kv_cache"] + plan["workspace"]
    assert ("of attention" in infer("plan", str(model), *map(str, asked)).out) == needs_workspace


def test_contexts_and_concurrency_follow_from_the_blocks(infer: Infer, model: Path) -> None:
    plan = planned(infer, model, "--gpu-memory", "100MiB", "--num-blocks", "40", "--max-batch-size", "20")
    assert plan["contexts"] == {"256": 2}  # 16 blocks each
    outcome = infer(
        "plan", str(model), "--gpu-memory", "100MiB", "--num-blocks", "80", "--max-batch-size", "64"
    )
    [row] = [line.split() for line in outcome.out.splitlines() if line.split()[:1] == ["256"]]
    assert row[3:] == ["5", "yes", "yes", "-", "-"]  # five at once: 1 and 4 fit, 16 and 64 do not


def test_swapping_is_counted_as_host_memory(infer: Infer, model: Path) -> None:
    plan = planned(infer, model, "--gpu-memory", "100MiB", "--swap-blocks", "10")
    assert plan["host_cache"] == 10 * 16 * plan["kv_bytes_per_token"]
    assert "host memory" in infer("plan", str(model), "--swap-blocks", "10").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "4GiB"], "with quantization=int4, max_num_batched_tokens=256, max_batch_size=8 it"),
        (
            ["--gpu-memory", "9GiB"],
            "what would fit: quantization=int4; or quantization=fp8 or int8, max_num_b",
        ),
        (["--gpu-memory", "8GiB", "--quantization", "fp8"], "max_batch_size=8 it needs 8."),
        (["--gpu-memory", "15.4GiB"], "what would fit: max_num_batched_tokens=256, max_batch_size=8"),
        (["--gpu-memory", "24GiB", "--dtype", "float32"], "what would fit: dtype=bfloat16"),
        (["--gpu-memory", "24GiB", "--max-seq-len", "100000"], "what would fit: max_seq_len="),
        (
            ["--gpu-memory", "24GiB", "--num-blocks", "90000"],
            "num_blocks=90000 (175.8 GiB) is more than there is: ",
        ),
        (["--gpu-memory", "much"], "gpu_memory must be a size above 0, such as 512MiB or 4GiB, got 'much'"),
        (["--gpu-memory", "8GiB", "--device", "cpu"], "leave out --device"),
        (["--max-seq-len", "900000"], "max_seq_len must be in 1..131072"),
    ],
)
def test_what_does_not_fit_says_what_would(
    infer: Infer, shape: Path, arguments: list[str], message: str
) -> None:
    outcome = infer("plan", str(shape), *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_what_would_fit_does_fit(infer: Infer, shape: Path) -> None:
    small = ["--max-num-batched-tokens", "256", "--max-batch-size", "8"]
    assert infer("plan", str(shape), "--gpu-memory", "15.4GiB", *small).code == 0
    outcome = infer("plan", str(shape), "--gpu-memory", "24GiB", "--max-seq-len", "100000")
    longest = outcome.err.rpartition("max_seq_len=")[2].partition(",")[0]
    assert infer("plan", str(shape), "--gpu-memory", "24GiB", "--max-seq-len", longest).code == 0


def test_what_is_missing_of_device_memory_adds_up(
    infer: Infer, shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 64 << 30)
    said = infer("plan", str(shape), "--device", "cpu", "--device-memory", "100MiB").err
    sizes = re.search(r"it needs (.*) next to (.*) of this process, (.*) more than there is", said)
    assert sizes is not None, said
    needed, held, missing = (parse_bytes(size.replace(" ", "")) for size in sizes.groups())
    assert missing == pytest.approx(needed + held - (100 << 20), abs=0.2 * 2**30)


def test_a_form_that_weights_have_already_is_no_advice(infer: Infer, tmp_path: Path) -> None:
    kept = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": kept}))
    said = infer("plan", str(tmp_path), "--device", "cpu", "--device-memory", "100MiB").err
    assert "it needs" in said and "quantization=" not in said, said


def test_what_would_fit_on_a_cpu_does_fit(infer: Infer, shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 24 << 30)
    outcome = infer("plan", str(shape), "--device", "cpu", "--quantization", "fp32")
    assert "what would fit: quantization=int8 or int4" in outcome.err
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 10 << 30)
    outcome = infer("plan", str(shape), "--device", "cpu", "--quantization", "none")  # bfloat16, as stored
    assert "what would fit: quantization=int8 or int4" in outcome.err
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 24 << 30)
    whole = ["plan", str(shape), "--device", "cpu", "--quantization", "int8", "--max-seq-len", "50000"]
    outcome = infer(*whole)
    size = outcome.err.rpartition("kv_cache_memory=")[2].partition(",")[0]
    assert infer(*whole, "--kv-cache-memory", size).code == 0
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 7 << 30)
    outcome = infer("plan", str(shape), "--device", "cpu")
    assert "what would fit: quantization=int4" in outcome.err


def test_the_default_is_this_machine(infer: Infer, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 64 << 20)
    plan = planned(infer, model, "--device", "cpu", "--dtype", "float32")
    assert (plan["machine"], plan["memory"]) == ("cpu", 64 << 20)
    assert plan["kv_cache"] <= 0.25 * (64 << 20)


def test_the_engine_gets_the_cache_that_was_planned(
    infer: Infer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_knobs(model=model, max_batch_size=4)
    loaded = load_model(resolve_model(str(model)), dtype="float32", device="cpu")
    free = 25 << 18  # 6.25 MiB, of which a step takes 6
    plan_weights = planned(infer, model, "--dtype", "float32", "--gpu-memory", "1GiB")["weights"]
    monkeypatch.setattr(cache_fit, "free_host_bytes", lambda: free)
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: free + plan_weights)
    plan = planned(infer, model, "--device", "cpu", "--dtype", "float32", "--max-batch-size", "4")
    engine = build.build_engine(config, loaded)
    assert engine.scheduler.pool.usage().num_blocks == plan["num_blocks"]


@pytest.mark.parametrize("knob", ["num_blocks", "swap_blocks"])
def test_an_impossible_cache_is_refused_before_anything_is_allocated(model: Path, knob: str) -> None:
    loaded = load_model(resolve_model(str(model)), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=f"; set {knob}="):
        build.build_engine(EngineConfig.from_knobs(**{knob: 10**10}), loaded)


def test_a_cache_that_cannot_be_allocated_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(resolve_model(str(model)), dtype="float32", device="cpu")
    monkeypatch.setattr(cache_fit, "free_host_bytes", lambda: 1 << 62)
    with pytest.raises(ConfigError, match="a KV cache of .* could not be allocated"):
        build.build_engine(EngineConfig.from_knobs(swap_blocks=10**12, num_blocks=1), loaded)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(infer: Infer, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "odd")
    raw = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(raw | {"intermediate_size": 64}))
    outcome = infer("plan", str(tmp_path / "odd"), "--gpu-memory", "1GiB")
    assert outcome.code == 2
    assert "the weights of odd do not fit its config" in outcome.err


def test_a_tiny_model_has_more_than_zero_parameters(infer: Infer, model: Path) -> None:
    assert re.search(r"[1-9][\d,]* parameters in", infer("plan", str(model)).out)


# -- every form of the weights ------------------------------------------------------------------------


def test_every_form_of_the_weights_is_planned(infer: Infer, shape: Path) -> None:
    """8.03 billion weights: the embedding stays in 16 bits, the head of int4 has 8."""
    plan = planned(infer, shape, "--gpu-memory", "24GiB", "--bandwidth", "1008")
    rows = {row["quantization"]: row for row in plan["schemes"]}
    assert list(rows) == ["auto", "none", "fp8", "int8", "int4"] and plan["bandwidth"] == 1008e9
    assert rows["auto"]["weights"] == plan["weights"] == rows["none"]["weights"]
    assert [row["kept_as"] for row in plan["schemes"]] == ["bfloat16", "bfloat16", "fp8", "int8", "int4"]
    assert [name for name, row in rows.items() if row["is_chosen"]] == ["auto"]
    embedding, head = (128256 * 4096 * size for size in (2, 1))
    layers = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    for name, bits in (("fp8", 8), ("int8", 8), ("int4", 4.25)):
        row = rows[name]
        assert row["bytes_per_token"] == pytest.approx(layers * bits / 8 + head, rel=0.001)
        assert row["weights"] == pytest.approx(row["bytes_per_token"] + embedding, rel=0.02)  # and tables
        assert row["tokens_per_second"] == pytest.approx(1008e9 / row["bytes_per_token"])
        assert row["num_cache_tokens"] > plan["num_cache_tokens"]


def test_what_does_not_fit_is_a_row_that_says_so(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--gpu-memory", "12GiB", "--quantization", "int4")
    assert outcome.code == 0, outcome.err
    assert re.search(r"  +auto +15\.\d GiB +14\.\d GiB +does not fit   bfloat16\n", outcome.out)
    assert re.search(r"\* +int4 +\d\.\d GiB +\d\.\d GiB +[\d,]+   int4\n", outcome.out)
    assert "--bandwidth GB/S of the GPU adds tokens per second" in outcome.out
    refused = infer("plan", str(shape), "--gpu-memory", "12GiB")
    assert refused.code == 2 and "what would fit: quantization=fp8 or int8 or int4\n" in refused.err
    assert re.search(r"\* +auto .* does not fit ", refused.out)
    assert re.search(r"  +int4 .* [\d,]+   int4\n", refused.out)
    refused = infer("plan", str(shape), "--gpu-memory", "5GiB", "--quantization", "int4", "--json")
    assert refused.code == 2 and "llama-8b in int4 needs " in refused.err
    assert {row["num_cache_tokens"] for row in json.loads(refused.out)["schemes"]} == {None}


@pytest.mark.parametrize(("has_amx", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_a_form_that_is_no_row_of_its_own_gets_one(
    infer: Infer, model: Path, monkeypatch: pytest.MonkeyPatch, has_amx: bool, dtype: str
) -> None:
    """`none` keeps the file's bfloat16 where the processor multiplies it."""
    monkeypatch.setattr(dtypes, "cpu_has_amx", lambda: has_amx)
    text = infer("plan", str(model), "--device", "cpu", "--quantization", "fp32", "--bandwidth", "0.001").out
    assert re.search(r"\* +fp32 .* \d\.\d   float32\n", text)
    assert re.search(rf"  +none .*   {dtype}\n", text)


def test_experts_that_a_token_does_not_meet_are_not_read(infer: Infer, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path / "m", dtype="bfloat16")
    plan = planned(infer, tmp_path / "m", "--gpu-memory", "1GiB")
    assert plan["schemes"][0]["bytes_per_token"] < 0.6 * plan["weights"]


def test_a_measured_bandwidth_is_said_to_be_measured(infer: Infer, model: Path) -> None:
    said = "at 10 GB/s, measured just now: more on a less busy machine)"
    assert said in infer("plan", str(model), "--device", "cpu").out
    assert "measured" not in infer("plan", str(model), "--device", "cpu", "--bandwidth", "10").out


def test_a_bandwidth_that_is_none(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--gpu-memory", "24GiB", "--bandwidth", "-1")
    assert (
        outcome.code == 2 and "--bandwidth must be a number of GB per second above 0, got -1" in outcome.err
    )


def test_one_layer_is_a_layer(infer: Infer, tmp_path: Path) -> None:
    make_checkpoint("gemma3", tmp_path / "m")  # one layer with a window and one without: a table for each
    assert " tokens in 1 layer: " in infer("plan", str(tmp_path / "m")).out


def test_a_draft_model_is_counted_and_shown(infer: Infer, shape: Path, tmp_path: Path) -> None:
    small = LLAMA_8B | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    draft = tmp_path / "llama-small"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(small | {"num_attention_heads": 8, "head_dim": 128}))
    where = ("--gpu-memory", "40GiB", "--kv-cache-memory", "1GiB")
    alone = planned(infer, shape, *where)
    both = planned(infer, shape, *where, "--draft-model", draft)
    assert both["draft_model"] == "llama-small"
    assert both["draft_weights"] == planned(infer, draft, *where)["weights"]
    assert both["kv_bytes_per_token"] == (128 + 32) << 10, "8 layers of 8 heads beside 32"
    assert both["kv_cache"] <= alone["kv_cache"] and both["num_cache_tokens"] < alone["num_cache_tokens"]
    drafted = both["draft_weights"] + both["draft_steps"]
    assert both["total"] == pytest.approx(alone["total"] + drafted, rel=0.01)
    assert 64 * 128256 * 14 < both["draft_steps"] < 1 << 30, "logits of 64 rows, graphs and buffers"
    text = infer("plan", str(shape), *where, "--draft-model", str(draft)).out
    assert re.search(
        r"draft model +\S+ .iB   llama-small: \S+ MiB of weights, the rest for its steps", text
    ), text
    assert "32.0 KiB the draft's" in text
    assert f"--draft-model {draft}" in text


def test_a_draft_model_that_leaves_no_room_is_named(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--gpu-memory", "24GiB", "--draft-model", str(shape))
    assert outcome.code == 2
    assert re.search(r"15.0 GiB of weights, 1\d.\d GiB of the draft model and", outcome.err), outcome.err


def test_a_draft_of_another_vocabulary_is_not_planned(infer: Infer, shape: Path) -> None:
    outcome = infer("plan", str(shape), "--gpu-memory", "24GiB", "--draft-model", "SmolLM2-135M-Instruct")
    assert outcome.code == 2
    assert "use a draft model with the same vocabulary" in outcome.err


def test_a_plan_for_ranks_counts_one_of_them(infer: Infer, shape: Path) -> None:
    arguments = ("plan", str(shape), "--gpu-memory", "80GiB", "--max-seq-len", "4096", "--json")
    found = (json.loads(infer(*arguments, "--tensor-parallel-size", size).out) for size in ("1", "2", "16"))
    alone, shared, repeated = found
    assert (
        alone["kv_bytes_per_token"] == 2 * shared["kv_bytes_per_token"] == 8 * repeated["kv_bytes_per_token"]
    )
    assert alone["weights"] / 2 < shared["weights"] < alone["weights"] * 0.51  # norms are whole


def test_stages_of_gpus_have_room_for_the_cache_beside_the_largest(infer: Infer, tmp_path: Path) -> None:
    """The first of two stages has two of three layers, and the last one a head as large as the embedding."""
    make_checkpoint("llama", tmp_path / "llama", sizes=Sizes(num_layers=3, hidden_size=512), seed=1)
    arguments = ("plan", str(tmp_path / "llama"), "--gpu-memory", "24GiB")
    alone, staged = (json.loads(infer(*arguments, "-pp", size, "--json").out) for size in ("1", "2"))
    assert staged["kv_bytes_per_token"] == 2 * alone["kv_bytes_per_token"] / 3
    assert staged["stages"][0] > staged["stages"][1] == staged["weights"]
    assert "each of 2 GPUs with" in infer(*arguments, "-pp", "2").out


def test_a_plan_for_ranks_of_a_cpu_shows_what_each_has(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_bytes, "resident_bytes", lambda *_: 50 << 20)  # not what other tests left here
    make_checkpoint("llama", tmp_path / "llama", sizes=Sizes(num_layers=3), seed=1)
    arguments = ("plan", str(tmp_path / "llama"), "--device", "cpu", "--device-memory", "1GiB")
    alone = json.loads(infer(*arguments, "--json").out)
    ranks = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    shared = json.loads(infer(*arguments, *ranks, "--json").out)
    assert 0 < shared["memory"] < alone["memory"] / 3  # a fourth of what is free now
    assert len(shared["stages"]) == 2 and shared["stages"][1] == shared["weights"]
    assert alone["weights"] < 2 * sum(shared["stages"]) < 1.5 * alone["weights"]
    text = infer(*arguments, *ranks).out
    assert re.search(r"CPU, each of 4 ranks with [\d.]+ MiB for it", text), text
    assert re.search(r"stage 0 +\S+ .iB   weights of layers 0 to 1\n", text), text
    assert ", for a rank of stage 1, the last" in text
    refused = infer(*arguments, *ranks, "--swap-blocks", "100000000")
    assert refused.code == 2 and "are free for each of 4 ranks" in refused.err


def test_all_stages_are_planned_in_the_form_of_the_last(infer: Infer, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama", sizes=Sizes(num_layers=4), seed=1, dtype="bfloat16")
    arguments = (
        "plan",
        str(tmp_path / "llama"),
        "--device",
        "cpu",
        "--pipeline-parallel-size",
        "2",
        "--json",
    )
    auto, int8 = (json.loads(infer(*arguments, *more).out) for more in ((), ("--quantization", "int8")))
    assert auto["stages"] == int8["stages"]
