"""Find the first difference of two models: compare their activations, module by module, in execution order.

A wrong logit reveals nothing about its cause. This tool runs two models on the same tokens, records the
output of every module (with forward hooks, without editing models), aligns the recordings and names the
first tensor that differs:

    report = diff_models(ours, reference, [1, 2, 3])
    print(report)                # a table, and "first difference: layers.1.attention.qkv[k]"

    embedding ─ layers.0.attention_norm ─ layers.0.attention.qkv[q] ─ ...      ours
        │                │                           │
    embed_tokens ─ input_layernorm ─────────── self_attn.q_proj ─ ...          reference

The lines between the two are the family's weight map: if two modules load the same checkpoint tensor, their
outputs must agree. A part of a fused module is its slice of columns.
Two of our own models are aligned by the names of their modules.

From a shell (`hf:DIR` loads the second one with transformers):

    python -m infer.tools.activation_diff DIR_A DIR_B
    python -m infer.tools.activation_diff DIR hf:DIR --tokens 1,2,3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infer.errors import ConfigError, InferError
from infer.kernels.attention.reference import attend_naive
from infer.layers.linear import Linear
from infer.layers.whole_sequence import WholeSequence
from infer.models.model import Model
from infer.models.registry import get_family
from infer.models.weight_map import WeightMap, names_an_expert
from infer.quant.residual import Deferred, as_tensor

# Relative to the largest value of the reference: rounding errors are smaller, wrong numbers are not.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

Recording = dict[str, torch.Tensor]  # module name -> output, in the order in which modules finished


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One activation of both models, and their difference."""

    name: str
    reference_name: str
    shape: tuple[int, ...]
    max_abs: float  # largest difference
    relative: float  # largest difference, divided by the largest value of the reference
    agrees: bool


@dataclass(frozen=True, slots=True)
class DiffReport:
    """All activations that could be aligned, in the order in which the first model computed them."""

    rows: tuple[DiffRow, ...]

    @property
    def first_difference(self) -> DiffRow | None:
        """The first activation in which the models differ, or None if they agree."""
        return next((row for row in self.rows if not row.agrees), None)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows], default=4)
        reference_width = max([len(row.reference_name) for row in self.rows], default=9)
        first = self.first_difference
        lines = [f"{'name':{width}}  {'reference':{reference_width}}  {'max abs':>9}  {'relative':>9}  shape"]
        for row in self.rows:
            mark = "" if row.agrees else "  <-- first difference" if row is first else "  *"
            lines.append(
                f"{row.name:{width}}  {row.reference_name:{reference_width}}  {row.max_abs:9.2e}  "
                f"{row.relative:9.2e}  {list(row.shape)}{mark}"
            )
        verdict = "the models agree" if first is None else f"first difference: {first.name}"
        return "\n".join([*lines, verdict])


def run_tokens(model: nn.Module, tokens: Sequence[int]) -> None:
    """Run our own model, or one that takes `input_ids` like transformers' models, on one sequence."""
    device = next(model.parameters()).device
    tokens_T = torch.tensor(list(tokens), device=device)
    with torch.no_grad():
        if isinstance(model, Model):
            step = WholeSequence(attend_naive, device)
            step.advance(len(tokens))
            model.logits(model(tokens_T, step))
        else:
            model(input_ids=tokens_T[None])


def record(model: nn.Module, run: Callable[[], object]) -> Recording:
    """Call `run` and return the output of each module of `model`; a second call of a module is name#2."""
    recording: Recording = {}

    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            tensor = _first_tensor(output)
            if tensor is None:
                return
            key, calls = name, 1
            while key in recording:
                calls += 1
                key = f"{name}#{calls}"
            recording[key] = tensor.detach().float().cpu().clone()  # a norm may overwrite the tensor

        return keep

    handles = [
        module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name != ""
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return recording


def diff_models(
    ours: Model, reference: nn.Module, tokens: Sequence[int], *, tolerance: float | None = None
) -> DiffReport:
    """Run both models on the same tokens and compare everything that can be aligned."""
    if tolerance is None:
        tolerance = max(TOLERANCE[next(model.parameters()).dtype] for model in (ours, reference))
    recording = record(ours, lambda: run_tokens(ours, tokens))
    expected = record(reference, lambda: run_tokens(reference, tokens))
    if isinstance(reference, Model):
        pairs = {name: name for name in recording if name in expected}
    else:
        recording, pairs = _line_up(ours, recording, expected, get_family(ours.config.family).weight_map)
    return compare(recording, expected, pairs, tolerance=tolerance)


def compare(
    recording: Recording, expected: Recording, pairs: Mapping[str, str], *, tolerance: float
) -> DiffReport:
    """Compare recordings by the given pairs of names, in the order of the first recording."""
    if not pairs:
        raise ConfigError("the two models have no module in common that could be compared")
    names = [name for name in recording if name in pairs]
    return DiffReport(
        tuple(_row(name, pairs[name], recording[name], expected[pairs[name]], tolerance) for name in names)
    )


def _line_up(
    ours: Model, recording: Recording, expected: Recording, weight_map: WeightMap
) -> tuple[Recording, dict[str, str]]:
    """Split fused outputs into their parts, and pair each with the reference's module in the weight map."""
    reference_names = {
        (target.module.format(layer), target.part): key.format(layer)
        for key, target in weight_map.items()
        for layer in range(ours.config.num_layers)
        if not (target.ignored or names_an_expert(key, target)) and key.format(layer) in expected
    }
    parts: Recording = {}
    pairs: dict[str, str] = {}
    for name, output in recording.items():
        module = ours.get_submodule(name.partition("#")[0])
        if (name, None) in reference_names:
            parts[name], pairs[name] = output, reference_names[name, None]
        elif isinstance(module, Linear):
            for part in module.parts:
                if (name, part) in reference_names:
                    parts[f"{name}[{part}]"] = output[..., module.spec.part_rows(part)]
                    pairs[f"{name}[{part}]"] = reference_names[name, part]
    return parts, pairs


def _row(
    name: str, reference_name: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> DiffRow:
    max_abs = min(
        (float((ours - view).abs().max()) for view in _views(expected, ours.shape)), default=float("inf")
    )
    largest = float(expected.abs().max())
    relative = max_abs / largest if largest > 0 else max_abs
    # written so that NaN, which fails every comparison, counts as a difference
    return DiffRow(name, reference_name, tuple(ours.shape), max_abs, relative, agrees=relative <= tolerance)


def _views(expected: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """Return `expected` in our layout: without a batch dimension, and with tokens before heads."""
    if expected.dim() > 1 and expected.shape[0] == 1 and expected.dim() != len(shape):
        expected = expected.squeeze(0)
    candidates = [expected, *([expected.transpose(0, 1)] if expected.dim() == 3 else [])]
    return [candidate for candidate in candidates if candidate.shape == shape]


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor | Deferred):
        return as_tensor(output)
    if isinstance(output, tuple | list):
        return next((item for item in output if isinstance(item, torch.Tensor)), None)
    return None


def _load(source: str, dtype: str) -> nn.Module:
    if source.startswith("hf:"):
        import transformers

        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            source.removeprefix("hf:"), dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        return model.train(mode=False)
    from infer.loader.find.source import resolve_model
    from infer.loader.load import load_model

    return load_model(resolve_model(source), dtype=dtype, device="cpu").model


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two models from a shell; 0: they agree, 1: they differ, 2: one could not be loaded."""
    parser = argparse.ArgumentParser(
        prog="python -m infer.tools.activation_diff", description="find the first difference of two models"
    )
    parser.add_argument("ours", help="model directory, GGUF file or hub id")
    parser.add_argument("reference", help="the same, or hf:DIR to load it with transformers")
    parser.add_argument("--tokens", default="1,2,3,4,5,6,7,8", help="token ids to run, separated by commas")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tolerance", type=float, help="relative error that still counts as rounding")
    args = parser.parse_args(argv)
    try:
        tokens = [int(token) for token in args.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens must be ids separated by commas, got {args.tokens!r}")
    try:
        ours = _load(args.ours, args.dtype)
        if not isinstance(ours, Model):
            raise ConfigError(f"the first model must be loaded by this package, got {args.ours!r}")
        report = diff_models(ours, _load(args.reference, args.dtype), tokens, tolerance=args.tolerance)
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.first_difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
