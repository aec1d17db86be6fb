"""Every further family through the whole engine: paged cache, chunks, shared prefixes, C steps, codes, files.

What the engine does with its toggles is tested with the first families (test_engine_toggles.py); here each
family shows that nothing of its own block is lost on the way.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.errors import ConfigError
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.slices import Rank
from infer.loader.weight_plan import plan_weights
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.checkpoints import (
    HYBRID_FAMILIES,
    MORE_FAMILIES,
    MORE_MOE_FAMILIES,
    build_like,
    reference_model,
)
from tests.support.kv_store import fill_store
from tests.support.simple_loop import generate_greedy
from tests.support.step import run_step
from tests.support.thinned import thinned
from tests.support.tiny import greedy, random_prompts, run_engine
from tests.unit.loader.tiny_files import ARCHITECTURES, write_directory, write_gguf

SIZES = Sizes(hidden_size=128, vocab_size=300, context_len=96, num_layers=4)
PROMPTS = random_prompts(6)
YARN = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 16.0, "original_max_position_embeddings": 8}
all_families = pytest.mark.parametrize("family", MORE_FAMILIES + MORE_MOE_FAMILIES)
needs_c = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def checkpoint(root: Path, family: str) -> Path:
    """A tiny checkpoint, written once."""
    path = root / family
    if not path.exists():
        make_checkpoint(family, path, sizes=SIZES, seed=1)
    return path


@functools.cache
def loaded(path: Path, quantization: str = "none", max_seq_len: int | None = None) -> LoadedModel:
    return load_model(
        resolve_model(str(path)),
        dtype="float32",
        device="cpu",
        quantization=quantization,
        max_seq_len=max_seq_len,
    )


def answers(model: LoadedModel, *, together: bool = True, **knobs: Any) -> list[list[list[int]]]:
    """The tokens of all prompts, served together or one after the other in engines of their own."""
    config = EngineConfig.from_knobs(**({"num_blocks": 64} | knobs))
    found = []
    for batch in [PROMPTS] if together else [[prompt] for prompt in PROMPTS]:
        engine = build_engine(config, model)
        assert isinstance(engine._device, TorchDevice)
        fill_store(engine._device.store, float("nan"))
        found += run_engine(engine, [(prompt, greedy(9)) for prompt in batch])
    return found


@all_families
def test_the_engine_answers_as_the_simplest_loop(family: str, root: Path) -> None:
    model = loaded(checkpoint(root, family))
    expected = [[generate_greedy(model.model, prompt, 9)] for prompt in PROMPTS]

    for knobs in (
        {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 16, "prefill_chunk_size": 5},
        {"use_prefix_caching": False, "max_batch_size": 2},
        {"record_cpu_step": False},
    ):
        assert answers(model, **knobs) == expected, knobs


@needs_c
@pytest.mark.parametrize("family", [family for family in MORE_FAMILIES if family != "gemma4"])
def test_a_decode_step_is_one_recorded_program(family: str, root: Path) -> None:
    max_seq_len = 24 if family == "ministral3" else None  # beyond its trained context queries grow in Python
    model = loaded(checkpoint(root, family), "int8", max_seq_len)
    device = build_engine(EngineConfig.from_knobs(num_blocks=8), model)._device
    assert isinstance(device, TorchDevice) and device._cpu is not None
    assert device._cpu._program is not None, "some operation of the model is not in C"


@pytest.mark.parametrize(
    ("family", "quantization"), thinned(MORE_FAMILIES + MORE_MOE_FAMILIES, ("int8", "int4"), keep=3)
)
def test_rounded_weights_answer_alike_in_any_batch(family: str, quantization: str, root: Path) -> None:
    model = loaded(checkpoint(root, family), quantization)
    assert answers(model) == answers(model, together=False, max_batch_size=1)


@all_families
def test_a_saved_model_has_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    """Through the files and the loader, which puts rows into their places."""
    reference = reference_model(family)
    model = load_model(
        resolve_model(str(write_directory(tmp_path, reference))), dtype="float32", device="cpu"
    )
    tokens = torch.randint(0, 199, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0]

    torch.testing.assert_close(run_step(model.model, [tokens])[0], expected, atol=1e-4, rtol=1e-4)
    for name, parameter in build_like(reference).named_parameters():
        assert torch.equal(model.model.get_parameter(name), parameter), name


NEW_FAMILIES = MORE_FAMILIES + MORE_MOE_FAMILIES + HYBRID_FAMILIES
IN_GGUF = [family for family in NEW_FAMILIES if family in ARCHITECTURES]


@pytest.mark.parametrize("family", IN_GGUF)
def test_a_gguf_file_has_the_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    """Rows that the converter reordered, factors and windows that it spells in its own way."""
    changes: dict[str, Any] = {}
    if family == "olmo3":  # the format has one base for all layers
        changes["rope_parameters"] = {
            "full_attention": dict(YARN),
            "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
        }
    if family == "olmoe":  # no key for it: published models do not clip
        changes["clip_qkv"] = None
    if family == "qwen3_next":  # nor for this: all layers have experts
        changes["mlp_only_layers"] = []
    reference = reference_model(family, **changes)
    path = write_gguf(tmp_path / "model.gguf", reference)
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu")
    tokens = torch.randint(0, 199, (23,), generator=torch.Generator().manual_seed(1)).tolist()

    expected = run_step(build_like(reference), [tokens])[0]
    torch.testing.assert_close(run_step(model.model, [tokens])[0], expected, atol=1e-4, rtol=1e-4)


def test_the_packed_experts_of_gpt_oss_are_read_from_gguf(tmp_path: Path) -> None:
    reference = reference_model("gpt_oss", hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "model.gguf", reference, kinds={"exps.weight": "MXFP4"})
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    for name, tensor in reference.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [E, in, out]; the format has [E, out, in]
            packed = gguf.quants.quantize(tensor.transpose(1, 2).contiguous().numpy(), mxfp4)
            unpacked = torch.from_numpy(gguf.quants.dequantize(packed, mxfp4))
            tensor.copy_(unpacked.transpose(1, 2))
    tokens = torch.randint(0, 199, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = run_step(build_like(reference), [tokens])[0]

    for quantization, bound in (("none", 1e-4), ("auto", 0.05)):
        model = load_model(resolve_model(str(path)), dtype="float32", device="cpu", quantization=quantization)
        difference = (run_step(model.model, [tokens])[0] - expected).abs().max() / expected.std()
        assert difference < bound


def test_a_gpt_oss_whose_gguf_file_scales_no_positions_gets_no_scaling(tmp_path: Path) -> None:
    """A config.json without the key has the published scaling; a GGUF file without the keys has none."""
    reference = reference_model("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 150_000.0})
    path = write_gguf(tmp_path / "model.gguf", reference)
    assert read_headers(resolve_model(str(path))).config.rope_scaling is None


def test_smollm3_has_no_windows_if_its_flag_says_so() -> None:
    """The reference obeys the flag in its attention, but makes its masks from the types of layers."""
    changes: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 5}
    full = reference_model("smollm3", layer_types=["full_attention"] * 4, **changes)
    listed = reference_model("smollm3", layer_types=["sliding_attention"] * 4, **changes)
    tokens = list(range(3, 26))
    with torch.inference_mode():
        expected = full(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(run_step(build_like(listed), [tokens])[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["olmo2", "olmo3", "olmoe"])
def test_ranks_that_cannot_share_a_family_are_refused_by_name(family: str, root: Path) -> None:
    headers = read_headers(resolve_model(str(checkpoint(root, family))))
    plan = plan_weights(
        headers, quantization="none", dtype="float32", device=torch.device("cpu"), rank=Rank(0, 2)
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* normalised over all heads.*q_norm"):
        plan.check_cuts()


@pytest.mark.parametrize(
    ("scheme", "allowed"), [("ct-int8", 0.1), ("gptq", 0.6), ("awq", 0.6), ("fp8-block", 0.3)]
)
@pytest.mark.parametrize("family", ["glm4", "phi3"])
def test_rows_of_published_codes_change_places_as_rows_of_numbers_do(
    family: str, scheme: str, allowed: float, tmp_path: Path
) -> None:
    """Rows in a wrong order would leave nothing of the logits."""
    plain = tmp_path / "plain"
    sizes = Sizes(
        hidden_size=256, num_heads=2, num_kv_heads=1, vocab_size=300, num_layers=2
    )  # heads of 128 rows
    make_checkpoint(family, plain, sizes=sizes, seed=1)
    group: dict[str, Any] = {} if scheme in ("ct-int8", "fp8-block") else {"group_size": 32}
    quantize_checkpoint(resolve_model(str(plain)), tmp_path / scheme, Recipe(scheme=scheme, **group))
    expected, found, packed = (
        run_step(loaded(path, quantization).model, [PROMPTS[1]])[0]
        for path, quantization in ((plain, "none"), (tmp_path / scheme, "none"), (tmp_path / scheme, "auto"))
    )
    assert (found - expected).norm() < allowed * expected.norm()
    assert (packed - expected).norm() < allowed * expected.norm()


def test_a_line_says_that_longrope_is_made_for_the_served_length(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = resolve_model(str(checkpoint(root, "phi3")))  # trained on 48 of its 96 tokens
    with caplog.at_level("INFO"):
        load_model(source, device="cpu", max_seq_len=48)
        assert not any("longrope" in message for message in caplog.messages)
        load_model(source, device="cpu")
    (message,) = [message for message in caplog.messages if "longrope" in message]
    assert "96 tokens" in message and "max_seq_len=48" in message
