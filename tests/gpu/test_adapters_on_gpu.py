"""LoRA adapters on a GPU: the kernels' contract, graphs, and the tokens of merged weights in an engine."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.low_rank import LowRankStack, RowSlots, add_low_rank, add_low_rank_reference
from infer.kernels.linear.shrink import shrink
from infer.kernels.linear.small import launch
from infer.kernels.linear.wgmma import WgmmaConfig
from scripts.make_checkpoint import make_checkpoint
from tests.gpu.graphs import FEW_SIZES, capture, random
from tests.kernels.low_rank_contract import LowRankContract
from tests.support.adapters import make_adapter, merge

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class TestCompiledLowRank(LowRankContract):
    device = "cuda"


def test_a_graph_follows_the_slots_that_are_in_its_buffer() -> None:
    torch.manual_seed(0)
    parts, size = [4096, 1024, 1024], 4096
    device = torch.device("cuda")
    stack = LowRankStack(parts, size, num_slots=8, rank=16, dtype=torch.bfloat16, device=device)
    for slot in range(1, 9):
        for part, count in enumerate(parts):
            stack.fill(slot, part, random(16, size, scale=size**-0.5), random(count, 16))
    x, y, out = random(32, size), random(32, sum(parts)), random(32, sum(parts))
    slots = torch.zeros(32, dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        out.copy_(y)
        return add_low_rank(out, x, RowSlots(slots), stack)

    graph, made = capture(step)
    for _ in range(5):
        slots.copy_(torch.randint(0, 9, (32,), device=device))
        graph.replay()
        wanted = add_low_rank(y.clone(), x, RowSlots(slots.clone()), stack)
        assert torch.equal(made, wanted)
        assert torch.equal(made[slots == 0], y[slots == 0])


@pytest.mark.parametrize("num_rows", [1, 8, 32, 100])
@pytest.mark.parametrize(
    ("parts", "size", "activation"),
    [([4096, 1024, 1024], 4096, ""), ([4096], 12288, ""), ([12288, 12288], 4096, "silu")],
    ids=["qkv", "down", "gate_up"],
)
def test_a_matrix_adds_the_products_of_adapters_itself(
    parts: list[int], size: int, activation: str, num_rows: int
) -> None:
    torch.manual_seed(0)
    device, N = torch.device("cuda"), sum(parts)
    stack = LowRankStack(parts, size, num_slots=8, rank=16, dtype=torch.bfloat16, device=device)
    for slot in range(1, 9):
        for part, count in enumerate(parts):
            stack.fill(slot, part, random(8 + slot, size, scale=size**-0.5), random(count, 8 + slot))
    x, w = random(num_rows, size), random(N, size, scale=size**-0.5)
    compiled = CompiledLinears(device)
    compiled.want_low_rank(Matrix(parts[0] if activation else N, size, activation), stack)
    compiled.compiler()()
    assert compiled.load()
    gated = bool(activation)
    plan = compiled.find_low_rank(x, w, parts[0] if gated else N, size, stack, gated=gated)
    assert plan is not None
    slots = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        return launch(plan, x, w, activation=activation, low_rank=shrink(x, RowSlots(slots), stack))

    graph, made = capture(step)
    for most in (1, 9, 9):
        slots.copy_(torch.randint(0, most, (num_rows,), device=device))
        graph.replay()
        wanted = add_low_rank_reference(
            (x.float() @ w.float().T), x.float(), RowSlots(slots), as_float(stack)
        )
        if gated:
            gate, up = torch.split(wanted, parts, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
        error = (made.float() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-2, f"{error:.1e}"


def as_float(stack: LowRankStack) -> LowRankStack:
    wide = copy(stack)
    wide.a, wide.b = stack.a.float(), stack.b.float()
    return wide


@pytest.mark.parametrize(
    "knobs",
    [{}, {"use_cuda_graphs": False}, {"speculative_method": "ngram", "adaptive_speculation": False}],
    ids=["graphs", "eager", "drafts"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_mixed_batch_says_what_merged_weights_say(family: str, knobs: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(family, base := tmp_path / "base")
    targets = r"self_attn\.(q_proj|k_proj|v_proj|o_proj)$" if family == "qwen3_moe" else r"_proj$"
    names, paths, wanted = ("a", "b"), dict[str, Path](), dict[str, Any]()
    for seed, name in enumerate(names):
        paths[name] = make_adapter(tmp_path / name, base, seed=seed, rank=8 + 8 * seed, targets=targets)
        merge(tmp_path / f"{name}-merged", base, paths[name])
    for name in ("", *names):
        with LLM(tmp_path / f"{name}-merged" if name else base, device="cpu", dtype="float32") as llm:
            wanted[name] = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with LLM(base, device="cuda", dtype="float32", lora_modules=paths, **(FEW_SIZES | knobs)) as llm:
        streams = {
            (name, number): llm.stream(prompt, GREEDY, adapter=name)
            for number, prompt in enumerate(PROMPTS)
            for name in wanted
        }
        made = {key: [id_ for delta in stream for id_ in delta.token_ids] for key, stream in streams.items()}
    assert made == {(name, number): wanted[name][number] for name, number in made}


def test_kernels_that_add_adapters_say_what_separate_ones_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 ties break either way: logprobs are compared up to the first token that differs."""
    make_checkpoint("qwen3", base := tmp_path / "base")
    paths = {name: make_adapter(tmp_path / name, base, seed=n, rank=8 + 8 * n) for n, name in enumerate("ab")}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    plans, find = list[WgmmaConfig | None](), CompiledLinears.find_low_rank

    def answers(may_add: bool) -> dict[tuple[str, int], list[tuple[int, float]]]:
        def found(*given: Any, **kinds: Any) -> WgmmaConfig | None:
            plans.append(find(*given, **kinds))
            return plans[-1] if may_add else None

        monkeypatch.setattr(CompiledLinears, "find_low_rank", found)
        with LLM(base, device="cuda", dtype="bfloat16", lora_modules=paths, **FEW_SIZES) as llm:
            streams = {
                (name, number): llm.stream(prompt, params, adapter=name)
                for number, prompt in enumerate(PROMPTS)
                for name in ("", "a", "b")
            }
            return {
                key: [
                    (id_, row.logprob)
                    for delta in stream
                    for id_, row in zip(delta.token_ids, delta.logprobs, strict=True)
                ]
                for key, stream in streams.items()
            }

    together, apart, num_compared = answers(True), answers(False), 0
    assert any(plans)
    for key, pairs in apart.items():
        for (id_, logprob), (other_id, other) in zip(pairs, together[key], strict=True):
            assert abs(logprob - other) < 0.1, key
            if id_ != other_id:
                break
            num_compared += 1
    assert num_compared > 8 * len(apart)
