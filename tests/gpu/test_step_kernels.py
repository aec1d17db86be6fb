"""The contract of a decode step's kernels on a real GPU, at a real vocabulary, and captured in a graph."""

from __future__ import annotations

import random

import pytest
import torch

from infer.kernels.elementwise.heads import (
    CacheSlots,
    HeadTransform,
    norm_rope_write,
    norm_rope_write_reference,
)
from infer.kernels.elementwise.step_state import StepInputs, advance_rows, apply_table_diffs, gather_step
from infer.kernels.sampling import sample_rows as sampling
from infer.kernels.sampling.sample_rows import (
    SampleScratch,
    compile_sample_rows,
    sample_rows,
    sample_rows_reference,
)
from infer.sampling.params import SamplingParams
from tests.gpu.graphs import capture
from tests.kernels.kernel_contract import assert_same
from tests.kernels.step_contract import SampledRows, StepContract, random_params

VOCAB_SIZE = 151_936


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces a new default once
class TestCompiledStep(StepContract):
    device = "cuda"
    vocab_size = VOCAB_SIZE
    num_rows = 256

    def test_what_is_compiled_in_the_background_is_what_is_launched(self) -> None:
        vocab_size = 50_001  # of no other test
        rows = SampledRows([SamplingParams(temperature=0.7, top_k=5)] * 3, "cuda")
        scratch = SampleScratch(3, vocab_size, "cuda")
        compile_sample_rows(rows.state, scratch, torch.bfloat16)()
        names = ("_survey_kernel", "_candidates_kernel", "_buckets_kernel", "_wide_kernel")
        caches = [getattr(sampling, name).device_caches[0][0] for name in names]
        num_compiled = [len(cache) for cache in caches]
        assert all(num_compiled)
        logits = self.randn(3, vocab_size, spread=3.0).bfloat16()
        ids = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch)
        assert (
            ids.tolist() == sample_rows_reference(logits, rows.state, rows.rows_S, rows.positions_S).tolist()
        )
        assert [len(cache) for cache in caches] == num_compiled

    def test_a_row_is_sampled_alike_whatever_its_neighbours_are(self) -> None:
        source = random.Random(3)
        rows = SampledRows([random_params(source) for _ in range(64)], "cuda")
        logits = self.randn(64, VOCAB_SIZE, spread=3.0)
        scratch = SampleScratch(64, VOCAB_SIZE, "cuda")
        together = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch).tolist()
        alone = [
            int(
                sample_rows(
                    logits[i : i + 1],
                    rows.state,
                    rows.rows_S[i : i + 1],
                    rows.positions_S[i : i + 1],
                    scratch,
                )
            )
            for i in range(64)
        ]
        assert together == alone

    def test_a_captured_sampler_reads_new_state_and_new_logits(self) -> None:
        source = random.Random(4)
        rows = SampledRows([SamplingParams(temperature=0.0)] * 8, "cuda")
        logits = self.randn(8, VOCAB_SIZE).bfloat16()
        scratch = SampleScratch(8, VOCAB_SIZE, "cuda")
        graph, _ = capture(lambda: sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch))
        for replay in range(6):
            fresh = SampledRows([random_params(source) for _ in range(8)], "cuda", seed=replay)
            for ours, theirs in zip(rows.tensors(), fresh.tensors(), strict=True):
                ours.copy_(theirs)
            logits.copy_(self.randn(8, VOCAB_SIZE, spread=3.0))
            if replay == 5:
                rows.rows_S[6:] = -1
            graph.replay()
            expected = sample_rows_reference(logits, rows.state, rows.rows_S, rows.positions_S)
            assert scratch.ids_S.tolist() == expected.tolist()

    def test_a_captured_step_feeds_itself(self) -> None:
        """Three replays with no copy in between: the last tokens, positions, slots and tables follow."""
        rows = torch.tensor([1, -1, 0], dtype=torch.int32, device="cuda")
        last_token = torch.tensor([5, 6], device="cuda")
        position = torch.tensor([3, 7], device="cuda")
        tables = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32, device="cuda")
        diffs = torch.tensor([[0, 1, 9]], dtype=torch.int32, device="cuda")
        inputs = StepInputs.empty(3, "cuda")

        def step() -> None:
            apply_table_diffs(tables, diffs)
            gather_step(rows, last_token, position, tables, block_size=4, out=inputs)
            advance_rows(rows, inputs.tokens_S * 2, inputs.positions_S + 1, last_token, position)

        graph, _ = capture(step)  # the step ran once: capturing itself computes nothing
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append([column.tolist() for column in inputs])
        assert [each[0] for each in seen] == [[12, 0, 10], [24, 0, 20], [48, 0, 40]]
        assert [each[1] for each in seen] == [[8, 0, 4], [9, 0, 5], [10, 0, 6]]
        assert seen[0][2][1:] == [-1, 9 * 4]
        assert seen[0][3] == [9, 0, 5]

    def test_captured_heads_follow_positions_and_slots(self) -> None:
        qkv = self.randn(4, (16 + 2 * 8) * 128).bfloat16()
        weights = self.randn(128).bfloat16(), self.randn(128).bfloat16()
        transform = HeadTransform(weights, *self.tables(128), num_heads=16, num_kv_heads=8, eps=1e-6)
        positions = torch.zeros(4, dtype=torch.int64, device="cuda")
        caches = [torch.zeros((32, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        slots, q_out = torch.full((4,), -1, device="cuda"), torch.zeros((4, 16, 128), device="cuda")

        def step() -> None:
            q, _, _ = norm_rope_write(qkv, transform, positions, CacheSlots(caches[0], caches[1], slots))
            q_out.copy_(q)

        graph, _ = capture(step)
        assert not caches[0].any()
        positions.copy_(torch.tensor([3, 9, 0, 40]))
        slots.copy_(torch.tensor([31, -1, 0, 7]))
        qkv.copy_(self.randn(*qkv.shape))
        graph.replay()
        expected, _, _ = norm_rope_write_reference(
            qkv, transform, positions, CacheSlots(caches[2], caches[3], slots)
        )
        assert_same(q_out.bfloat16(), expected)
        assert_same(caches[0], caches[2])
        assert torch.equal(caches[1], caches[3])
