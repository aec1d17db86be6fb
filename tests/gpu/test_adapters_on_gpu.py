"""LoRA adapters on a GPU: the kernels' contract, graphs, and the tokens of merged weights in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.linear.low_rank import LowRankStack, RowSlots, add_low_rank
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
