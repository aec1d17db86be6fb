"""docs/adding-a-scheme.md, followed: a toy scheme that lives in this file alone.

Ternary weights: -1, 0 or 1, four of them in a byte, and a scale for each row. It loads plain checkpoints and
packed ones, is fused and mixed with dense matrices, has experts, is planned for, and generates; nothing
outside this file knows of it but the row that the fixture adds.
"""

from __future__ import annotations

import json
import shutil
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
from infer.errors import ConfigError
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.residual import ResidualSum
from infer.layers.bind import bind
from infer.layers.linear import ExpertLinear, Linear, Projected
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.loader.weight_plan import kept_bytes
from infer.quant.coded import CodedRows
from infer.quant.projection import Neighbours, Projection, Scheme, WeightSpec
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

    def allocate(self) -> dict[str, torch.Tensor]:
        spec = self.spec
        rows = (spec.num_rows,) if spec.num_experts is None else (spec.num_experts, spec.num_rows)
        return {
            "fours": torch.empty((*rows, -(-spec.size // 4)), dtype=torch.uint8, device=spec.device),
            "scale": torch.empty(rows, device=spec.device),
        }

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        numbers = rows.numbers() if isinstance(rows, CodedRows) else rows.float()
        scale = numbers.abs().amax(1).clamp(min=1e-6)
        codes = (numbers / scale[:, None]).round().add(1).to(torch.uint8)
        fours = F.pad(codes, (0, -codes.shape[1] % 4)).view(len(codes), -1, 4)
        mine = self if self.spec.num_experts is None else self.expert(expert)
        part = slice(first, first + len(codes))
        shifted = fours << torch.tensor([0, 2, 4, 6], device=codes.device)
        mine.tensors["fours"][part] = shifted.sum(-1).to(torch.uint8)
        mine.tensors["scale"][part] = scale

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        shifts = torch.tensor([0, 2, 4, 6], device=x.device)
        codes = self.tensors["fours"].unsqueeze(-1) >> shifts & 3
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
    row = Scheme(name="ternary", devices=("cpu", "cuda"), make=request.param)
    monkeypatch.setitem(SCHEMES, "ternary", row)
    yield request.param


def write_pair(path: Path, family: str = "llama") -> tuple[Path, Path]:
    """A checkpoint whose matrices have three numbers, in float32 and in 2 bits of compressed-tensors."""
    make_checkpoint(family, path / "plain", sizes=Sizes(hidden_size=64), seed=2)
    tensors = load_file(path / "plain/model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        tensors[name] = packed[name] = weight.float()
        if not name.endswith("weight") or weight.dim() != 2 or ".layers." not in name or ".gate.w" in name:
            continue
        scale = weight.float().abs().mean(1, keepdim=True).half().float()
        codes = (weight.float() / scale).round().clamp(-1, 1)
        tensors[name] = codes * scale
        module = name.removesuffix("weight")
        del packed[name]
        words = (codes.long() + 2).view(len(codes), -1, 16) << torch.arange(0, 32, 2)  # around the middle, 2
        packed[f"{module}weight_packed"] = words.sum(-1).to(torch.uint32).view(torch.int32)
        packed[f"{module}weight_scale"] = scale
        packed[f"{module}weight_shape"] = torch.tensor(codes.shape)
    save_file(tensors, path / "plain/model.safetensors")
    (path / "packed").mkdir()
    for file in (path / "plain").iterdir():
        if file.suffix != ".safetensors":
            (path / "packed" / file.name).write_bytes(file.read_bytes())
    save_file(packed, path / "packed/model.safetensors")
    return path / "plain", path / "packed"


def load(path: Path, quantization: str) -> LoadedModel:
    source = resolve_model(str(path), show_progress=False)
    return load_model(source, device="cpu", dtype="float32", quantization=quantization)


def projections(loaded: LoadedModel) -> dict[str, Projection]:
    modules = loaded.model.named_modules()
    return {name: module.stored for name, module in modules if isinstance(module, Projected)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_it_loads_any_format_and_gives_the_logits_of_what_it_stands_for(
    family: str, scheme: type[Ternary], tmp_path: Path
) -> None:
    plain, packed = write_pair(tmp_path, family)
    dense = load(plain, "none")
    bind(dense.model, CPU, deterministic=False)()
    head, expected = dense.model.head.stored, run_step(dense.model, [PROMPT])[0]
    for path in (plain, packed):
        loaded = load(path, "ternary")
        assert loaded.weights == "ternary"
        kinds = {name: type(projection) for name, projection in projections(loaded).items()}
        kinds.pop("head")  # its rows need more than three numbers: compared by themselves below
        assert set(kinds.values()) == {scheme}
        loaded.model.head.use(head)
        loaded.model.embedding = dense.model.embedding
        bind(loaded.model, CPU, deterministic=False)()
        torch.testing.assert_close(run_step(loaded.model, [PROMPT])[0], expected, rtol=1e-3, atol=1e-4)


def test_parts_are_rows_of_the_fused_matrix(scheme: type[Ternary], tmp_path: Path) -> None:
    plain, _ = write_pair(tmp_path)
    tensors = load_file(plain / "model.safetensors")
    gate_up = projections(load(plain, "ternary"))["layers.1.mlp.gate_up"]
    fused = torch.cat([tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    identity = torch.eye(gate_up.spec.size)
    torch.testing.assert_close(gate_up.multiply(identity).T, fused)


def test_it_is_fused_with_the_stream_at_both_ends(scheme: type[Ternary], tmp_path: Path) -> None:
    """Where it says that it can: every sum but the last is made by its writer and read by its reader."""
    loaded = load(write_pair(tmp_path)[0], "ternary")
    bind(loaded.model, CPU, deterministic=False)()
    run_step(loaded.model, [PROMPT])
    fused = [p for p in projections(loaded).values() if isinstance(p, FusedTernary)]
    num_sums = 2 * loaded.config.num_layers - 1 if scheme is FusedTernary else 0
    assert sum(p.num_added for p in fused) == sum(p.num_read for p in fused) == num_sums


def test_it_is_fused_beside_dense_matrices(scheme: type[Ternary], tmp_path: Path) -> None:
    plain, _ = write_pair(tmp_path)
    dense, mixed = load(plain, "none"), load(plain, "ternary")
    for name in ("layers.0.attention.qkv", "layers.1.mlp.down", "head"):
        layer = mixed.model.get_submodule(name)
        assert isinstance(layer, Linear)
        layer.use(projections(dense)[name])
    bind(mixed.model, CPU, deterministic=False)()
    logits, expected = run_step(mixed.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_experts_of_it(scheme: type[Ternary], tmp_path: Path) -> None:
    plain, packed = write_pair(tmp_path, "qwen3_moe")
    dense, ternary = load(plain, "none"), load(packed, "ternary")
    experts = [m for m in ternary.model.modules() if isinstance(m, ExpertLinear)]
    assert experts and all(isinstance(m.stored, scheme) for m in experts)
    ternary.model.head.use(dense.model.head.stored)
    logits, expected = run_step(ternary.model, [PROMPT])[0], run_step(dense.model, [PROMPT])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_it_generates_through_the_engine(scheme: type[Ternary], tmp_path: Path) -> None:
    """Wherever the codes come from, greedy ids are those of a dense network with the numbers they mean."""
    plain, packed = write_pair(tmp_path)
    dense = tmp_path / "dense"
    shutil.copytree(plain, dense)
    tensors, head = load_file(plain / "model.safetensors"), projections(load(plain, "ternary"))["head"]
    tensors["lm_head.weight"] = head.multiply(torch.eye(head.spec.size)).T.contiguous()
    save_file(tensors, dense / "model.safetensors")
    answers = []
    for path, quantization in ((dense, "none"), (plain, "ternary"), (packed, "ternary")):
        llm = LLM(str(path), device="cpu", dtype="float32", quantization=quantization, num_blocks=64)
        assert (llm.engine.stats().weights == "ternary") == (path != dense)
        answers.append([answer.token_ids for answer in llm.generate([PROMPT, PROMPT[::-1], [7]], GREEDY)])
    assert answers[0] == answers[1] == answers[2]
    assert all(len(ids) == GREEDY.max_tokens for ids in answers[0])


def test_the_plan_counts_it(
    scheme: type[Ternary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plans = write_pair(tmp_path)[0], []
    for asked in ("none", "ternary"):
        flags = ["--device", "cpu", "--dtype", "float32", "--quantization", asked, "--json"]
        assert main(["plan", str(path), *flags]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    dense, ternary = plans
    assert ternary["weight_format"] == "ternary" and ternary["num_parameters"] == dense["num_parameters"]
    loaded = load(path, "ternary")
    tables = sum(table.numel() * table.element_size() for table in loaded.model.buffers())
    assert ternary["weights"] == kept_bytes(loaded.model) + tables
    layers = [p for p in projections(loaded).values() if p.scheme == "ternary"]
    saved = sum(p.spec.num_rows * p.spec.size * 4 - p.num_bytes() for p in layers)
    assert dense["weights"] - ternary["weights"] == saved


def test_what_it_cannot_do_is_refused_by_name(scheme: type[Ternary], tmp_path: Path) -> None:
    plain, _ = write_pair(tmp_path)
    with pytest.raises(
        ConfigError, match="quantization must be one of auto, none, .*, ternary on a CPU, got 'senary'"
    ):
        load(plain, "senary")
    with pytest.raises(ConfigError, match="deterministic cannot be used with quantization=ternary"):
        build_engine(EngineConfig.from_knobs(deterministic=True, num_blocks=8), load(plain, "ternary"))


def test_without_its_row_it_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, .*, got 'ternary'"):
        load(write_pair(tmp_path)[0], "ternary")
