"""The slices of all ranks put together are the tensors of the checkpoint, in every family and format."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.errors import ConfigError
from infer.layers.linear import Projected
from infer.layers.parallel import BY_COLUMNS, BY_ROWS, BY_VOCABULARY, kind_of
from infer.loader.find.source import resolve_model
from infer.loader.formats.axes import Axis, Ranges, words
from infer.loader.formats.checkpoint import TYPE_NAMES, StoredTensor
from infer.loader.formats.gguf_quants import dequantize
from infer.loader.formats.gguf_tensors import PackedTensor
from infer.loader.formats.quantized import QuantizedTensor
from infer.loader.formats.stored_module import StoredModule
from infer.loader.headers import ModelHeaders, WeightSource, headers_of_config, read_headers
from infer.loader.slices import Rank, Slice
from infer.loader.weight_plan import WeightPlan, plan_weights
from infer.models.registry import FAMILIES
from infer.models.weight_map import Target
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.checkpoints import UNCUT_FAMILIES, reference_model
from tests.support.thinned import thinned
from tests.unit.loader.test_stored_formats import K, Leaves, N, awq, compressed, numbers, opened
from tests.unit.loader.tiny_files import ARCHITECTURES, write_gguf

CPU = torch.device("cpu")
NAMES = [family.name for family in FAMILIES if family.name not in UNCUT_FAMILIES]
GGUF_NAMES = [
    name for name in NAMES if name in ARCHITECTURES and name != "phi3"
]  # its factors: one head size
STORED_GGUF = [*((name, "Q8_0") for name in GGUF_NAMES), ("llama", "Q4_1")]
WORLDS = (2, 4)  # kv heads are split, and repeated: tiny models have two
SMALL = Sizes(hidden_size=128, vocab_size=300, num_layers=1, num_experts=3)
BLOCKS = Sizes(hidden_size=512, vocab_size=300, num_layers=1, num_experts=2)  # heads of 128 rows
RECIPES = {
    "gptq": Recipe(scheme="gptq", group_size=32, symmetric=False),
    "gptq-v2-8-bits": Recipe(scheme="gptq", bits=8, group_size=32, version=2),
    "gptq-3-bits": Recipe(scheme="gptq", bits=3, group_size=32),
    "gptq-act-order": Recipe(scheme="gptq", group_size=32, act_order=True, symmetric=False),
    "gptq-one-group": Recipe(scheme="gptq", group_size=-1),
    "awq": Recipe(scheme="awq", group_size=32),
    "ct-w4a16": Recipe(scheme="ct-w4a16", group_size=32),
    "ct-w4a16-zeros": Recipe(scheme="ct-w4a16", group_size=32, symmetric=False),
    "ct-w8a16": Recipe(scheme="ct-w8a16"),
    "ct-int8": Recipe(scheme="ct-int8"),
    "fp8-channel": Recipe(scheme="fp8-channel"),
    "fp8-tensor": Recipe(scheme="fp8-tensor"),
    "fp8-block": Recipe(scheme="fp8-block"),
}


# Its stacks are cut while they are translated: tests/integration/test_tensor_parallel.py and test_gpt_oss.py.
NAMES.remove("gpt_oss")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slices")


def checkpoint(root: Path, family: str, recipe: str = "", sizes: Sizes | None = None) -> ModelHeaders:
    """The headers of a tiny checkpoint, plain or quantized; written once."""
    sizes = sizes or (BLOCKS if recipe == "fp8-block" else SMALL)
    plain = root / f"{family}-{sizes.hidden_size}-{sizes.num_heads}"
    if not plain.exists():
        experts: dict[str, Any] = (
            {"moe_intermediate_size": 2 * sizes.hidden_size} if family in ("qwen3_moe", "qwen2_moe") else {}
        )
        make_checkpoint(family, plain, sizes=sizes, seed=3, **experts)
    path = plain.with_name(f"{plain.name}-{recipe}") if recipe else plain
    if not path.exists():
        quantize_checkpoint(resolve_model(str(plain)), path, RECIPES[recipe])
    return read_headers(resolve_model(str(path)))


def plan_of(headers: ModelHeaders, rank: int, world_size: int, **options: Any) -> WeightPlan:
    chosen: dict[str, Any] = {"quantization": "none", "dtype": "float32", "device": CPU} | options
    return plan_weights(headers, rank=Rank(rank, world_size), **chosen)


def plans_of(headers: ModelHeaders, world_size: int) -> list[WeightPlan]:
    plans = [plan_of(headers, rank, world_size) for rank in range(world_size)]
    assert plans[0].uncut == {}
    return plans


# -- reading a slice as a rank would, with the readers of its format -----------------------------------


@dataclass(frozen=True, slots=True)
class InMemory(StoredTensor):
    """A leaf of which a rank has read its part."""

    held: torch.Tensor
    shape: tuple[int, ...] = field()
    num_bytes: int = 0
    type_name: str = ""

    @classmethod
    def of(cls, held: torch.Tensor) -> InMemory:
        return cls(held, tuple(held.shape), held.nbytes, TYPE_NAMES[held.dtype])

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def copy_to(self, out: torch.Tensor) -> None:
        out.copy_(self.held)

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, len(self.held)), self.held

    def matrix(self, index: int) -> StoredTensor:
        return InMemory.of(self.held[index])


def part_of(held: torch.Tensor, axes: tuple[Ranges | None, ...]) -> torch.Tensor:
    """The entries that a slice names."""
    for number, ranges in enumerate(axes):
        if ranges is not None:
            held = torch.cat([held.narrow(number, each.start, len(each)) for each in ranges], dim=number)
    return held


def length(ranges: Ranges) -> int:
    return sum(map(len, ranges))


def read_slice(source: WeightSource, cut: Slice) -> torch.Tensor:
    """The numbers of a slice, [rows, columns], [rows] or [experts, rows, columns], from its leaves alone."""
    tensor = source.tensor
    assert source.target is not None
    if isinstance(tensor, QuantizedTensor):
        leaves = {
            leaf: InMemory.of(part_of(tensor.module.read(leaf), cut.leaves[leaf])) for leaf in cut.leaves
        }
        module = StoredModule(tensor.module.name, leaves, tensor.module.settings)
        layout = tensor.layout._replace(num_rows=length(cut.rows), size=length(cut.columns))
        out = torch.empty(layout.num_rows, layout.size)
        QuantizedTensor(tensor.format, module, layout).copy_to(out)
        return out
    if isinstance(tensor, PackedTensor) and cut.columns:
        packed = tensor._packed_rows()
        packed = packed[list(tensor.order)] if tensor.order else packed
        blocks = packed.view(*tensor.stored.shape[:-1], -1, packed.shape[1] // num_blocks(tensor))
        held = part_of(blocks, cut.leaves["weight"]).flatten(-2)
        return dequantize(held.flatten(0, -2), tensor.stored.kind).view(*held.shape[:-1], -1)
    held = torch.empty(tensor.shape)
    tensor.copy_to(held)
    (axes,) = cut.leaves.values()
    taken = part_of(held, axes)
    return taken.T if source.target.transposed and taken.dim() == 2 else taken


def num_blocks(tensor: PackedTensor) -> int:
    """The blocks of a row."""
    return tensor.stored.shape[-1] // tensor.axes["weight"][-1].step


def read_whole(source: WeightSource) -> torch.Tensor:
    held = torch.empty(source.tensor.shape)
    if len(held.shape) == 3:
        for number in range(len(held)):
            source.tensor.matrix(number).copy_to(held[number])
    else:
        source.tensor.copy_to(held)
    assert source.target is not None
    return held.T if source.target.transposed and held.dim() == 2 else held


def put_together(plans: list[WeightPlan]) -> None:
    """Check that the slices of the ranks hold every number, each once unless several ranks have one slice."""
    for name, kept in plans[0].modules.items():
        slices = [plan.modules[name].slices for plan in plans]
        for source, *cuts in zip(kept.sources, *slices, strict=True):
            whole = read_whole(source)
            found, times = torch.full_like(whole, float("nan")), torch.zeros_like(whole)
            for (rows, columns), cut in {(cut.rows, cut.columns): cut for cut in cuts}.items():
                if not length(rows):
                    continue
                at = [
                    torch.tensor([i for each in ranges for i in each]) for ranges in (rows, columns) if ranges
                ]
                place = torch.zeros(whole.shape[-len(at) :], dtype=torch.bool)
                place[torch.meshgrid(*at, indexing="ij")] = True
                taken = read_slice(source, cut)
                assert taken.shape[-len(at) :] == tuple(map(len, at)), (source.name, taken.shape)
                found[..., place] = taken.flatten(-len(at))
                times[..., place] += 1
            assert torch.equal(found, whole), source.name
            # ranks outnumber kv heads: each has queries of its own in the tensor that holds all three parts
            is_shared = name.endswith("attention.qkv") and source.target and source.target.part is None
            assert bool((times >= 1 if is_shared else times == 1).all()), source.name


# -- together they are the whole -----------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "recipe", "family"), thinned(WORLDS, ("", "gptq"), NAMES, keep=3))
def test_slices_of_every_family_make_the_whole(family: str, recipe: str, world_size: int, root: Path) -> None:
    put_together(plans_of(checkpoint(root, family, recipe), world_size))


@pytest.mark.parametrize(("world_size", "recipe"), thinned(WORLDS, RECIPES, keep=2))
def test_slices_of_every_format_make_the_whole(recipe: str, world_size: int, root: Path) -> None:
    put_together(plans_of(checkpoint(root, "llama", recipe), world_size))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", NAMES)
def test_slices_of_every_family_in_every_format_make_the_whole(family: str, recipe: str, root: Path) -> None:
    for world_size in WORLDS:
        put_together(plans_of(checkpoint(root, family, recipe), world_size))


@functools.cache
def gguf_reference(family: str) -> Any:
    if family == "gpt2":
        return reference_model(family, n_embd=128, n_layer=1)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes |= {} if family == "gemma3" else {"num_hidden_layers": 1}
    is_qwen_moe = family in ("qwen3_moe", "qwen2_moe")
    sizes |= {"moe_intermediate_size": 128, "mlp_only_layers": []} if is_qwen_moe else {}
    sizes |= {"shared_expert_intermediate_size": 128} if family == "qwen2_moe" else {}
    return reference_model(family, **sizes)


@pytest.mark.parametrize(("world_size", "stored"), thinned(WORLDS, STORED_GGUF, keep=2))
def test_slices_of_gguf_make_the_whole(stored: tuple[str, str], world_size: int, tmp_path: Path) -> None:
    family, kind = stored
    path = write_gguf(tmp_path / "m.gguf", gguf_reference(family), kind=kind)
    put_together(plans_of(read_headers(resolve_model(str(path))), world_size))


def rewrite(root: Path, name: str, change: Any) -> ModelHeaders:
    """A tiny checkpoint in a format that `infer quantize` does not write; `change` makes the leaves."""
    checkpoint(root, "llama")
    plain, path = root / "llama-128-4", root / name
    shutil.copytree(plain, path, dirs_exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj." in tensor_name:
            stem = tensor_name.removesuffix(".weight")
            tensors |= {f"{stem}.{leaf}": held.contiguous() for leaf, held in change(tensor).items()}
        else:
            tensors[tensor_name] = tensor
    save_file(tensors, path / "model.safetensors")
    return read_headers(resolve_model(str(path)))


def int8_of_bitsandbytes(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1)
    return {"weight": (weight / scale[:, None] * 127).round().to(torch.int8), "SCB": scale}


def squeezellm(weight: torch.Tensor, *, is_sparse: bool = False) -> dict[str, torch.Tensor]:
    (num_rows, size), rng = weight.shape, np.random.default_rng(1)
    leaves = {
        "qweight": torch.from_numpy(rng.integers(-(2**31), 2**31, (size // 8, num_rows)).astype(np.int32)),
        "lookup_table": weight[:, :16],
    }
    if is_sparse:
        columns = torch.arange(num_rows, dtype=torch.int32) % size
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        leaves |= {"rows": starts, "cols": columns, "vals": torch.ones(num_rows)}
    return leaves


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("change", [int8_of_bitsandbytes, squeezellm])
def test_slices_of_formats_of_other_tools_make_the_whole(change: Any, world_size: int, root: Path) -> None:
    put_together(plans_of(rewrite(root, change.__name__, change), world_size))


def leaves_of_formats() -> Iterator[tuple[Leaves, dict[str, Any]]]:
    """Leaves that `infer quantize` does not write, of a matrix [64, 96], and what its config says."""
    for bits in (2, 3, 4, 6, 8):
        yield compressed(bits, symmetric=False)[0], {"num_bits": bits}
    in_order = torch.arange(K, dtype=torch.int32) * 5 % 3
    yield compressed(4, symmetric=True)[0] | {"weight_g_idx": in_order}, {}
    yield awq()[0], {}
    codes, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(4, 2) + 0.5
    for shape in ((), (1,), (1, 1), (N,), (N, 1), (N, 3)):
        yield {"weight": codes, "weight_scale": torch.rand(shape) + 0.5, "input_scale": torch.ones(1)}, {}
    yield {"weight": codes, "weight_scale_inv": scale}, {"weight_block_size": [16, 64]}
    integers, zeros = (torch.randint(-128, 128, (N, size), dtype=torch.int8) for size in (K, 1))
    yield {"weight": integers, "weight_scale": torch.rand(N, 1), "weight_zero_point": zeros}, {}


@pytest.mark.parametrize(("leaves", "settings"), list(leaves_of_formats()))
@pytest.mark.parametrize(("rows", "columns"), [((32, 64), (0, K)), ((0, N), (64, K)), ((0, 32), (0, 64))])
def test_any_cut_between_words_and_groups_can_be_read(
    leaves: Leaves, settings: dict[str, Any], rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path
) -> None:
    tensor, whole = opened(tmp_path, leaves, settings), numbers(opened(tmp_path, leaves, settings))
    ranges = {"rows": ((range(*rows),), N), "columns": ((range(*columns),), K)}
    cut = {
        leaf: tuple(axis.cut(*ranges[axis.along]) if axis.along else None for axis in axes)
        for leaf, axes in tensor.axes.items()
    }
    source = WeightSource("m.weight", tensor, Target("m"), "weight")
    found = read_slice(source, Slice((range(*rows),), (range(*columns),), cut))
    assert torch.equal(found, whole[slice(*rows), slice(*columns)])


def test_experts_in_one_stack_are_cut_inside_each(root: Path, tmp_path: Path) -> None:
    checkpoint(root, "mixtral")
    shutil.copytree(root / "mixtral-128-4", tmp_path / "m")
    tensors, stem = load_file(tmp_path / "m" / "model.safetensors"), "model.layers.0.block_sparse_moe.experts"
    parts = {part: torch.stack([tensors.pop(f"{stem}.{i}.{part}.weight") for i in range(3)]) for part in
             ("w1", "w2", "w3")}  # fmt: skip
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat((parts["w1"], parts["w3"]), dim=1)
    tensors["model.layers.0.mlp.experts.down_proj"] = parts["w2"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    headers = read_headers(resolve_model(str(tmp_path / "m")))
    put_together(plans_of(headers, 2))
    (cut,) = plan_of(headers, 1, 2).modules["layers.0.mlp.gate_up"].slices
    assert cut.rows == (range(128, 256), range(384, 512))
    assert cut.leaves == {"weight": (None, cut.rows, (range(128),))}


# -- what a slice is ----------------------------------------------------------------------------------


def slices_of(plan: WeightPlan) -> dict[str, Slice]:
    return {
        source.name: cut
        for kept in plan.modules.values()
        for source, cut in zip(kept.sources, kept.slices, strict=True)
    }


def test_a_slice_names_words_groups_zeros_and_columns(root: Path) -> None:
    found = slices_of(plan_of(checkpoint(root, "llama", "gptq"), 1, 2))
    down = found["model.layers.0.mlp.down_proj.weight"]  # [128, 256], groups of 32
    assert (down.rows, down.columns) == ((range(128),), (range(128, 256),))
    assert down.leaves == {
        "qweight": ((range(16, 32),), (range(128),)),
        "qzeros": ((range(4, 8),), (range(16),)),
        "scales": ((range(4, 8),), (range(128),)),
        "g_idx": ((range(128, 256),),),
    }
    up = found["model.layers.0.mlp.up_proj.weight"]  # [256, 128]
    assert (up.rows, up.columns) == ((range(128, 256),), (range(128),))
    assert up.leaves["qweight"] == ((range(16),), (range(128, 256),))
    assert up.leaves["qzeros"] == ((range(4),), (range(16, 32),))


def test_columns_that_name_their_groups_need_all_scales(root: Path) -> None:
    found = slices_of(plan_of(checkpoint(root, "llama", "gptq-act-order"), 1, 2))
    down = found["model.layers.0.mlp.down_proj.weight"].leaves
    assert down["g_idx"] == ((range(128, 256),),)
    assert down["scales"] == (None, (range(128),)) and down["qzeros"] == (None, (range(16),))


def test_codes_of_three_bits_are_cut_by_whole_runs_of_words() -> None:
    assert words("columns", 3).cut((range(32, 96),), 128) == (range(3, 9),)
    with pytest.raises(ConfigError, match="a word of 32 columns straddles the cut at column 48"):
        words("columns", 3).cut((range(48, 96),), 128)
    assert Axis("columns", 128, unit="group").cut((range(128, 200),), 200) == (
        range(1, 2),
    )  # a short last one


@pytest.mark.parametrize(("world_size", "heads"), [(2, [0, 1]), (4, [0, 0, 1, 1])])
def test_heads_of_k_and_v_go_with_the_queries_that_they_serve(
    world_size: int, heads: list[int], root: Path
) -> None:
    for rank, head in enumerate(heads):
        plan = plan_of(checkpoint(root, "qwen2"), rank, world_size)
        kept, found = plan.modules["layers.0.attention.qkv"], slices_of(plan)
        share = 128 // world_size
        assert found["model.layers.0.self_attn.q_proj.weight"].rows == (
            range(rank * share, rank * share + share),
        )
        for part in ("k_proj.weight", "v_proj.weight", "k_proj.bias"):
            assert found[f"model.layers.0.self_attn.{part}"].rows == (range(head * 32, head * 32 + 32),)
        assert kept.spec is not None and kept.spec.parts == {"q": share, "k": 32, "v": 32}


def test_a_bias_after_a_cut_along_columns_is_rank_0s(root: Path) -> None:
    for rank in range(2):
        found = slices_of(plan_of(checkpoint(root, "gpt2"), rank, 2))
        assert found["transformer.h.0.mlp.c_proj.bias"].rows == (() if rank else (range(128),))
        assert found["transformer.h.0.mlp.c_fc.bias"].rows == (range(rank * 256, rank * 256 + 256),)
        assert found["transformer.h.0.attn.c_attn.bias"].rows == tuple(
            range(part * 128 + rank * 64, part * 128 + rank * 64 + 64) for part in range(3)
        )
        assert found["transformer.h.0.ln_1.weight"].rows == (range(128),)


def test_the_vocabulary_is_cut_into_ranges_of_whole_words(root: Path) -> None:
    headers = checkpoint(root, "llama")
    rows = [slices_of(plan_of(headers, rank, 4))["lm_head.weight"].rows for rank in range(4)]
    assert rows == [(range(96),), (range(96, 192),), (range(192, 288),), (range(288, 300),)]


@pytest.mark.parametrize("family", NAMES)
def test_every_matrix_of_a_family_has_a_cut(family: str, root: Path) -> None:
    plan = plan_of(checkpoint(root, family), 0, 1)
    matrices = [name for name, module in plan.skeleton.named_modules() if isinstance(module, Projected)]
    whole = {kind_of(name) for name in matrices} - {*BY_ROWS, *BY_COLUMNS, *BY_VOCABULARY}
    assert whole <= {"mlp.router", "mlp.shared_gate"}
    assert all(kept.slices == () for kept in plan.modules.values())  # one rank has all of everything


def test_a_rank_rounds_to_groups_of_its_own_columns(root: Path) -> None:
    """Half of 384 columns have groups of 64, where all of them have groups of 128."""
    path = root / "wide"
    make_checkpoint("llama", path, sizes=SMALL, intermediate_size=384)
    headers = read_headers(resolve_model(str(path)))
    groups = []
    for world_size in (1, 2):
        plan = plan_of(headers, 0, world_size, quantization="int4", home="cuda")
        spec = plan.modules["layers.0.mlp.down"].spec
        groups.append(spec and spec.form and spec.form.group)
    assert groups == [128, 64]


# -- what cannot be cut -------------------------------------------------------------------------------

LAYER = "model.layers.0"


def refused(headers: ModelHeaders, world_size: int) -> dict[str, str]:
    plan = plan_of(headers, 1, world_size)
    uncut = dict(plan.uncut)
    assert all(
        kept.slices == () for kept in plan.modules.values() if any(s.name in uncut for s in kept.sources)
    )
    return uncut


def test_heads_and_rows_that_ranks_cannot_share_equally(root: Path) -> None:
    found = refused(checkpoint(root, "llama"), 3)
    assert found[f"{LAYER}.self_attn.q_proj.weight"] == "4 heads cannot be shared equally by 3 ranks"
    assert found[f"{LAYER}.self_attn.o_proj.weight"] == "4 heads cannot be shared equally by 3 ranks"
    assert found[f"{LAYER}.self_attn.k_proj.weight"] == "2 kv heads cannot be shared equally by 3 ranks"
    assert found[f"{LAYER}.mlp.down_proj.weight"] == (
        "256 rows or columns cannot be shared equally by 3 ranks"
    )
    assert len(found) == 7  # the matrices of one layer; vocabulary and norms are not among them


def test_a_group_on_both_sides_of_a_cut(root: Path) -> None:
    sizes = Sizes(hidden_size=128, vocab_size=300, num_layers=1)
    make_checkpoint("llama", root / "grouped", sizes=sizes)
    for scheme in ("gptq", "awq", "ct-w4a16"):
        path = root / f"grouped-{scheme}"
        quantize_checkpoint(resolve_model(str(root / "grouped")), path, Recipe(scheme=scheme, group_size=128))
        headers = read_headers(resolve_model(str(path)))
        found = refused(headers, 4)
        assert found == {
            f"{LAYER}.mlp.down_proj.weight": "a group of 128 columns straddles the cut at column 64"
        }
        assert refused(headers, 2) == {}


def test_a_word_with_rows_of_two_ranks(root: Path) -> None:
    sizes = Sizes(hidden_size=32, num_heads=8, num_kv_heads=8, vocab_size=300, num_layers=1)
    found = refused(checkpoint(root, "llama", "awq", sizes), 8)
    assert found[f"{LAYER}.self_attn.v_proj.weight"] == "a word of 8 rows straddles the cut at row 4"
    assert f"{LAYER}.self_attn.o_proj.weight" not in found  # words run along rows: columns are cut anywhere


def test_a_block_of_fp8_on_both_sides_of_a_cut(root: Path) -> None:
    sizes = Sizes(hidden_size=256, vocab_size=300, num_layers=1)  # heads of 64 rows
    found = refused(checkpoint(root, "llama", "fp8-block", sizes), 4)
    assert found[f"{LAYER}.self_attn.q_proj.weight"] == "a block of 128 rows straddles the cut at row 64"
    assert (
        found[f"{LAYER}.self_attn.o_proj.weight"] == "a block of 128 columns straddles the cut at column 64"
    )
    assert f"{LAYER}.mlp.up_proj.weight" not in found


def test_blocks_that_run_on_from_row_to_row(root: Path) -> None:
    path = root / "nf4"
    checkpoint(root, "llama")
    quantize_checkpoint(resolve_model(str(root / "llama-128-4")), path, Recipe(scheme="nf4", nested=False))
    headers = read_headers(resolve_model(str(path)))
    found = refused(headers, 2)
    assert found == {
        f"{LAYER}.self_attn.o_proj.weight": "a run of blocks of 128 columns straddles the cut at column 64",
        f"{LAYER}.mlp.down_proj.weight": "a run of blocks of 256 columns straddles the cut at column 128",
    }
    plan = plan_of(headers, 1, 2)
    (gate, up) = plan.modules["layers.0.mlp.gate_up"].sources
    cuts = plan.modules["layers.0.mlp.gate_up"].slices
    for source, cut in zip((gate, up), cuts, strict=True):
        assert torch.equal(read_slice(source, cut), read_whole(source)[128:])


def test_nested_scales_of_bitsandbytes_are_cut_with_their_blocks(root: Path) -> None:
    path = root / "nf4-nested"
    checkpoint(root, "llama")
    quantize_checkpoint(resolve_model(str(root / "llama-128-4")), path, Recipe(scheme="nf4"))
    plan = plan_of(read_headers(resolve_model(str(path))), 1, 2)
    kept = plan.modules["layers.0.mlp.gate_up"]  # 256 rows of 128: two runs of 128 x 128, which share a scale
    for source, cut in zip(kept.sources, kept.slices, strict=True):
        assert cut.leaves["weight.nested_absmax"] == ((range(1, 2),),)
        assert torch.equal(read_slice(source, cut), read_whole(source)[128:])
    found = plan.uncut[f"{LAYER}.self_attn.q_proj.weight"]
    assert found == "a run of blocks of 128 rows straddles the cut at row 64"


def test_sparse_weights(root: Path) -> None:
    headers = rewrite(root, "sparse", functools.partial(squeezellm, is_sparse=True))
    found = refused(headers, 2)
    assert found[f"{LAYER}.mlp.up_proj.weight"] == "a sparse matrix of 256 rows straddles the cut at row 128"
    assert found[f"{LAYER}.mlp.down_proj.weight"] == (
        "a sparse matrix of 256 columns straddles the cut at column 128"
    )


def test_a_block_of_gguf_on_both_sides_of_a_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_reference("llama"), kind="TQ2_0")  # in blocks of 256
    found = refused(read_headers(resolve_model(str(path))), 2)
    assert found == {
        f"{LAYER}.mlp.down_proj.weight": "a block of 256 columns straddles the cut at column 128"
    }


def test_a_rank_beyond_the_last_is_refused(root: Path) -> None:
    with pytest.raises(AssertionError):
        plan_of(checkpoint(root, "llama"), 2, 2)


def test_a_config_alone_has_the_matrices_of_a_rank(root: Path, tmp_path: Path) -> None:
    checkpoint(root, "llama")
    raw = json.loads((root / "llama-128-4" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = plan_of(headers_of_config(tmp_path / "config.json", "m"), 1, 2)
    specs = {name: kept.spec for name, kept in plan.modules.items() if kept.spec is not None}
    sizes = {name: (spec.num_rows, spec.size) for name, spec in specs.items()}
    assert sizes["layers.0.attention.out"] == (128, 64) and sizes["layers.0.mlp.gate_up"] == (256, 128)
    assert sizes["head"] == (140, 128)  # 160 and 140 of 300
