"""The target of a benchmark: a model on a device, real or with random weights, and the engines around it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infer.bench.report import revision_of
from infer.bench.roofline import ModelShape, shape_of
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.device_build import resolve_for
from infer.engine.engine import Engine
from infer.engine.run_manifest import shareable_knobs
from infer.frontend.open_model import open_model
from infer.kernels.runtime.dispatch import device_kind
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel
from infer.loader.random_weights import load_random
from infer.loader.weight_plan import bytes_per_weight, kept_bytes

# Large enough that attention and matrices take measurable time, small enough for many settings in minutes.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 2048,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A loaded model, and the knobs of the engines built around it."""

    loaded: LoadedModel
    config: EngineConfig
    is_random: bool = False  # random weights, which have no revision
    model_config: Path | None = None  # directory whose config.json gave random weights their shape
    revision: str = ""  # the hub's commit, or a hash of the files

    def in_form(self, quantization: str) -> BenchTarget:
        """Return the model reloaded with its weights in another form; itself if they are in that form."""
        if self.weights == quantization:
            return self
        config = EngineConfig.from_knobs(**(self.config.knobs() | {"quantization": quantization}))
        assert self.model_config or not self.is_random, "the shape of a tiny model is gone"
        made = self.model_config and _random(self.model_config, config)
        return replace(self, loaded=made or open_model(config, show_progress=True)[1], config=config)

    def engine(self, **knobs: Any) -> Engine:
        """Return a fresh engine; these knobs override the others."""
        return build_engine(EngineConfig.from_knobs(**(self.config.knobs() | knobs)), self.loaded)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.loaded.device

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.loaded.config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights in memory, tied ones once."""
        return kept_bytes(self.loaded.model)

    def shape(self) -> ModelShape:
        """Return the shape for rooflines; if matrices differ in bits, it uses the average."""
        weight_bytes = bytes_per_weight(self.loaded.model, self.loaded.dtype)
        return shape_of(
            self.loaded.config, weight_bytes=weight_bytes, kv_bytes=float(self.loaded.dtype.itemsize)
        )

    def facts(self) -> dict[str, Any]:
        """Return the model's part of a report."""
        config = self.loaded.config
        return {
            "name": self.loaded.name,
            **({"revision": self.revision} if self.revision else {}),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": device_kind(self.device),
            "weights": self.weights,
            "family": config.family,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "weight_bytes": self.weight_bytes,
        }

    def knobs(self) -> dict[str, Any]:
        """Return the configuration's part of a report: the values that `auto` chose here."""
        max_seq_len = self.loaded.max_seq_len
        scheduler = resolve_for(self.config, self.loaded).scheduler
        chosen = {name: getattr(scheduler, name, None) for name in shareable_knobs(self.config)}
        chosen |= {"dtype": str(self.loaded.dtype).removeprefix("torch."), "device": device_kind(self.device)}
        chosen |= {"max_seq_len": max_seq_len, "num_threads": torch.get_num_threads()}
        if device_kind(self.device) == "cpu":
            chosen["quantization"] = self.weights
        known = {name: value for name, value in chosen.items() if value is not None}
        return shareable_knobs(self.config) | known

    @property
    def weights(self) -> str:
        """The form of the weights in memory; random weights on a CPU have the dtype's form."""
        if self.loaded.weights != "as stored" or device_kind(self.device) != "cpu":
            return self.loaded.weights
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.loaded.dtype, "fp32")


def open_target(
    knobs: dict[str, Any], *, model_config: Path | None = None, is_tiny: bool = False
) -> BenchTarget:
    """Load the model that the knobs name, or make one with random weights."""
    config = EngineConfig.from_knobs(**knobs)
    if config.load.num_threads is not None or is_tiny:  # a tiny model has no work for a second thread
        torch.set_num_threads(config.load.num_threads or 1)
    if model_config is not None:
        directory = model_config.parent if model_config.name == "config.json" else model_config
        loaded = _random(directory, config)
        return BenchTarget(loaded=loaded, config=config, is_random=True, model_config=directory)
    if is_tiny:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made) / "tiny"
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
            return BenchTarget(loaded=_random(directory, config), config=config, is_random=True)
    _, loaded = open_model(config, show_progress=True)
    source = resolve_model(config.load.model, revision=config.load.revision, show_progress=False)
    return BenchTarget(loaded=loaded, config=config, revision=revision_of(source.path))


def _random(directory: Path, config: EngineConfig) -> LoadedModel:
    """Load random weights of a shape in the form of the configuration."""
    options = {
        name: getattr(config.load, name) for name in ("dtype", "device", "quantization", "max_seq_len")
    }
    return load_random(directory, **options)
