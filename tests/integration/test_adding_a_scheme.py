"""docs/adding-a-scheme.md, followed: a toy scheme that lives in this file alone.

Ternary weights: -1, 0 or 1, four of them in a byte, and a scale for each row. It loads from a checkpoint of
its own leaves, is fused and mixed with dense matrices, has experts, is planned for, and generates; nothing
outside this file knows of it but the row that the fixture adds to the registry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from infer import LLM, SamplingParams
from infer.cli.main import main
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.errors import CheckpointError, ConfigError
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.residual import ResidualSum
from infer.layers.bind import bind
from infer.layers.linear import ExpertLinear, Linear, Projected
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.loader.quantization import kept_bytes
from infer.quant.projection import OUT, Axis, Leaf, Neighbours, Projection, Scheme, WeightSpec
from infer.quant.registry import SCHEMES
from infer.quant.residual import ResidualNorm
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.step import run_step

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Ternary(Projection):
    """-1, 0 or 1 in two bits, and a scale per row."""

    scheme = "ternary"

    def leaves(self) -> Mapping[str, Leaf]:
        return {
            "weight_packed": Leaf(torch.uint8, (OUT, Axis("in", 1, 4))),
            "scale": Leaf(torch.float32, (OUT,)),
        }

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        shifts = torch.tensor([0, 2, 4, 6], device=x.device)
        codes = self.tensors["weight_packed"].unsqueeze(-1) >> shifts & 3
        weight = codes.flatten(-2)[..., : self.spec.size].to(x.dtype) - 1
        y = F.linear(x, weight) * self.tensors["scale"].to(x.dtype)
        return y if self.bias is None else y + self.bias


class FusedTernary(Ternary):
    """The same with both ends of the residual stream in its own hands, as a scheme with kernels has them."""

    def __init__(self, spec: WeightSpec, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(spec, tensors)
        self.num_added = self.num_read = 0

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        self.can_add = neighbours.writes_sum

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        if not reader.reads_sum(x, 1, activation):
            return self.multiply(x)
        self.num_added += 1
        total = residual + self.multiply(x)
        return ResidualSum(total, total * (norm.weight + norm.offset), total.double().square().sum(1)[None])

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        return True

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        self.num_read += 1
        mean = total.squares_PM.sum(0) / total.sum_MN.shape[1]
        normed = total.scaled_MN * torch.rsqrt(mean + eps).to(total.scaled_MN.dtype)[:, None]
        return self.project_rows(normed, activation)


@pytest.fixture(params=[Ternary, FusedTernary])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Ternary]]:
    row = Scheme(
        name="ternary",
        devices=("cpu", "cuda"),
        make=request.param,
        stored_as=frozenset({"weight_packed", "scale"}),
        methods=("ternary",),
    )
    monkeypatch.setitem(SCHEMES, "ternary", row)
    yield request.param


def write_pair(
    path: Path, family: str = "llama", *, keep_dense: tuple[str, ...] = (), with_head: bool = False
) -> tuple[Path, Path]:
    """A checkpoint of ternary matrices, and the same network with the numbers they stand for."""
    make_checkpoint(family, path / "dense", sizes=Sizes(hidden_size=64), seed=2)
    tensors = load_file(path / "dense/model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        is_packed = ".layers." in name or (with_head and name == "lm_head.weight")
        is_matrix = name.endswith("weight") and weight.dim() == 2 and is_packed
        if not is_matrix or ".gate.weight" in name or any(part in name for part in keep_dense):
            packed[name] = weight
            continue
        scale = weight.float().abs().mean(1).clamp(min=1e-6)
        codes = (weight.float() / scale[:, None]).round().clamp(-1, 1).add(1).to(torch.uint8)
        tensors[name] = ((codes.float() - 1) * scale[:, None]).contiguous()
        fours = F.pad(codes, (0, -codes.shape[1] % 4)).view(len(codes), -1, 4)
        module = name.removesuffix("weight")
        packed[f"{module}weight_packed"] = (
            fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
        )
        packed[f"{module}scale"] = scale
    save_file({name: tensor.float() for name, tensor in tensors.items()}, path / "dense/model.safetensors")
    (path / "ternary").mkdir()
    for file in (path / "dense").iterdir():
        if file.suffix != ".safetensors":
            (path / "ternary" / file.name).write_bytes(file.read_bytes())
    save_file(packed, path / "ternary/model.safetensors")
    config = json.loads((path / "ternary/config.json").read_text())
    config["quantization_config"] = {"quant_method": "ternary"}
    (path / "ternary/config.json").write_text(json.dumps(config))
    return path / "dense", path / "ternary"


def load(path: Path, quantization: str = "auto") -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", dtype="float32", quantization=quantization)


def projections(loaded: LoadedModel) -> dict[str, Projection]:
    modules = loaded.model.named_modules()
    return {name: module.stored for name, module in modules if isinstance(module, Projected)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_it_loads_and_gives_the_logits_of_what_it_stands_for(
    family: str, scheme: type[Ternary], tmp_path: Path
) -> None:
    dense, ternary = (load(path) for path in write_pair(tmp_path, family))
    assert ternary.weights == "ternary"
    kinds = {name: type(projection) for name, projection in projections(ternary).items()}
    assert kinds.pop("head") is not scheme and set(kinds.values()) == {scheme}
    for model in (dense.model, ternary.model):
        bind(model, CPU, deterministic=False)()
    logits, expected = run_step(ternary.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_a_head_of_its_own_is_kept_in_the_scheme_that_stores_it(
    scheme: type[Ternary], tmp_path: Path
) -> None:
    dense, ternary = (load(path) for path in write_pair(tmp_path, with_head=True))
    assert type(projections(ternary)["head"]) is scheme
    logits, expected = run_step(ternary.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_fused_parts_lie_beside_each_other(scheme: type[Ternary], tmp_path: Path) -> None:
    _, path = write_pair(tmp_path)
    tensors = load_file(path / "model.safetensors")
    gate_up = projections(load(path))["layers.1.mlp.gate_up"]
    for leaf in ("weight_packed", "scale"):
        parts = [tensors[f"model.layers.1.mlp.{part}_proj.{leaf}"] for part in ("gate", "up")]
        assert torch.equal(gate_up.tensors[leaf], torch.cat(parts))


def test_it_is_fused_with_the_stream_at_both_ends(scheme: type[Ternary], tmp_path: Path) -> None:
    """Where it says that it can: every sum but the last is made by its writer and read by its reader."""
    loaded = load(write_pair(tmp_path)[1])
    bind(loaded.model, CPU, deterministic=False)()
    run_step(loaded.model, [PROMPT])
    fused = [p for p in projections(loaded).values() if isinstance(p, FusedTernary)]
    num_sums = 2 * loaded.config.num_layers - 1 if scheme is FusedTernary else 0
    assert sum(p.num_added for p in fused) == sum(p.num_read for p in fused) == num_sums


@pytest.mark.parametrize(
    "keep_dense", [(".down_proj",), (".q_proj", ".k_proj", ".v_proj", "layers.0.")], ids=str
)
def test_it_is_mixed_with_dense_matrices(
    scheme: type[Ternary], keep_dense: tuple[str, ...], tmp_path: Path
) -> None:
    paths = write_pair(tmp_path, keep_dense=keep_dense)
    dense, ternary = (load(path) for path in paths)
    assert {p.scheme for p in projections(ternary).values()} == {"none", "ternary"}
    bind(ternary.model, CPU, deterministic=False)()
    logits, expected = run_step(ternary.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_parts_of_a_fused_matrix_must_agree(scheme: type[Ternary], tmp_path: Path) -> None:
    _, path = write_pair(tmp_path, keep_dense=("layers.1.mlp.up_proj",))
    with pytest.raises(CheckpointError, match=r"parts of layers\.1\.mlp\.gate_up .* \(none, ternary\)"):
        load(path)


def test_experts_of_it(scheme: type[Ternary], tmp_path: Path) -> None:
    dense, ternary = (load(path) for path in write_pair(tmp_path, "qwen3_moe"))
    experts = [m for m in ternary.model.modules() if isinstance(m, ExpertLinear)]
    assert experts and all(isinstance(m.stored, scheme) for m in experts)
    logits, expected = run_step(ternary.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_it_generates_through_the_engine(scheme: type[Ternary], tmp_path: Path) -> None:
    dense, ternary = (
        LLM(str(path), device="cpu", dtype="float32", quantization=asked, num_blocks=64)
        for path, asked in zip(write_pair(tmp_path), ("none", "ternary"), strict=True)
    )
    prompts = [PROMPT, PROMPT[::-1], [7]]
    expected = [answer.token_ids for answer in dense.generate(prompts, GREEDY)]
    assert [answer.token_ids for answer in ternary.generate(prompts, GREEDY)] == expected
    assert ternary.engine.stats().weights == "ternary"


def test_the_plan_counts_it(
    scheme: type[Ternary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_pair(tmp_path)
    plans = []
    for path in paths:
        assert main(["plan", str(path), "--device", "cpu", "--dtype", "float32", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    dense, ternary = plans
    assert ternary["weight_format"] == "ternary" and ternary["num_parameters"] == dense["num_parameters"]
    loaded = load(paths[1])
    tables = sum(table.numel() * table.element_size() for table in loaded.model.buffers())
    assert ternary["weights"] == kept_bytes(loaded.model) + tables
    layers = [p for p in projections(loaded).values() if p.scheme == "ternary"]
    saved = sum(p.spec.num_rows * p.spec.size * 4 - p.num_bytes() for p in layers)
    assert dense["weights"] - ternary["weights"] == saved


def test_what_it_cannot_do_is_refused_by_name(scheme: type[Ternary], tmp_path: Path) -> None:
    dense, ternary = write_pair(tmp_path)
    with pytest.raises(ConfigError, match="quantization is ternary, but this checkpoint is not stored so"):
        load(dense, quantization="ternary")
    with pytest.raises(
        ConfigError, match="quantization must be one of auto, none, .*, ternary on a CPU, got 'senary'"
    ):
        load(ternary, quantization="senary")
    for other in ("none", "int8"):  # never accepted and ignored
        with pytest.raises(ConfigError, match=f"quantization is {other}, but .* is stored as ternary"):
            load(ternary, quantization=other)
    with pytest.raises(ConfigError, match="deterministic cannot be had with quantization=ternary"):
        build_engine(EngineConfig.from_knobs(deterministic=True, num_blocks=8), load(ternary))


def test_a_matrix_of_it_is_found_by_its_leaves_alone(scheme: type[Ternary], tmp_path: Path) -> None:
    """No list says which modules are quantized: a config may say nothing, or too much."""
    _, path = write_pair(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert isinstance(load(path).model.get_submodule("layers.0.attention.qkv"), Linear)
    assert load(path).weights == "ternary"


def test_without_its_row_the_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none of the formats .* says quant_method ternary"):
        load(write_pair(tmp_path)[1])
