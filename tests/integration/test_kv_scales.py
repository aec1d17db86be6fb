"""A checkpoint's own scales of an FP8 KV cache: found under every name, used as static scales are elsewhere.

The reference is plain PyTorch: keys and values are divided by their layer's scale, clamped, rounded to e4m3
and multiplied again, and then attended to whole. Scales are small enough to cut off what is large, so a cache
with scales of its own says other tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config.machine_rules import Machine, ModelFacts
from infer.config.resolve import resolve
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.execution.gpu.device import GpuDevice
from infer.kernels.attention.reference import attend_naive
from infer.layers.attention import AttentionLayer
from infer.layers.whole_sequence import WholeSequence
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.tools.memory_needs import machine_on
from infer.tools.memory_plan import plan_memory
from scripts.make_checkpoint import make_checkpoint
from tests.support.tiny import SIZES, greedy, random_prompts, run_engine

K_SCALES, V_SCALES = (0.0007, 0.0011), (0.0004, 0.0009)  # of the two layers
BY_HEAD = torch.tensor([[[0.0007, 0.002], [0.0004, 0.0006]], [[0.0011, 0.0005], [0.0009, 0.003]]])
NAMES = {
    "self_attn": ("self_attn.k_scale", "self_attn.v_scale"),
    "attn": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
PROMPTS = random_prompts(4)


def scalars(names: tuple[str, str], shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name}": torch.full(shape, scales[layer])
        for name, scales in zip(names, (K_SCALES, V_SCALES), strict=True)
        for layer in range(2)
    }


def calibrated(path: Path, extra: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    """A random model with these tensors beside its weights, and these settings in its config."""
    make_checkpoint("qwen3", path, sizes=SIZES, seed=1)
    save_file(load_file(path / "model.safetensors") | dict(extra), path / "model.safetensors")
    if settings:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "compressed-tensors"} | settings
        (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype="float32", device="cpu")


def generate(loaded: LoadedModel, **knobs: Any) -> list[list[list[int]]]:
    engine = build_engine(EngineConfig.from_knobs(**({"num_blocks": 64} | knobs)), loaded)
    return run_engine(engine, [(prompt, greedy(8)) for prompt in PROMPTS])


class Static(WholeSequence):
    """One sequence whose keys and values are rounded with one scale for a layer, or for each head of it."""

    def __init__(self, scales: torch.Tensor) -> None:
        super().__init__(attend_naive, torch.device("cpu"))
        self._scales = scales[..., None]  # [layers, 2, G, 1]

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        sides = zip((k_TGH, v_TGH), self._scales[layer.number], strict=True)
        rounded = [((x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s) for x, s in sides]
        return super().attend(layer, q_TNH, *rounded)


def assert_follows(loaded: LoadedModel, outputs: list[list[list[int]]], scales: torch.Tensor) -> None:
    """Each token is the reference's likeliest one, or as likely as that."""
    for prompt, (output,) in zip(PROMPTS, outputs, strict=True):
        step, ids = Static(scales), torch.tensor([*prompt, *output[:-1]])
        step.advance(len(ids))
        with torch.inference_mode():
            logits = loaded.model.logits(loaded.model(ids, step))[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (chosen > logits.amax(1) - 0.02).all()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("names", NAMES)
def test_auto_takes_the_scales_of_the_checkpoint(
    names: str, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(calibrated(tmp_path / "m", scalars(NAMES[names], shape)))
    with caplog.at_level(logging.INFO, "infer"):
        outputs = generate(loaded)
    assert 'kv_cache_dtype="fp8, scales of the checkpoint"' in caplog.text
    scales = torch.tensor([K_SCALES, V_SCALES]).T[..., None].expand(2, 2, 2)
    assert_follows(loaded, outputs, scales)
    assert outputs != generate(loaded, kv_cache_dtype="int8")  # which has scales of its own
    with pytest.raises(AssertionError):
        assert_follows(loaded, generate(loaded, kv_cache_dtype="int8"), scales)


def test_one_scale_may_be_for_both(tmp_path: Path) -> None:
    both = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.0006) for layer in range(2)}
    loaded = load(calibrated(tmp_path / "m", both))
    assert_follows(loaded, generate(loaded, kv_cache_dtype="fp8"), torch.full((2, 2, 2), 0.0006))


@pytest.mark.parametrize("half", ["c", "torch_ref", "gpu"])
def test_heads_may_have_scales_of_their_own(
    half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the C kernels, on the readable reference, and on a GPU's device half over references."""
    extra = {
        f"model.layers.{layer}.self_attn.{side}_scale": BY_HEAD[layer, number].view(2, 1, 1).contiguous()
        for layer in range(2)
        for number, side in enumerate("kv")
    }
    extra |= {"model.layers.0.self_attn.k_zero_point": torch.zeros(2, 1, 1, dtype=torch.int8)}
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}
    loaded = load(calibrated(tmp_path / "m", extra, kv_cache_scheme=scheme))
    if half == "gpu":
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
        assert isinstance(build_engine(EngineConfig.from_knobs(num_blocks=9), loaded)._device, GpuDevice)
    outputs = generate(loaded, **({"attention_backend": half} if half == "torch_ref" else {}))
    assert_follows(loaded, outputs, BY_HEAD)


SMALL = {"block_size": 2, "num_blocks": 40, "max_batch_size": 4, "prefill_chunk_size": 5}


@pytest.mark.parametrize(
    "knobs",
    [
        {"preemption": "recompute", **SMALL},
        {"preemption": "swap", "swap_blocks": 40, **SMALL},
        {"use_prefix_caching": False, "prefill_chunk_size": 1},
        {"kv_cache_backend": "contiguous"},
    ],
)
def test_no_setting_changes_what_is_kept(knobs: dict[str, Any], tmp_path: Path) -> None:
    loaded = load(calibrated(tmp_path / "m", scalars(NAMES["self_attn"])))
    assert_follows(
        loaded, generate(loaded, **knobs), torch.tensor([K_SCALES, V_SCALES]).T[..., None].expand(2, 2, 2)
    )


PLAIN = scalars(NAMES["self_attn"])
FIRST = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("extra", "settings", "reason"),
    [
        ({name: torch.ones(1) for name in PLAIN}, {}, "nothing was calibrated"),
        ({name: scale for name, scale in PLAIN.items() if name != FIRST}, {}, "not all layers have scales"),
        (PLAIN | {FIRST: torch.tensor(torch.nan)}, {}, "not all layers have scales"),
        (PLAIN | {FIRST: torch.tensor(-0.1)}, {}, "not all layers have scales"),
        (PLAIN | {FIRST: torch.ones(3)}, {}, "k_scale is F32 [3]"),
        (PLAIN | {"model.layers.7.self_attn.k_scale": torch.ones(1)}, {}, "in a model of 2 layers"),
        (PLAIN | {"model.layers.0.self_attn.v_zero_point": torch.ones(1, dtype=torch.int8)}, {}, "is not 0"),
        (PLAIN, {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "they are of int8, not of fp8"),
        (PLAIN, {"kv_cache_quant_algo": "NVFP4"}, "they are of NVFP4, not of fp8"),
    ],
)
def test_scales_that_mean_nothing_are_not_used(
    extra: dict[str, torch.Tensor], settings: dict[str, Any], reason: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = calibrated(tmp_path / "m", extra, **settings)
    with caplog.at_level(logging.INFO, "infer"):
        loaded = load(path)
        build_engine(EngineConfig.from_knobs(num_blocks=9), loaded)
    assert loaded.kv_scales is None
    assert "scales of a KV cache are not used" in caplog.text and reason in caplog.text
    assert "kv_cache_dtype=float32" in caplog.text


def test_where_fp8_cannot_be_auto_is_the_dtype() -> None:
    facts = ModelFacts(max_seq_len=64, num_layer_weights=1, has_kv_scales=True)
    gpu: dict[str, Any] = {"device": "cuda", "has_gpu_kernels": True, "gpu_memory": 24 << 30}

    def chosen(machine: Machine, **knobs: Any) -> str:
        return resolve(EngineConfig.from_knobs(**knobs), machine, facts).settings.cache.kv_cache_dtype

    assert chosen(Machine(**gpu)) == "fp8"
    assert chosen(Machine(**gpu, has_fp8=False)) == "auto"
    assert chosen(Machine(**gpu), attention_backend="flash") == "auto"
    assert chosen(Machine(**gpu), kv_cache_dtype="int8") == "int8"
    assert chosen(Machine(), kv_cache_backend="naive") == "auto"


def test_the_plan_counts_codes(tmp_path: Path) -> None:
    tokens = []
    for name, extra in (("plain", {}), ("calibrated", PLAIN)):
        headers = read_headers(resolve_model(str(calibrated(tmp_path / name, extra))))
        config = EngineConfig.from_knobs(kv_cache_memory="64KiB", max_batch_size=64, dtype="float32")
        plan = plan_memory(config, headers, machine_on(torch.device("cpu"), None))
        tokens.append(plan.cache.num_tokens)
    assert tokens[1] > 3 * tokens[0]


def test_scales_of_another_tower_are_not_those_of_the_text(tmp_path: Path) -> None:
    names = NAMES["outputs"]
    other = {f"vision_tower.{name}": tensor * 9 for name, tensor in scalars(names).items()}
    headers = read_headers(resolve_model(str(calibrated(tmp_path, scalars(names) | other))))
    assert headers.kv_scales is not None
    assert headers.kv_scales[:, 0, 0].tolist() == pytest.approx(K_SCALES)
    assert headers.kv_scales[:, 1, 0].tolist() == pytest.approx(V_SCALES)


def test_a_calibrated_checkpoint_can_be_served_without_its_scales(tmp_path: Path) -> None:
    plain = generate(load(calibrated(tmp_path / "plain", {})))
    own = generate(load(tmp_path / "plain"), kv_cache_dtype="fp8")
    loaded = load(calibrated(tmp_path / "calibrated", scalars(NAMES["self_attn"])))
    assert generate(loaded, kv_cache_dtype="none") == plain
    assert generate(loaded, kv_cache_dtype="fp8_per_token_head") == own
    assert generate(loaded, kv_cache_dtype="fp8") == generate(loaded) not in (plain, own)
