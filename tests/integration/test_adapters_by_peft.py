"""An adapter that PEFT itself has trained and saved is served as PEFT merges it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint

peft = pytest.importorskip("peft", reason="needs the package peft")
transformers = pytest.importorskip("transformers")

KNOBS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 64}
PROMPTS = [[5, 9, 100, 31, 7], [17] * 12, [3, 1, 4, 1, 5, 9, 2, 6]]
ATTENTION = ["q_proj", "v_proj", "o_proj"]
SETUPS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}),
    ("qwen3", {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, "use_rslora": True}),
    (
        "gemma3",
        {
            "r": 6,
            "lora_alpha": 24,
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 12},
            "alpha_pattern": {"v_proj": 48, "layers.0.self_attn.o_proj": 8},
        },
    ),
    ("mistral", {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    ("gpt2", {"r": 8, "lora_alpha": 32, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # the base's own, beside the adapter
@pytest.mark.parametrize(("family", "setup"), SETUPS, ids=[family for family, _ in SETUPS])
def test_trained_adapter_says_what_its_merged_model_says(
    family: str, setup: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make_checkpoint(family, tmp_path / "base")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **setup))
    tokens = torch.randint(3, 200, (4, 24))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().eval()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    with LLM(tmp_path / "base", lora_modules={"tuned": tmp_path / "adapter"}, **KNOBS) as llm:
        answers = llm.generate(PROMPTS, params, adapter="tuned")
        plain = llm.generate(PROMPTS, params)
    for prompt, answer, other in zip(PROMPTS, answers, plain, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for id_, row in zip(answer.token_ids, answer.outputs[0].logprobs or (), strict=True):
                logits = merged(input_ids=torch.tensor([ids])).logits[0, -1]
                assert int(logits.argmax()) == id_
                assert row.logprob == pytest.approx(float(logits.log_softmax(-1)[id_]), abs=2e-3)
                ids.append(id_)
        assert answer.outputs[0].cumulative_logprob != pytest.approx(other.outputs[0].cumulative_logprob)
