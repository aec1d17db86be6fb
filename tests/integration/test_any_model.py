"""Families without a file here run with transformers' code, and the engine changes none of their tokens."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import infer.client.load  # noqa: F401  (before a test replaces what it imports)
from infer import LLM, SamplingParams
from infer.cli.main import main
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.errors import CheckpointError, ConfigError
from infer.loader.find.source import resolve_model
from infer.loader.headers import headers_of_config, read_headers
from infer.models.transformers_model import Seen, _check_config, _read_mask, check_tokens_apart
from infer.tools.doctor import examine_machine
from infer.tools.memory_needs import find_machine
from infer.tools.memory_plan import plan_memory
from scripts.make_checkpoint import make_checkpoint
from tests.support.checkpoints import randomize
from tests.support.thinned import thinned

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": 2}
LATENT: dict[str, Any] = {  # values are narrower than keys
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "starcoder2": GROUPED | {"sliding_window": 7},  # a window in all layers
    "phi": GROUPED,  # a parallel block, part of each head turned
    "gpt_neox": COMMON,  # fused heads, a head for tokens by another name
    "opt": COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions, a decoder inside
    "cohere": GROUPED | {"logit_scale": 0.25},  # logits that are scaled behind the head
    "granitemoe": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "ministral": GROUPED | {"head_dim": 16, "sliding_window": 7},
    "nemotron": GROUPED | {"head_dim": 16},
    "gpt_oss": GROUPED
    | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "afmoe": GROUPED  # the mask by its name, a gate behind attention
    | {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 7,
    },
    "deepseek_v3": COMMON | LATENT,
    "glm4_moe_lite": COMMON | LATENT,
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0},
}
KNOBS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_batch_size": 4}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21], [*range(30, 60)], [*range(30, 55), 3], [*range(30, 60)]]
NUM_NEW = 12


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("foreign")

    @functools.cache
    def make(family: str) -> tuple[Path, Any, list[list[int]]]:
        """A tiny random checkpoint, transformers' model of it, and its greedy tokens."""
        path = root / family
        make_checkpoint("qwen2", path)  # for its tokenizer
        config = AutoConfig.for_model(family, **FAMILIES[family])
        made: Any = AutoModelForCausalLM
        model = made.from_config(config, attn_implementation="eager").eval()
        randomize(model, seed=3)
        model.save_pretrained(path)
        greedy = [
            model.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
            for ids in PROMPTS
        ]
        return path, model, greedy

    return make


def generate(path: Path, **knobs: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(str(path), **(KNOBS | knobs)) as llm:
        return [list(output.token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=2))
def test_chunks_batches_and_cached_prefixes_give_the_tokens_of_transformers(
    checkpoints: Any, family: str
) -> None:
    path, _, greedy = checkpoints(family)
    assert generate(path, max_num_batched_tokens=11, model_impl="transformers") == greedy


@pytest.mark.parametrize(
    ("family", "knobs"),
    thinned(
        ("starcoder2", "gpt_neox"),
        (
            {"num_blocks": 14, "max_num_batched_tokens": 16},
            {"attention_backend": "sdpa"},
            {"kv_cache_backend": "naive", "use_prefix_caching": False},
            {"speculative_method": "ngram"},
        ),
        keep=2,
    ),
)
def test_every_way_through_the_engine_gives_the_same(
    checkpoints: Any, family: str, knobs: dict[str, Any]
) -> None:
    path, _, greedy = checkpoints(family)
    assert generate(path, **knobs) == greedy


@pytest.mark.parametrize("family", ["starcoder2", "opt"])
def test_the_device_half_of_a_gpu_gives_the_same_over_the_references_of_its_kernels(
    checkpoints: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, greedy = checkpoints(family)
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    assert generate(path, max_num_batched_tokens=16, num_blocks=64) == greedy


@pytest.mark.parametrize("family", ["cohere", "granitemoe"])
def test_scales_behind_the_head_are_in_the_logprobs(checkpoints: Any, family: str) -> None:
    path, model, _ = checkpoints(family)
    with LLM(str(path), **KNOBS) as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1, logprobs=4))
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    assert output.outputs[0].logprobs is not None
    (step,) = output.outputs[0].logprobs
    for token_id, logprob in step.top:
        assert logprob == pytest.approx(wanted[token_id].item(), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_one_of_our_own_families_runs_with_either_code(family: str, tmp_path: Path) -> None:
    """The reference makes a mask for Qwen 2 MoE's windows of 0 tokens, although no layer has a window."""
    make_checkpoint(family, tmp_path / "m")
    assert read_headers(resolve_model(str(tmp_path / "m"))).config.impl == "infer"
    assert generate(tmp_path / "m", model_impl="transformers") == generate(tmp_path / "m")


def test_the_start_line_the_plan_and_the_doctor_say_whose_code_it_is(
    checkpoints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, model, _ = checkpoints("starcoder2")
    caplog.set_level("INFO")
    generate(path)
    assert "model_impl=transformers" in caplog.text
    assert "class=Starcoder2ForCausalLM" in caplog.text
    headers = headers_of_config(path / "config.json", "tiny")
    assert headers.config.layer_windows == (7, 7, 7)
    config = EngineConfig.from_knobs(model=str(path), **KNOBS)
    plan = plan_memory(config, read_headers(resolve_model(str(path))), find_machine("cpu", None))
    assert plan.num_parameters == model.num_parameters()
    assert plan.needs.weights >= 4 * plan.num_parameters
    assert any(name == "transformers" for name, _ in examine_machine().rows)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"quantization": "int8"}, "quantization=int8 needs a model that infer implements"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 needs a model that infer implements"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 needs a model that infer implements"),
        ({"deterministic": True}, "deterministic=on needs a model that infer implements"),
        ({"record_cpu_step": True}, "record_cpu_step=on needs a model that infer implements"),
        ({"mlp_backend": "torch_ref"}, "mlp_backend=torch_ref needs a model that infer implements"),
        ({"model_impl": "infer"}, "Starcoder2ForCausalLM, which no family here has code for"),
        ({"model_impl": "other"}, "model_impl"),
    ],
)
def test_what_needs_layers_of_ours_is_refused_by_name(
    checkpoints: Any, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoints("starcoder2")[0]), **(KNOBS | knobs))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "bloom"}, "BloomForCausalLM computes attention by itself"),
        ({"model_type": "mamba"}, "mamba"),
        (GROUPED | {"model_type": "falcon_h1"}, "FalconH1ForCausalLM keeps a state|layers of the kind"),
        ({"model_type": "t5"}, "an encoder and a decoder"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
        ({"model_type": "nothing_known"}, "ValueError"),
        (
            GROUPED | {"model_type": "starcoder2", "quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantized",
        ),
        (
            GROUPED
            | {"model_type": "starcoder2", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic",
        ),
        (GROUPED | {"model_type": "starcoder2", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        (GROUPED | {"model_type": "starcoder2", "is_causal": False}, "not causal"),
        ({"model_type": "fuyu"}, "fuyu has a text decoder among other parts"),
        (GROUPED | {"model_type": "doge", "head_dim": 16}, "it computes with the attention mask"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, raw: dict[str, Any], message: str
) -> None:
    name = f"{raw['model_type']}ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]} | raw))
    with pytest.raises(ConfigError, match=message):
        headers_of_config(tmp_path / "config.json", "tiny", "transformers")


def test_without_the_package_the_error_says_how_to_get_it(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = checkpoints("phi")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"PhiForCausalLM, which no family here has code for.*infer\[transformers\]"
    ):
        LLM(str(path), **KNOBS)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    raw = {
        "architectures": ["EvilForCausalLM"],
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="cannot run it here"):
        headers_of_config(tmp_path / "config.json", "tiny")
    assert not (tmp_path / "ran").exists()


def test_a_config_chooses_no_kernels_and_no_adapter(checkpoints: Any, tmp_path: Path) -> None:
    """The name of an implementation may mean code from the hub; PEFT, if installed, would add an adapter."""
    path, _, _ = checkpoints("granitemoe")
    raw = json.loads((path / "config.json").read_text())
    written = {"experts_implementation": "sonicmoe", "_experts_implementation": "sonicmoe"}
    (tmp_path / "config.json").write_text(json.dumps(raw | written))
    hf_config, _ = _check_config(transformers, tmp_path, raw)
    assert hf_config._experts_implementation is None
    (tmp_path / "adapter_config.json").write_text("{}")
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=r"adapter_config\.json"):
            _check_config(transformers, source, raw)


def test_a_checkpoint_that_lacks_weights_is_not_filled_with_random_ones(
    checkpoints: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    path, _, _ = checkpoints("phi")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    weights.pop("model.layers.1.mlp.fc1.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys: model\.layers\.1\.mlp\.fc1\.weight"):
        LLM(str(tmp_path), **KNOBS)


def test_the_command_line_plans_and_generates(checkpoints: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, _, _ = checkpoints("phi")
    for words in (["plan", str(path)], ["generate", "the river", "--model", str(path), "--max-tokens", "3"]):
        assert main(words) == 0
        assert capsys.readouterr().out


def test_a_network_that_mixes_tokens_outside_of_attention_is_refused(checkpoints: Any) -> None:
    path, _, _ = checkpoints("phi")
    with LLM(str(path), **KNOBS) as llm:
        model = llm.engine._device.model  # type: ignore[attr-defined]
        check_tokens_apart(model, torch.device("cpu"))
        embed = model.base.embed_tokens
        shifted = embed.register_forward_hook(lambda _, __, made: made + made.cumsum(dim=1))
        with pytest.raises(ConfigError, match="would mix sequences"):
            check_tokens_apart(model, torch.device("cpu"))
        shifted.remove()


def test_masks_are_read_by_what_they_let_through() -> None:
    assert _read_mask(mask_function=lambda b, h, q, k: k <= q) == Seen(None)
    for window in (1, 2, 7, 4096):
        assert _read_mask(mask_function=lambda b, h, q, k, w=window: (k <= q) & (k > q - w)) == Seen(window)
    assert "chunks" in _read_mask(mask_function=lambda b, h, q, k: (k <= q) & (k // 8 == q // 8)).why
    assert "not causal" in _read_mask(mask_function=lambda b, h, q, k: k <= q + 1).why
