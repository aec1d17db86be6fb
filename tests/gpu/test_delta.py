"""The delta rule on a real GPU: the kernels' contract, real shapes, and engines that answer as a CPU does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks
from infer.kernels.delta.paged import recur_paged
from infer.kernels.delta.reference import StateCache
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES, capture
from tests.kernels.delta_contract import DeltaContract, check, make_layer

pytestmark = pytest.mark.gpu

REAL = {"Qwen3-Next": (16, 32, 128, 128), "Qwen3.5-0.8B": (16, 16, 128, 128)}
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 17 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
KNOBS: list[dict[str, Any]] = [
    {},
    {"use_cuda_graphs": False, "use_overlap": False},
    {"prefill_chunk_size": 7},
    {"num_blocks": 12, "preemption": "recompute", "prefill_chunk_size": 20},
    {"num_blocks": 12, "preemption": "swap", "swap_blocks": 40},
    {"attention_backend": "sdpa"},
    {"use_prefix_caching": False},
]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestCompiledDeltaRule(DeltaContract):
    device = "cuda"


@pytest.mark.parametrize("model", REAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_shapes(model: str, dtype: torch.dtype) -> None:
    chunks = [PrefillChunk(3, 700, 3, 900), PrefillChunk(703, 130, 4, 0)]
    check("cuda", REAL[model], dtype, [1, 1024, 1025], chunks, block_size=1024, num_blocks=12)


def test_a_captured_step_goes_on_from_its_own_state() -> None:
    torch.manual_seed(0)
    rule, cache = make_layer(REAL["Qwen3-Next"], torch.bfloat16, "cuda", 4)
    tables_RB = torch.tensor([[2, 1]], dtype=torch.int32, device="cuda")
    rows_S = torch.zeros(1, dtype=torch.int32, device="cuda")
    lens_S = torch.tensor([14], dtype=torch.int32, device="cuda")
    x = torch.randn(1, rule.conv_CW.shape[0] + 64, device="cuda").bfloat16()
    inputs = torch.split(x, [rule.conv_CW.shape[0], 32, 32], dim=-1)

    def step() -> torch.Tensor:
        runs_S4 = PrefillChunks.from_rows(rows_S, lens_S).tiles_W4
        return recur_paged(rule, cache, tables_RB, 16, (rows_S, lens_S), runs_S4, None, *inputs)

    kept = StateCache(cache.states.clone(), cache.tails.clone())
    graph, out = capture(step)
    lengths = range(14, 20)  # across the end of a block
    expected = []
    for part, before in zip(cache, kept, strict=True):
        part.copy_(before)
    for length in lengths:
        lens_S.fill_(length)
        expected.append(step().clone())
    for part, before in zip(cache, kept, strict=True):
        part.copy_(before)
    for length, wanted in zip(lengths, expected, strict=True):
        lens_S.fill_(length)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_an_engine_answers_as_on_a_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, sizes=Sizes(num_layers=4, context_len=256), seed=1)
    expected = [
        answer.token_ids
        for answer in LLM(str(tmp_path), device="cpu", dtype="float32").generate(PROMPTS, GREEDY)
    ]
    for knobs in KNOBS if family == "qwen3_5" else KNOBS[:1]:
        llm = LLM(str(tmp_path), device="cuda", dtype="float32", **(FEW_SIZES | knobs))
        for _ in range(2):  # the second time from cached states
            assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected, knobs
        del llm
