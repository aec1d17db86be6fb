"""fp8, int8 and int4 as a GPU keeps them, and published formats that stay packed there; on a CPU, in float32.

Products are the reference's (quant/gpu_schemes.py). Tested is which matrix is kept in which form, that codes
of a file are not touched, and that the rest of the engine does not notice. tests/gpu has the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.cli.main import main
from infer.config.settings import EngineConfig, LoadConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.errors import CheckpointError, ConfigError
from infer.execution.torch_device import TorchDevice
from infer.frontend.open_model import make_encoder
from infer.kernels.attention.reference import attend_sdpa
from infer.kernels.linear.coded import CodedForm
from infer.layers.linear import ExpertLinear, Projected
from infer.layers.whole_sequence import WholeSequence
from infer.loader import weight_plan
from infer.loader.find.source import resolve_model
from infer.loader.formats.quantized import short_bytes
from infer.loader.formats.stored_module import Settings
from infer.loader.forms import rounded_form
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.random_weights import load_random
from infer.loader.weight_plan import kept_bytes
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.rounding import round_rows
from infer.sampling.params import SamplingParams
from infer.tools.quantize import SCHEME_NAMES, Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.integration.test_cpu_weights import TEXT
from tests.support.checkpoints import FAMILIES, reference_model
from tests.support.fetched import fetched_model
from tests.support.kv_store import fill_store
from tests.support.thinned import thinned
from tests.support.tiny import random_prompts, run_engine
from tests.support.toggles import CONTEXT_LEN, engine_knobs, pairwise_rows
from tests.unit.loader.tiny_files import write_gguf

MADE = ("fp8", "int8", "int4")
SIZES = Sizes(hidden_size=64, num_experts=4)
RECIPES = {
    **{scheme: Recipe(scheme=scheme, group_size=32) for scheme in SCHEME_NAMES},
    "gptq-3": Recipe(scheme="gptq", bits=3, group_size=64, symmetric=False),
    "gptq-2-v2": Recipe(scheme="gptq", bits=2, group_size=32, symmetric=False, version=2),
    "gptq-8": Recipe(scheme="gptq", bits=8, group_size=-1),
    "gptq-8-asym": Recipe(scheme="gptq", bits=8, group_size=32, symmetric=False),
    "gptq-actorder": Recipe(scheme="gptq", group_size=32, act_order=True),
    "ct-w4a16-asym": Recipe(scheme="ct-w4a16", group_size=64, symmetric=False),
}
KEPT = {
    **dict.fromkeys(
        ("gptq", "gptq-actorder", "gptq-3", "gptq-2-v2", "awq", "ct-w4a16", "ct-w4a16-asym"), "int4"
    ),
    **dict.fromkeys(("gptq-8", "gptq-8-asym", "ct-w8a16", "ct-int8"), "int8"),
    **dict.fromkeys(("fp8-channel", "fp8-block", "fp8-tensor"), "fp8"),
    "nf4": "nf4",
    "squeezellm": "lut4",
}
UNPACKED_EXPERTS = ("gptq-actorder", "squeezellm")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-schemes")


@functools.cache
def dense(root: Path, family: str) -> Path:
    make_checkpoint(family, root / family, sizes=SIZES, dtype="bfloat16", seed=3)
    return root / family


@functools.cache
def quantized(root: Path, family: str, recipe: str) -> Path:
    source = resolve_model(str(dense(root, family)), show_progress=False)
    quantize_checkpoint(source, root / f"{family}-{recipe}", RECIPES[recipe])
    return root / f"{family}-{recipe}"


def load(path: Path, quantization: str = "auto") -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", dtype="float32", quantization=quantization, home="cuda")


def schemes(loaded: LoadedModel) -> dict[str, str]:
    layers = loaded.model.named_modules()
    return {name: layer.stored.scheme for name, layer in layers if isinstance(layer, Projected)}


def forms(loaded: LoadedModel) -> dict[str, CodedForm]:
    layers = {name: m.stored for name, m in loaded.model.named_modules() if isinstance(m, Projected)}
    return {name: stored.form for name, stored in layers.items() if isinstance(stored, GPUWeights)}


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Every matrix as float32, those of experts one by one."""
    found = {}
    for name, layer in loaded.model.named_modules():
        if isinstance(layer, ExpertLinear):
            for number in range(layer.num_experts):
                found[f"{name}.{number}"] = layer.stored.expert(number).dequantized()
        elif isinstance(layer, Projected):
            found[name] = layer.stored.dequantized()
    return found


# -- published formats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "quantization", "expected"),
    [
        ("ct-int8", "auto", True),
        ("ct-int8", "int8", True),
        ("ct-w8a16", "auto", False),
        ("gptq-8", "auto", False),
    ],
)
def test_tokens_are_rounded_where_the_scheme_of_a_file_says_so(
    recipe: str, quantization: str, expected: bool, root: Path
) -> None:
    """W8A8 alone; never for a matrix that was rounded here, such as the head."""
    loaded = load(quantized(root, "llama", recipe), quantization)
    layers = {name: m.stored for name, m in loaded.model.named_modules() if isinstance(m, Projected)}
    assert not layers.pop("head").spec.int8_tokens
    assert {stored.spec.int8_tokens for stored in layers.values()} == {expected}


@pytest.mark.parametrize("change", [{"symmetric": False}, {"type": "float"}, {"num_bits": 4}, None])
def test_other_activations_than_int8_are_not_rounded(change: dict[str, Any] | None) -> None:
    inputs = {"num_bits": 8, "type": "int", "symmetric": True}
    groups = {"a": {"weights": dict(inputs), "input_activations": change and inputs | change}}
    assert not Settings({"config_groups": groups}).has_int8_tokens
    groups["a"]["input_activations"] = inputs
    assert Settings({"config_groups": groups}).has_int8_tokens
    groups["b"] = {"weights": dict(inputs), "input_activations": None}  # which matrix is whose is not asked
    assert not Settings({"config_groups": groups}).has_int8_tokens


@pytest.mark.parametrize(("recipe", "family"), thinned(KEPT, ("llama", "mixtral"), keep=2))
def test_codes_of_a_file_stay_what_they_are(recipe: str, family: str, root: Path) -> None:
    path = quantized(root, family, recipe)
    kept, plain = load(path), load(path, "none")
    assert set(schemes(plain).values()) == {"none"}
    found = schemes(kept)
    assert found.pop("head") == "none"
    routers = {name: scheme for name, scheme in found.items() if name.endswith("router")}
    assert set(routers.values()) <= {"none"}
    own_order = {
        name for name in found if ".mlp." in name and family == "mixtral" and recipe in UNPACKED_EXPERTS
    }
    assert {found[name] for name in own_order} <= {"none"}  # experts have orders and outliers of their own
    left = found.keys() - routers.keys() - own_order
    assert {found[name] for name in left} == {KEPT[recipe]}
    expected = weights(plain)
    for name, weight in weights(kept).items():
        # zeros of 8 bits become minima, and scales of 4 bits have 20: both less than a part in a million
        torch.testing.assert_close(weight, expected[name], rtol=2e-6, atol=1e-6, msg=name)


@functools.cache
def reference(**config: Any) -> Any:
    return reference_model("llama", dtype=torch.float32, hidden_size=64, intermediate_size=96, **config)


@pytest.mark.parametrize(
    ("kind", "scheme"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_1", "int8"), ("Q8_0", "int8")]
)
def test_blocks_of_gguf(kind: str, scheme: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference(), kind=kind)
    kept, plain = load(path), weights(load(path, "none"))
    assert set(schemes(kept).values()) == {scheme}
    for name, weight in weights(kept).items():
        torch.testing.assert_close(weight, plain[name], rtol=2e-6, atol=1e-6, msg=name)


def test_blocks_that_are_rounded_are_not_said_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_plan, "ROUNDED", {"Q5_1"})  # Q6_K has blocks of 256, more than rows here
    path = write_gguf(tmp_path / "m.gguf", reference(), kind="Q8_0", kinds={"ffn_down": "Q5_1"})
    size = sum(tensor.num_bytes for tensor in read_headers(resolve_model(str(path))).tensors.values()
               if tensor.type_name == "Q5_1")  # fmt: skip
    assert f", Q5_1 {short_bytes(size)} rounded to int8" in load(path).kept_as
    assert "rounded" not in load(write_gguf(tmp_path / "n.gguf", reference(), kind="Q8_0")).kept_as


def test_parts_of_a_fused_matrix_may_differ(root: Path, tmp_path: Path) -> None:
    """Scales of their own; other bits are 8 together; with a dense part the whole is dense."""
    path = quantized(root, "llama", "gptq")
    tensors = load_file(path / "model.safetensors")
    eight = load_file(quantized(root, "llama", "gptq-8") / "model.safetensors")
    plain = load_file(dense(root, "llama") / "model.safetensors")
    for name in list(tensors):
        if ".0.self_attn.v_proj." in name or ".0.mlp.up_proj" in name:
            del tensors[name]
    tensors |= {name: tensor for name, tensor in eight.items() if ".0.self_attn.v_proj." in name}
    tensors |= {name: tensor for name, tensor in plain.items() if ".0.mlp.up_proj." in name}
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (mixed / file.name).write_bytes(file.read_bytes())
    save_file(tensors, mixed / "model.safetensors")
    kept, exact = load(mixed), weights(load(mixed, "none"))
    found = schemes(kept)
    assert found["layers.0.attention.qkv"] == "int8" and found["layers.1.attention.qkv"] == "int4"
    assert found["layers.0.mlp.gate_up"] == "none"
    for name, weight in weights(kept).items():
        torch.testing.assert_close(weight, exact[name], rtol=2e-6, atol=1e-6, msg=name)


@functools.cache
def in_blocks(root: Path, kind: str) -> Path:
    """Blocks of 128 rows and 128 columns; of 64 columns; of 8-bit integers with zero points."""
    sizes = Sizes(hidden_size=256, num_layers=1, num_kv_heads=2)
    made, path = root / f"wide-{kind}", root / f"blocks-{kind}"
    make_checkpoint("llama", made, sizes=sizes, dtype="bfloat16", seed=3)
    source = resolve_model(str(made), show_progress=False)
    quantize_checkpoint(source, path, Recipe(scheme="fp8-block"))
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    generator = torch.Generator().manual_seed(5)
    for name, scales in list(tensors.items()):
        if not name.endswith("_scale_inv") or kind == "fp8":
            continue
        weight = name.removesuffix("_scale_inv")
        if kind == "fp8-64":
            wide = scales.repeat_interleave(2, 1)[:, : -(-tensors[weight].shape[1] // 64)]
            tensors[name] = wide * (torch.rand(wide.shape, generator=generator) + 0.5)
        else:
            codes = torch.randint(-128, 128, tensors[weight].shape, generator=generator)
            zeros = torch.randint(-20, 20, scales.shape, generator=generator)
            del tensors[name]
            tensors[weight] = codes.to(torch.int8)
            tensors[f"{weight}_scale"] = scales * (torch.rand(scales.shape, generator=generator) + 0.5)
            tensors[f"{weight}_zero_point"] = zeros.to(torch.int8)
    if kind == "fp8-64":
        config["quantization_config"]["weight_block_size"] = [128, 64]
    elif kind == "int8-zeros":
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("fp8", CodedForm("fp8", 128, scale_rows=128)),
        ("fp8-64", CodedForm("fp8", 64)),
        ("int8-zeros", CodedForm("int8", 128, True)),
    ],
)
def test_blocks_of_128_rows_share_their_scales(kind: str, form: CodedForm, root: Path) -> None:
    """Where every part starts with a band of rows, and a layout has it; else each row has its own copy."""
    path = in_blocks(root, kind)
    kept, plain = load(path), weights(load(path, "none"))
    found = forms(kept)
    assert found["layers.0.attention.qkv"] == found["layers.0.mlp.down"] == form, found
    for name, weight in weights(kept).items():
        torch.testing.assert_close(weight, plain[name], rtol=2e-6, atol=1e-6, msg=name)


def test_a_quantized_tied_embedding_is_its_head(tmp_path: Path) -> None:
    tied = reference(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", tied, kind="Q4_1", kinds={"token_embd": "Q8_0"})
    kept, plain = load(path), load(path, "none")
    model = kept.model
    assert model.head.stored.scheme == "int8" and model.embedding.table is model.head.stored
    ids = torch.tensor([0, 31, 32, 63, 17])
    torch.testing.assert_close(model.embedding(ids), plain.model.embedding(ids))


# -- made while loading -------------------------------------------------------------------------------


@pytest.mark.parametrize(  # the last two families reorder rows
    ("family", "scheme"), thinned((*FAMILIES, "phi3", "glm4"), MADE, keep=3)
)
def test_any_checkpoint_is_rounded_while_it_is_loaded(scheme: str, family: str, root: Path) -> None:
    made, plain = load(dense(root, family), scheme), load(dense(root, family), "none")
    found = schemes(made)
    assert found.pop("head") == "int8"
    kinds = {name: found[name] for name in found if not name.endswith("router")}
    assert set(kinds.values()) == {scheme} and made.weights == scheme
    expected, allowed = weights(plain), {"fp8": 0.04, "int8": 0.012, "int4": 0.11}
    for name, weight in weights(made).items():
        error = (weight - expected[name]).norm() / expected[name].norm()
        assert error <= allowed[scheme], (name, float(error))
    if made.config.tie_embeddings:
        assert made.model.embedding.table is made.model.head.stored and made.model.embedding.weight.is_meta


def test_a_form_that_the_file_has_is_not_rounded_again(root: Path) -> None:
    path = quantized(root, "llama", "gptq")
    asked, auto = load(path, "int4"), load(path)
    assert forms(asked)["layers.0.mlp.down"] == forms(auto)["layers.0.mlp.down"]
    assert forms(asked)["head"] == CodedForm("int8")  # which the file has in 32 bits
    assert set(schemes(load(path, "int8")).values()) == {"int8"}


def test_a_size_that_no_group_divides_has_8_bits(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "m", sizes=Sizes(hidden_size=40, num_heads=2, num_kv_heads=2))
    found = schemes(load(tmp_path / "m", "int4"))
    assert found["layers.0.attention.qkv"] == "int8"


def test_random_weights_are_rounded_too(root: Path) -> None:
    knobs: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quantization": "int4", "home": "cuda"}
    loaded = load_random(dense(root, "mixtral"), **knobs)
    assert schemes(loaded)["layers.0.mlp.down"] == "int4"
    again = load_random(dense(root, "mixtral"), **knobs)
    for name, weight in weights(loaded).items():
        assert torch.equal(weight, weights(again)[name]) and float(weight.std()) == pytest.approx(
            0.02, rel=0.1
        )


# -- what the rest sees of it -------------------------------------------------------------------------


def start_line(loaded: LoadedModel, caplog: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        build_engine(EngineConfig.from_knobs(num_blocks=8), loaded)
    return str(next(text for text in caplog.messages if text.startswith("engine built")))


def test_the_start_line_names_forms_bytes_and_cost(root: Path, caplog: Any) -> None:
    rounded = start_line(load(dense(root, "llama"), "fp8"), caplog)
    parts = "rounded to fp8 0.1MiB + float32 0.1MiB + int8 0.1MiB"
    assert f'weights="{parts}, KL 0.02 to 0.03 on SmolLM2-135M"' in rounded
    kept = start_line(load(quantized(root, "llama", "awq")), caplog)
    assert 'weights="awq:int4-g32 0.0MiB, kept as float32 0.3MiB + int4 0.1MiB"' in kept
    looked_up = start_line(load(quantized(root, "llama", "nf4")), caplog)
    assert (
        'weights="bitsandbytes:nf4-g64 ' in looked_up and ", kept as " in looked_up and " nf4 " in looked_up
    )
    plain = start_line(load(dense(root, "llama")), caplog)
    assert " weights=float32 " in plain


@pytest.mark.parametrize("recipe", ["gptq", "fp8-block", "nf4"])
@pytest.mark.parametrize("asked", ["auto", "none", "fp8", "int4"])
def test_the_plan_counts_it(recipe: str, asked: str, root: Path, capsys: Any) -> None:
    path = quantized(root, "llama", recipe)
    args = [
        "plan",
        str(path),
        "--gpu-memory",
        "4GiB",
        "--dtype",
        "float32",
        "--quantization",
        asked,
        "--json",
    ]
    assert main(args) == 0
    planned = json.loads(capsys.readouterr().out)
    loaded = load(path, asked)
    tables = sum(table.numel() * table.element_size() for table in loaded.model.buffers())
    assert planned["weights"] == kept_bytes(loaded.model) + tables
    assert main([*args[:-2], "none", "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)
    layers = [layer.stored for layer in loaded.model.modules() if isinstance(layer, Projected)]
    unpacked = max(layer.scratch_bytes(8192) for layer in layers if layer is not loaded.model.head.stored)
    assert (unpacked > 0) == any(layer.scheme != "none" for layer in layers)
    assert planned["activations"] - dense["activations"] == unpacked


def test_names_of_formats_check_what_is_on_disk(root: Path) -> None:
    assert set(schemes(load(quantized(root, "llama", "awq"), "awq")).values()) == {"int4", "none"}
    with pytest.raises(ConfigError, match="quantization is awq, but this checkpoint is stored as gptq"):
        load(quantized(root, "llama", "gptq"), "awq")
    with pytest.raises(ConfigError, match="quantization=bf16 needs a CPU; possible here: auto, none, fp8"):
        load(dense(root, "llama"), "bf16")


def test_fp8_needs_a_gpu(root: Path) -> None:
    source = resolve_model(str(dense(root, "llama")), show_progress=False)
    with pytest.raises(
        ConfigError,
        match="fp8 needs a GPU; int8 has the same size and smaller errors; possible here: auto, none, .*int8",
    ):
        load_model(source, device="cpu", quantization="fp8")


@pytest.mark.parametrize("recipe", ["gptq", "awq", "ct-int8", "fp8-block"])
def test_broken_files_are_refused(recipe: str, root: Path, tmp_path: Path) -> None:
    """Cuts, damaged headers and scales that are no numbers are a CheckpointError, and nothing else."""
    path = quantized(root, "llama", recipe)
    data = (path / "model.safetensors").read_bytes()
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        cut = int(torch.randint(0, len(data), (), generator=generator))
        (tmp_path / "model.safetensors").write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load(tmp_path)
        damaged = bytearray(data)
        damaged[8 + cut % int.from_bytes(data[:8], "little")] ^= 1 << cut % 7
        (tmp_path / "model.safetensors").write_bytes(bytes(damaged))
        with contextlib.suppress(CheckpointError):
            load(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "scale" in name)
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not finite"):
        load(tmp_path)


# -- every scheme and every toggle --------------------------------------------------------------------

REQUESTS = [
    (
        prompt,
        SamplingParams(
            temperature=0.0 if number % 3 else 0.9, seed=number, max_tokens=6 + number, ignore_eos=True
        ),
    )
    for number, prompt in enumerate(random_prompts(6))
] + [
    ([5, 6, 7, 8], SamplingParams(temperature=0.0, n=2, max_tokens=6, ignore_eos=True)),
    ([9, 10, 11], SamplingParams(temperature=0.0, use_beam_search=True, n=2, max_tokens=6, ignore_eos=True)),
]


@functools.cache
def rounded(family: str, scheme: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / family
        make_checkpoint(family, path, sizes=Sizes(vocab_size=300, context_len=CONTEXT_LEN), seed=1)
        return load(path, scheme)


def engine_of(family: str, scheme: str, **knobs: Any) -> Engine:
    engine = build_engine(EngineConfig.from_knobs(**({"num_blocks": 64} | knobs)), rounded(family, scheme))
    assert isinstance(engine._device, TorchDevice)
    fill_store(engine._device.store, float("nan"))
    return engine


@functools.cache
def alone(family: str, scheme: str) -> list[list[list[int]]]:
    """Every request by itself in an engine that shares nothing."""
    knobs: dict[str, Any] = {"max_batch_size": 4, "use_prefix_caching": False}
    return [run_engine(engine_of(family, scheme, **knobs), [request])[0] for request in REQUESTS]


@pytest.mark.parametrize("number", thinned(range(len(pairwise_rows())), keep=5))
def test_no_toggle_changes_a_token(number: int) -> None:
    """One scheme and family per row, in turns: no toggle asks how a matrix is kept."""
    row = pairwise_rows()[number]
    scheme, family = MADE[number // 3 % 3], FAMILIES[number % len(FAMILIES)]
    requests, expected = REQUESTS, alone(family, scheme)
    if row["max_batch_size"] < 2 or row["kv_cache_backend"] != "paged":  # no room for a second sequence
        requests, expected = REQUESTS[:6], expected[:6]
    assert run_engine(engine_of(family, scheme, **engine_knobs(row)), requests) == expected


@pytest.mark.parametrize("scheme", MADE)
def test_deterministic_gives_the_bits_of_a_row_alone(scheme: str) -> None:
    family = {"fp8": "llama", "int8": "qwen3", "int4": "mixtral"}[scheme]
    requests = REQUESTS[:4]
    together = run_engine(engine_of(family, scheme, deterministic=True), requests)
    engines = (engine_of(family, scheme, deterministic=True, max_batch_size=1) for _ in requests)
    alone = [run_engine(engine, [request])[0] for engine, request in zip(engines, requests, strict=True)]
    assert together == alone


# -- accuracy on real weights -------------------------------------------------------------------------


def test_what_rounding_costs_the_default_model() -> None:
    """KL(file ‖ rounded) of the next token over a text; measured are 0.009 and 0.051.

    Its file has 4 bits, which int4 keeps; so 4 bits are judged by its embedding, which has 8.
    """
    source = resolve_model(str(fetched_model()), show_progress=False)
    tokens = torch.tensor(make_encoder(LoadConfig(), read_headers(source)).tokenizer.encode(TEXT))
    model = load_model(source, device="cpu", quantization="none", dtype="float32", max_seq_len=512).model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Projected)}
    stored = {name: layer.stored.dequantized().clone() for name, layer in layers.items()}

    @torch.inference_mode()
    def logprobs() -> torch.Tensor:
        step = WholeSequence(attend_sdpa, torch.device("cpu"))
        step.advance(len(tokens))
        return model.logits(model(tokens, step)).log_softmax(-1)

    exact = logprobs()
    for scheme, allowed, same in (("int8", 0.02, 0.9), ("fp8", 0.08, 0.85)):
        for name, layer in layers.items():
            form = CodedForm("int8" if name == "head" else scheme)
            codes, scales, *_ = round_rows(stored[name], form)
            layer.stored.dequantized().copy_(codes.float() * scales)
        found = logprobs()
        divergence = float((exact.exp() * (exact - found)).sum(1).mean())
        agreement = float((exact.argmax(1) == found.argmax(1)).float().mean())
        assert divergence <= allowed and agreement >= same, (scheme, divergence, agreement)
    rows = stored["head"][:2048]
    form = rounded_form("int4", rows.shape[1])
    part = round_rows(rows, form)
    assert part.minima is None and isinstance(part.zeros, torch.Tensor)
    scales, zeros = (parts.repeat_interleave(form.group, 1) for parts in (part.scales, part.zeros))
    numbers = (part.codes - zeros.float()) * scales
    error = float((numbers - rows).norm() / rows.norm())
    assert error <= 0.105, error  # measured: 0.097; between the extremes of each group 0.109
