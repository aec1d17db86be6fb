"""From files to a model that computes what the reference computes."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError, ConfigError
from infer.loader.find import default_model
from infer.loader.find.source import resolve_model
from infer.loader.formats.gguf import GGMLType, read_gguf
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, choose_device, load_model
from infer.models.model import Model
from tests.support.checkpoints import FAMILIES, MOE_FAMILIES, build_like, reference_model
from tests.support.step import run_step
from tests.unit.loader.tiny_files import state, write_directory, write_gguf, write_weights


def load(path: Path, **knobs: Any) -> LoadedModel:
    return load_model(resolve_model(str(path), show_progress=False), **{"device": "cpu", **knobs})


def assert_same_parameters(ours: Model, expected: Model) -> None:
    theirs = dict(expected.named_parameters())
    assert dict(ours.named_parameters()).keys() == theirs.keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs[name].to(parameter.dtype)), name


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
def test_a_saved_model_loads_bit_for_bit(tmp_path: Path, family: str, num_shards: int) -> None:
    reference = reference_model(family)
    loaded = load(write_directory(tmp_path, reference, num_shards=num_shards))
    assert_same_parameters(loaded.model, build_like(reference))
    assert loaded.config.family == family
    assert loaded.eos_ids == (2,)


@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
def test_a_gguf_file_loads_bit_for_bit(tmp_path: Path, family: str) -> None:
    """The converter's reordered rows, added ones and transposed matrices are all undone."""
    changes: dict[str, dict[str, Any]] = {
        "gemma2": {"query_pre_attn_scalar": 16},
        "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "layer_types": None},
        "qwen3_moe": {"mlp_only_layers": []},  # the format knows no plain layers
        "qwen2_moe": {"mlp_only_layers": []},
    }
    reference = reference_model(family, **changes.get(family, {}))
    loaded = load(write_gguf(tmp_path / "model.gguf", reference))
    expected = build_like(reference)
    if family in ("gemma2", "gemma3"):  # w + 1 - 1 is not w in float32
        for ours, theirs in zip(loaded.model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
    else:
        assert_same_parameters(loaded.model, expected)
    assert loaded.config.family == family
    ignored = {"norm_eps"}  # stored as float32
    for field in set(type(loaded.config).__slots__) - ignored:
        assert getattr(loaded.config, field) == getattr(expected.config, field), field


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_head_is_tied_when_the_file_has_none(tmp_path: Path, tied: bool) -> None:
    loaded = load(write_gguf(tmp_path / "m.gguf", reference_model("llama", tie_word_embeddings=tied)))
    assert loaded.config.tie_embeddings is tied
    assert (loaded.model.head.weight is loaded.model.embedding.weight) is tied


def test_packed_rows_are_reordered_like_plain_ones(tmp_path: Path) -> None:
    """Q and k are put back in order before they are unpacked; the numbers must be the unpacked ones."""
    reference = reference_model("llama", hidden_size=64, intermediate_size=96)
    packed = load(write_gguf(tmp_path / "packed.gguf", reference, kind="Q8_0"))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reference.state_dict().values():
        if tensor.dim() == 2:
            stored = gguf.quants.quantize(tensor.numpy(), q8_0)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(stored, q8_0)))
    assert_same_parameters(packed.model, build_like(reference))


def test_llama3_rope_scaling_is_recovered_from_its_table(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    reference = reference_model("llama", head_dim=64, rope_parameters=scaling)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / stretched).numpy().astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", reference, extra={"rope_freqs.weight": factors})
    assert load(path).config.rope_scaling == build_like(reference).config.rope_scaling


def test_a_rope_table_that_is_not_llama3s_is_refused(tmp_path: Path) -> None:
    for factors in (np.arange(6), np.zeros(6), np.full(6, np.nan), np.full(6, np.inf), -np.ones(6)):
        path = tmp_path / "m.gguf"
        write_gguf(path, reference_model("llama"), extra={"rope_freqs.weight": factors.astype(np.float32)})
        with pytest.raises(ConfigError, match="not Llama 3's"):
            load(path)


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_the_text_part_of_a_model_that_reads_images_is_read_from_gguf(
    family: str, architecture: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    reference = reference_model(family, **changes)
    path = write_gguf(
        tmp_path / "model.gguf", reference, architecture=architecture,
        numbers={"rope.dimension_sections": [2, 2, 2, 0], "n_deepstack_layers": 3},
    )  # fmt: skip
    tokens = list(range(3, 30))
    expected = run_step(build_like(reference), [tokens])[0]
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu").model
    torch.testing.assert_close(run_step(model, [tokens])[0], expected, atol=1e-4, rtol=1e-4)


def test_the_settings_of_yarn_are_read_from_a_gguf_file(tmp_path: Path) -> None:
    """Files of Mistral's own format have other edges than 32 and 1; files may scale what attention sees."""
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 2.0}
    reference = reference_model("qwen3", rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", reference)
    tokens = list(range(3, 30))
    expected = run_step(build_like(reference), [tokens])[0]
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu").model
    torch.testing.assert_close(run_step(model, [tokens])[0], expected, atol=1e-4, rtol=1e-4)

    for name, value, factor in (("yarn_attn_factor", 1.25, 1.25), ("yarn_log_multiplier", 1.0, 1.0)):
        path = write_gguf(tmp_path / name, reference, numbers={f"rope.scaling.{name}": value})
        scaling = read_headers(resolve_model(str(path))).config.rope_scaling
        assert scaling is not None and scaling.attention_factor == factor
    path = write_gguf(tmp_path / "model.gguf", reference, numbers={"rope.scaling.yarn_ext_factor": 0.5})
    with pytest.raises(ConfigError, match="extrapolates yarn by a factor, which is not supported"):
        read_headers(resolve_model(str(path)))


def test_eos_and_sampling_defaults_come_from_both_configs(tmp_path: Path) -> None:
    write_directory(tmp_path, reference_model("llama"))
    defaults = {"eos_token_id": [7, 2, 100_000], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    headers = read_headers(resolve_model(str(tmp_path)))
    assert headers.eos_ids == load(tmp_path).eos_ids == (2, 7)  # 100 000 is not in the vocabulary
    assert headers.defaults.sampling == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_on_the_way(tmp_path: Path, dtype: str) -> None:
    reference = reference_model("llama", dtype=torch.bfloat16)
    loaded = load(write_directory(tmp_path, reference), dtype=dtype)
    assert loaded.dtype is getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {loaded.dtype}
    assert_same_parameters(loaded.model, build_like(reference))
    assert torch.get_default_dtype() is torch.float32


def test_a_tied_head_that_is_stored_too_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = reference_model("llama", tie_word_embeddings=True)
    write_directory(tmp_path, reference)
    same = reference.model.embed_tokens.weight.detach()
    write_weights(tmp_path, state(reference) | {"lm_head.weight": same.clone()})
    with caplog.at_level(logging.WARNING, "infer"):
        assert_same_parameters(load(tmp_path).model, build_like(reference))
        assert not caplog.records
        write_weights(tmp_path, state(reference) | {"lm_head.weight": same + 1})
        assert_same_parameters(load(tmp_path).model, build_like(reference))
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    reference = reference_model("llama")
    write_directory(tmp_path, reference)
    tensors = state(reference)
    del tensors["model.layers.1.self_attn.k_proj.weight"]  # one part of a fused matrix
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(80, 47)
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(80, 48)
    tensors["model.extra.weight"] = torch.zeros(3)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(48, 80, dtype=torch.int8)
    write_weights(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "2 missing" in message
    assert "model.layers.1.self_attn.k_proj.weight" in message and "model.norm.weight" in message
    assert "2 not part of this model" in message
    assert "model.layers.9.mlp.up_proj.weight" in message and "model.extra.weight" in message
    assert "model.layers.0.mlp.up_proj.weight is [80, 47], not [80, 48]" in message
    assert "model.layers.2.mlp.down_proj.weight (I8)" in message


def test_of_many_missing_tensors_five_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    reference = reference_model("gpt2")
    write_directory(tmp_path, reference)
    write_weights(tmp_path, {"transformer.wte.weight": reference.transformer.wte.weight.detach()})
    with pytest.raises(CheckpointError, match=r"39 missing: transformer.wpe.weight.* and 34 more$"):
        load(tmp_path)


def test_two_names_for_one_place_are_refused(tmp_path: Path) -> None:
    reference = reference_model("gpt2")
    write_directory(tmp_path, reference)
    write_weights(tmp_path, state(reference) | {"wpe.weight": reference.transformer.wpe.weight.detach() + 0})
    with pytest.raises(CheckpointError, match="fill the same place"):
        load(tmp_path)


def test_a_sequence_may_be_shorter_than_the_context_but_not_longer(tmp_path: Path) -> None:
    write_directory(tmp_path, reference_model("llama"))
    assert load(tmp_path).max_seq_len == 128
    assert load(tmp_path, max_seq_len=17).max_seq_len == 17
    with pytest.raises(ConfigError, match=r"1..128 \(the context\), got 129"):
        load(tmp_path, max_seq_len=129)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "llama"])
def test_rotary_tables_are_as_long_as_the_longest_sequence(tmp_path: Path, family: str) -> None:
    loaded = load(write_directory(tmp_path, reference_model(family)), max_seq_len=17)
    tables = [table for name, table in loaded.model.named_buffers() if name.endswith(("cos_PR", "sin_PR"))]
    assert [len(table) for table in tables] == [17] * {"gemma3": 4, "gpt2": 0, "llama": 2}[family]
    assert loaded.config.context_len == 128


def test_a_context_whose_tables_would_take_gigabytes_is_refused_before_they_are_built(tmp_path: Path) -> None:
    write_directory(tmp_path, reference_model("llama"), head_dim=4096, max_position_embeddings=2**24)
    before = peak_memory()
    with pytest.raises(ConfigError, match="set max_seq_len to 32768 or less"):
        load(tmp_path)
    assert peak_memory() - before < 2**28


def peak_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_an_unpackable_block_format_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    reference = reference_model("llama")
    path = write_gguf(tmp_path / "m.gguf", reference, kind="F32")
    table = reference.model.embed_tokens.weight
    name = b"token_embd.weight"
    raw = path.read_bytes()
    type_at = raw.index(name) + len(name) + 4 + 8 * table.dim()  # after the rank and the shape
    assert raw[type_at : type_at + 4] == bytes(4)  # F32
    path.write_bytes(raw[:type_at] + bytes([GGMLType.I32, 0, 0, 0]) + raw[type_at + 4 :])
    with pytest.raises(CheckpointError, match=r"I32"):
        load(path)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="this machine has"):
        choose_device(f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N"):
        choose_device("tpu")


def default_file() -> Path:
    """The default model, if it is cached already: fetching it is the `network` test below."""
    path = default_model.models_dir() / default_model.FILE
    if not path.exists():
        pytest.skip("the default model is not cached; `infer fetch` brings it")
    return path


def test_the_default_model_unpacks_to_what_the_format_library_says() -> None:
    path = default_file()
    loaded = load(path)
    file = read_gguf(path)
    of = loaded.model.get_parameter
    expected = {
        "blk.17.attn_v.weight": of("layers.17.attention.qkv.weight")[768:],
        "blk.17.ffn_down.weight": of("layers.17.mlp.down.weight"),
        "token_embd.weight": of("embedding.weight"),
        "blk.3.attn_norm.weight": of("layers.3.attention_norm.weight"),
    }
    for name, ours in expected.items():
        kind = gguf.GGMLQuantizationType(file.tensors[name].kind)
        theirs = gguf.quants.dequantize(file.packed_rows(name), kind)
        assert np.array_equal(ours.detach().numpy(), theirs.reshape(ours.shape)), name
    assert loaded.dtype is torch.float32 and loaded.eos_ids == (2,) and loaded.max_seq_len == 8192


MEASURE_PEAK = """
import re, sys
from infer.loader.load import load_model
from infer.loader.find.source import resolve_model

def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

source = resolve_model(sys.argv[1])
before = memory("VmRSS")
model = load_model(source, device="cpu").model
print(memory("VmHWM") - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def test_loading_takes_little_more_memory_than_the_model() -> None:
    """In a process of its own: a peak is never forgotten."""
    path = default_file()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(path)], capture_output=True, text=True, check=True
    )
    peak, size = map(int, done.stdout.split())
    assert peak < 1.15 * size + path.stat().st_size  # the pages of the mapped file are counted too


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gets_the_same_numbers(tmp_path: Path, family: str) -> None:
    """Blocks are unpacked on the device they are loaded to."""
    reference = reference_model(family)
    for path in (
        write_gguf(tmp_path / "m.gguf", reference, kind="Q5_0"),
        write_directory(tmp_path, reference),
    ):
        on_gpu = load(path, device="cuda", dtype="float32").model
        on_cpu = dict(load(path).model.named_parameters())
        for name, parameter in on_gpu.named_parameters():
            assert parameter.is_cuda and torch.equal(parameter.cpu(), on_cpu[name]), name


@pytest.mark.network
@pytest.mark.slow
def test_the_default_model_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = resolve_model(None, show_progress=False)
    assert source.is_gguf and source.name == "SmolLM2-135M-Instruct"
    assert source.path.is_relative_to(tmp_path)
    left = sorted(entry.name for entry in source.path.parent.iterdir())
    assert left == [".lock", default_model.FILE]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the second time needs no network
    assert resolve_model(None, show_progress=False) == source


def published_names(reference: Any) -> dict[str, torch.Tensor]:
    """The tensors as Mixtral's published files hold them: three matrices per expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state(reference).items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        start, _, leaf = name.rpartition(".")
        for expert in range(len(tensor) if tensor.dim() == 3 else 0):
            if leaf == "gate_up_proj":
                gate, up = tensor[expert].chunk(2)
                found |= {
                    f"{start}.{expert}.w1.weight": gate.contiguous(),
                    f"{start}.{expert}.w3.weight": up.contiguous(),
                }
            else:
                found[f"{start}.{expert}.w2.weight"] = tensor[expert].contiguous()
        if tensor.dim() != 3:
            found[name] = tensor
    return found


def test_the_matrices_of_single_experts_are_stacked(tmp_path: Path) -> None:
    reference = reference_model("mixtral")
    path = write_directory(tmp_path, reference)
    write_weights(path, published_names(reference))
    assert_same_parameters(load(path).model, build_like(reference))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("without", r"1 missing: model\.layers\.1\.block_sparse_moe\.experts\.3\.w3\.weight"),
        ("beyond", r"1 not part of this model: model\.layers\.1\.block_sparse_moe\.experts\.5\.w1\.weight"),
        ("flat", r"experts\.3\.w1\.weight is \[79, 48\], not \[80, 48\]"),
        ("both", r"fill the same place"),
        ("deep", r"experts\.down_proj is \[4, 48, 80\], not \[5, 48, 80\]"),
    ],
)
def test_experts_that_do_not_fit_are_named(tmp_path: Path, change: str, message: str) -> None:
    reference = reference_model("mixtral")
    tensors = published_names(reference)
    expert = "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"
    stack = "model.layers.1.mlp.experts.down_proj"
    if change == "without":
        del tensors[expert.format(3, 3)]
    elif change == "beyond":
        tensors[expert.format(5, 1)] = tensors[expert.format(4, 1)].clone()
    elif change == "flat":
        tensors[expert.format(3, 1)] = tensors[expert.format(3, 1)][1:].clone()
    elif change == "both":
        tensors[stack] = state(reference)[stack].clone()
    else:
        tensors = {
            name: t for name, t in tensors.items() if not name.endswith("w2.weight") or ".1." not in name
        }
        tensors[stack] = state(reference)[stack][1:].clone()
    path = write_directory(tmp_path, reference)
    write_weights(path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)
