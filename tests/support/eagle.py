"""Random EAGLE-3 heads for tests, and what they draft compared with the same head over the whole text."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.engine.draft_head import DraftHead
from infer.engine.engine import Engine
from infer.kernels.attention.reference import attend_naive
from infer.layers.attention import LayerInputs
from infer.layers.whole_sequence import WholeSequence
from infer.loader.formats.checkpoint import write_safetensors
from infer.loader.load import LoadedModel
from infer.models.config import ModelConfig
from infer.models.eagle3 import Eagle3
from infer.models.model import Model

HEADS, KV_HEADS = 6, 3  # other than those of any model here


def write_head(
    path: Path, model: ModelConfig, draft_ids: Seq[int], *, head_dim: int = 16, context_len: int = 64
) -> None:
    """Write a random head for a model, which can guess these tokens."""
    size, middle = model.hidden_size, 24
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (HEADS * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, HEADS * head_dim),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (middle, size),
        "midlayer.mlp.up_proj.weight": (middle, size),
        "midlayer.mlp.down_proj.weight": (size, middle),
        "norm.weight": (size,),
        "lm_head.weight": (len(draft_ids), size),
        "embed_tokens.weight": (model.vocab_size, size),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    tensors["d2t"] = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
    last = model.num_layers - 1
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "target_hidden_size": size,
        "intermediate_size": middle,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": len(draft_ids),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_len,
        "eagle_aux_hidden_state_layer_ids": [0, last // 2, last],
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)


class Drafted(NamedTuple):
    """Drafts, and the text that was known when they were made."""

    tokens: list[int]
    drafts: list[int]


def watch(engine: Engine) -> list[Drafted]:
    """What the head of an engine drafts from now on."""
    drafter: Any = engine.speculation and engine.speculation._drafter
    assert isinstance(drafter, DraftHead)
    found, collect = list[Drafted](), drafter.collect

    def collect_and_note() -> list[list[int]]:
        sequences = drafter._sequences
        drafts = collect()
        pairs = zip(sequences, drafts, strict=True)
        found.extend(Drafted(list(seq.tokens), list(made)) for seq, made in pairs)
        return drafts

    drafter.collect = collect_and_note  # type: ignore[method-assign]
    return found


@functools.cache  # runs in other ways come to the same texts
def _likeliest(
    model: Model, head: Eagle3, tokens: tuple[int, ...], count: int, margin: float
) -> tuple[int, ...]:
    """The likeliest drafts behind a text, from states of all of it at once; -1 where two are too close."""
    found: list[int] = []
    cpu = torch.device("cpu")
    with torch.inference_mode():
        whole = WholeSequence(attend_naive, cpu)
        whole.advance(len(tokens) - 1)
        whole.layer_inputs = LayerInputs(head.config.captured_layers)
        model(torch.tensor(tokens[:-1]), whole)
        states, step = head.combine(whole.layer_inputs.states()), WholeSequence(attend_naive, cpu)
        step.advance(len(tokens) - 1)
        given = list(tokens[1:])
        for _ in range(count):
            guess = head(torch.tensor(given), states, step)
            logits = head.logits(guess.hidden_SD[-1])
            best, second = logits.topk(2).values.tolist()
            draft = int(head.token_ids_W[logits.argmax()])
            found.append(draft if best - second > margin else -1)
            states, given = guess.states_SD[-1:], [draft]
            step.advance(1)
    return tuple(found)


def share_of_whole_text(
    loaded: LoadedModel, head: Eagle3, found: list[Drafted], margin: float = 1e-3
) -> float:
    """The share of windows whose drafts are those of the whole text; both on the CPU, in float32."""
    num_right = 0
    for tokens, drafts in found:
        expected = _likeliest(loaded.model, head, tuple(tokens), len(drafts), margin)
        end = expected.index(-1) if -1 in expected else len(expected)
        num_right += drafts[:end] == list(expected[:end])
    return num_right / len(found)
