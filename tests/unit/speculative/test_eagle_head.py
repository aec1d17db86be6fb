"""An EAGLE-3 head against plain PyTorch written from the published description, and what files may say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infer.errors import CheckpointError, ConfigError
from infer.kernels.attention.reference import attend_naive, attend_sdpa
from infer.layers.attention import LayerInputs
from infer.layers.whole_sequence import WholeSequence
from infer.loader.eagle import load_eagle
from infer.loader.formats.checkpoint import write_safetensors
from infer.loader.load import LoadedModel
from infer.models.eagle3 import Eagle3, Guess
from tests.support.tiny import VOCAB_SIZE, tiny_model
from tests.unit.execution.test_layout import World

D, HEADS, KV_HEADS, HEAD, FF, DRAFTS = 32, 4, 2, 8, 40, 50  # heads as in the store of test_layout.py
EPS, THETA = 1e-5, 5000.0
TOKENS = [(place * 37 + 11) % VOCAB_SIZE for place in range(14)]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_model("llama")


def layout(width: int, size: int = D) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the reference's layout."""
    rows = HEADS * HEAD, KV_HEADS * HEAD
    return {
        "fc.weight": (size, 3 * width),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (rows[0], 2 * size),
        "midlayer.self_attn.k_proj.weight": (rows[1], 2 * size),
        "midlayer.self_attn.v_proj.weight": (rows[1], 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, rows[0]),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (FF, size),
        "midlayer.mlp.up_proj.weight": (FF, size),
        "midlayer.mlp.down_proj.weight": (size, FF),
        "norm.weight": (size,),
        "lm_head.weight": (DRAFTS, size),
        "embed_tokens.weight": (VOCAB_SIZE, size),
    }


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return made


def draft_tokens() -> torch.Tensor:
    return torch.arange(VOCAB_SIZE)[3::5][:DRAFTS]  # every fifth token of the model, from 3 on


def vocabulary() -> dict[str, torch.Tensor]:
    ids = draft_tokens()
    flags = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    flags[ids] = True
    return {"d2t": ids - torch.arange(DRAFTS), "t2d": flags}


def raw_config(target: LoadedModel, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": FF,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFTS,
        "target_hidden_size": target.config.hidden_size,
        "max_position_embeddings": 16,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
    } | changes


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return path


class PlainHead:
    """The published description, one sequence at a time: no cache, everything is computed again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.w = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        self.config = config

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.w[f"{name}.weight"]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.config.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.config.get("fc_norm"):
            parts = enumerate(states.chunk(3, dim=-1))
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in parts], dim=-1)
        return states @ self.w["fc.weight"].T

    def block(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Y of all rows of a sequence, whose positions are 0, 1, 2, ..."""
        length, positions = len(states), torch.arange(len(states))
        normed = self.norm(states, "midlayer.hidden_norm")
        x = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
        q, k, v = (
            (x @ self.w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, HEAD) for name in "qkv"
        )
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) * HEAD**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        seen = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
        residual = normed if self.config.get("norm_before_residual") else states
        a = residual + seen @ self.w["midlayer.self_attn.o_proj.weight"].T
        m = self.norm(a, "midlayer.post_attention_layernorm")
        gate, up = (m @ self.w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return a + (F.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T

    def draft(self, states: torch.Tensor, next_tokens: list[int], count: int) -> list[torch.Tensor]:
        """Logits of `count` guesses behind the last row, each behind the most likely one before it."""
        rows, tokens, made = self.combine(states), list(next_tokens), list[torch.Tensor]()
        ids = draft_tokens()
        for _ in range(count):
            y = self.block(self.w["embed_tokens.weight"][tokens], rows)
            last = self.norm(y, "norm")[-1]
            made.append(last @ self.w["lm_head.weight"].T)
            tokens.append(int(ids[made[-1].argmax()]))
            rows = torch.cat([rows, (last if self.config.get("norm_output") else y[-1])[None]])
        return made


def our_draft(
    head: Eagle3, states: torch.Tensor, tokens: list[int], count: int, chunks: list[int]
) -> list[torch.Tensor]:
    step, made, done = WholeSequence(attend_naive, torch.device("cpu")), list[torch.Tensor](), 0
    rows = head.combine(states)
    for length in chunks:
        step.advance(length)
        step.logit_indices = torch.tensor([length - 1])
        part = slice(done, done + length)
        guess: Guess = head(torch.tensor(tokens[part]), rows[part], step)
        done += length
    for _ in range(count):
        made.append(head.logits(guess.hidden_SD)[0])
        step.advance(1)
        step.logit_indices = None
        guess = head(head.token_ids_W[made[-1].argmax()][None], guess.states_SD, step)
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm and norm_output": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_description(variant: str, tmp_path: Path, target: LoadedModel) -> None:
    width, changes = target.config.hidden_size, VARIANTS[variant]
    shapes = layout(width)
    if changes.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * width,)
    if changes.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(3)}
    tensors, config = random_tensors(shapes), raw_config(target, **changes)
    head = load_eagle(write(tmp_path / "head", config, tensors | vocabulary()), target, num_drafts=8)
    states = torch.randn(len(TOKENS), 3 * width, generator=torch.Generator().manual_seed(1))

    expected = PlainHead(tensors, config).draft(states, TOKENS, 5)
    for chunks in ([14], [5, 8, 1], [1] * 14):
        with torch.no_grad():
            made = our_draft(head, states, TOKENS, 5, chunks)
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_nested_config_with_other_names_is_the_same_head(tmp_path: Path, target: LoadedModel) -> None:
    """The layout of `speculators`: `layers.0` for `midlayer`, the block's config in an object of its own."""
    tensors = random_tensors(layout(target.config.hidden_size))
    flat = raw_config(target)
    outer = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    nested = {name: flat[name] for name in outer} | {
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "transformer_layer_config": {name: flat[name] for name in flat if name not in outer},
    }
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    heads = [
        load_eagle(write(tmp_path / "flat", flat, tensors | vocabulary()), target),
        load_eagle(write(tmp_path / "nested", nested, renamed | vocabulary()), target),
    ]
    assert heads[0].config == heads[1].config
    for name, weight in heads[0].state_dict().items():
        assert torch.equal(weight, heads[1].state_dict()[name]), name


def test_qwen_blocks_shared_parts_and_outputs_of_layers(tmp_path: Path, target: LoadedModel) -> None:
    size = target.config.hidden_size
    shapes = layout(size, size) | {f"midlayer.self_attn.{n}_norm.weight": (HEAD,) for n in "qk"}
    del shapes["embed_tokens.weight"], shapes["lm_head.weight"]
    config = raw_config(target, hidden_size=size, draft_vocab_size=None)
    del config["eagle_aux_hidden_state_layer_ids"], config["target_hidden_size"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}  # outputs: of the layer before
    head = load_eagle(write(tmp_path / "head", config, random_tensors(shapes)), target)

    assert head.config.captured_layers == (0, 1, 1)
    assert "layers.0.attention.q_norm.weight" in head.state_dict()
    assert head.embedding is target.model.embedding
    assert head.head is target.model.head
    inputs, step = LayerInputs(head.config.captured_layers), WholeSequence(attend_sdpa, torch.device("cpu"))
    step.layer_inputs = inputs
    step.advance(len(TOKENS))
    with torch.no_grad():
        target.model(torch.tensor(TOKENS), step)
        step = WholeSequence(attend_sdpa, torch.device("cpu"))
        step.advance(len(TOKENS) - 1)
        guess = head(torch.tensor(TOKENS[1:]), head.combine(inputs.states())[:-1], step)
        assert head.logits(guess.hidden_SD).shape == (len(TOKENS) - 1, VOCAB_SIZE)


def test_rows_of_several_sequences_on_the_paged_store(tmp_path: Path, target: LoadedModel) -> None:
    """Chunks of two sequences in one batch, then a draft of both, whose keys the next true row replaces."""
    width, config = target.config.hidden_size, raw_config(target)
    tensors = random_tensors(layout(width)) | vocabulary()
    head = load_eagle(write(tmp_path / "head", config, tensors), target, num_drafts=8)
    states = torch.randn(2, len(TOKENS), 3 * width, generator=torch.Generator().manual_seed(1))
    world = World()
    for number in (0, 1):
        world.add(number)
    made: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    with torch.no_grad():
        rows = head.combine(states)
        for lengths, are_kept in (({0: 5, 1: 3}, True), ({1: 1, 0: 1}, False), ({0: 2, 1: 1}, True)):
            step, parts, own = world.step(lengths), list[torch.Tensor](), list[int]()
            for number, length in lengths.items():
                part = slice(world.computed[number], world.computed[number] + length)
                parts.append(rows[number, part] if are_kept else torch.ones(length, D))
                own += TOKENS[part]
            guess = head(torch.tensor(own), torch.cat(parts), step)
            for (number, length), logits in zip(
                lengths.items(),
                torch.split(head.logits(guess.hidden_SD), list(lengths.values())),
                strict=True,
            ):
                if are_kept:
                    made[number].append(logits)
                    world.computed[number] += length
                    world.pool.commit(number, [], world.computed[number])
        for number in (0, 1):
            count = world.computed[number]
            alone = WholeSequence(attend_naive, torch.device("cpu"))
            alone.advance(count)
            expected = head.logits(head(torch.tensor(TOKENS[:count]), rows[number, :count], alone).hidden_SD)
            torch.testing.assert_close(torch.cat(made[number]), expected, rtol=1e-5, atol=1e-5)


def broken(what: str, target: LoadedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config and tensors in which one thing is wrong."""
    config = raw_config(target)
    tensors = random_tensors(layout(target.config.hidden_size)) | vocabulary()
    match what:
        case "missing":
            del tensors["midlayer.mlp.up_proj.weight"]
        case "unused":
            tensors["fc.bias"] = torch.ones(D)
        case "shape":
            tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(HEADS * HEAD, D)
        case "no offsets":
            del tensors["d2t"]
        case "ids for offsets":
            tensors["d2t"] = draft_tokens()
        case "a token twice":
            tensors["d2t"] = -torch.arange(DRAFTS)
        case "flags":
            tensors["t2d"] = ~tensors["t2d"]
        case "short flags":
            tensors["t2d"] = tensors["t2d"][:-1]
        case "two layers":
            config["num_hidden_layers"] = 2
        case "vocabulary":
            config["vocab_size"] = VOCAB_SIZE + 1
        case "width":
            config["target_hidden_size"] = 999
        case "layers":
            config["eagle_aux_hidden_state_layer_ids"] = [0, 1, target.config.num_layers]
        case "terabytes":
            config |= {"num_attention_heads": 1 << 24, "head_dim": 4096}
        case "no embedding":
            del tensors["embed_tokens.weight"]
        case "tied":
            del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]
            config |= {"tie_word_embeddings": True, "draft_vocab_size": None}
    return config, tensors


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", r"1 missing: midlayer.mlp.up_proj.weight"),
        ("unused", r"1 not part of this model: fc.bias"),
        ("shape", r"q_proj.weight is \[32, 32\], not \[32, 64\]"),
        ("no offsets", "has no d2t"),
        ("ids for offsets", "name different"),
        ("a token twice", "offsets, not ids"),
        ("flags", "name different"),
        ("short flags", r"t2d of .* is BOOL \[299\], not torch.bool \[300\]"),
        ("two layers", "num_hidden_layers in config.json must be 1"),
        ("vocabulary", "vocabulary of 301 tokens, the model has 300"),
        ("width", "states of width 999"),
        ("layers", r"the model has 0\.\."),
        ("terabytes", r"q_proj.weight is \[32, 64\], not \[68719476736, 64\]"),
        ("no embedding", "has no embed_tokens"),
        ("tied", "tie_word_embeddings is not supported"),
    ],
)
def test_what_does_not_fit_is_said(what: str, message: str, tmp_path: Path, target: LoadedModel) -> None:
    directory = write(tmp_path / "head", *broken(what, target))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_eagle(directory, target)


def test_pickles_are_not_opened(tmp_path: Path, target: LoadedModel) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"convert it with scripts/unpickle.py"):
        load_eagle(tmp_path, target)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_eagle(tmp_path / "nowhere", target)
