"""What the kernels of a decode step promise: heads, sampling, the state of the rows, copies of blocks.

As in `kernel_contract.py`, the promises are written once and tested twice: under Triton's interpreter
(`interpreted_step.py`) and compiled on a GPU (`tests/gpu/test_step_kernels.py`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from infer.execution.gpu.tree_turns import tree_turns
from infer.execution.trees import kept_path
from infer.kernels.elementwise.copy_block import copy_block, copy_block_reference
from infer.kernels.elementwise.heads import (
    CacheSlots,
    HeadTransform,
    norm_rope_write,
    norm_rope_write_reference,
    split_heads,
    write_slots,
    write_slots_reference,
)
from infer.kernels.elementwise.kv_codes import LARGEST, KVScales
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.kernels.elementwise.rope import rope
from infer.kernels.elementwise.step_state import (
    StepInputs,
    advance_rows,
    apply_table_diffs,
    gather_step,
)
from infer.kernels.elementwise.tree_nodes import next_nodes, next_nodes_reference
from infer.kernels.elementwise.windows import (
    DraftedRows,
    judge_windows,
    judge_windows_reference,
    next_turn,
    next_turn_reference,
    unpack_window,
    unpack_window_reference,
)
from infer.kernels.runtime.dispatch import use_triton
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.kernels.sampling.sample_rows import (
    MAX_CANDIDATES,
    NO_TOKEN,
    TILE,
    SampleScratch,
    sample_rows,
    sample_rows_reference,
)
from infer.kernels.sampling.sample_state import (
    IN_PROMPT,
    IS_BANNED,
    MAX_COUNT,
    SampleState,
    count_uses,
    enter_rows,
    enter_rows_reference,
    num_mask_words,
    pack_biases,
)
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, sample
from infer.speculative.tree import chain_of, tree_of
from tests.kernels.kernel_contract import FramedTensor, assert_same, every_dtype, nan_in_fresh_memory

EPS = 1e-6
NUM_SLOTS = 24


def random_params(random_source: random.Random) -> SamplingParams:
    """Any mixture of parameters, the extreme ones more often than a client would ask for them."""
    pick = random_source.choice
    return SamplingParams(
        temperature=pick([0.0, 1e-30, 0.01, 0.3, 0.7, 1.0, 1.0, 1.7, 10.0, 100.0]),
        top_k=pick([0, 0, 0, 1, 2, 5, 40, 300, 5000]),
        top_p=pick([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999]),
        min_p=pick([0.0, 0.0, 0.0, 1e-4, 0.05, 0.3, 1.0]),
    )


def asking_params(source: random.Random, vocab_size: int, number: int) -> SamplingParams:
    """What changes logits, over any way to sample; the lowest bits of the number say what."""
    pick, ids = source.choice, [source.randrange(vocab_size) for _ in range(40)]
    penalized, biased, banned = (bool(number & bit) for bit in (1, 2, 4))
    return dataclasses.replace(
        random_params(source),
        repetition_penalty=pick([1.0, 1.3, 0.7]) if penalized else 1.0,
        presence_penalty=pick([0.0, 1.5, -0.3]) if penalized else 0.0,
        frequency_penalty=pick([0.37, -2.0]) if penalized else 0.0,
        logit_bias={token: source.uniform(-8, 8) for token in (*ids, vocab_size - 1, 0)} if biased else {},
        min_tokens=3 * banned,
        max_tokens=9,
    )


def as_tensor(entries: Sequence[bytes]) -> torch.Tensor:
    """Entries one below the other, as they are sent."""
    return torch.frombuffer(bytearray().join(entries), dtype=torch.int64).view(-1, NUM_FIELDS)


def bit_of(token_id: int) -> int:
    """The bit of an id in its word of a mask, as an int32."""
    bit = 1 << token_id % 32
    return bit - (bit >> 31 << 32)


class SampledRows:
    """Rows with their parameters, in a state that holds them in another order among strangers.

    With a vocabulary, rows may have tokens behind them, biases, bans and masks.
    """

    def __init__(
        self, params: Sequence[SamplingParams], device: str, *, seed: int = 0, vocab_size: int = 0
    ) -> None:
        source = self.source = random.Random(seed)
        self.params = list(params)
        self.seeds = [source.randrange(-(2**63) + 1, 2**63) * source.choice([1, 1, 3]) for _ in params]
        self.positions = [source.choice([0, 1, 77, 131071, 2**31 + 5]) for _ in params]
        num_state_rows = len(self.params) + 3
        self.rows = source.sample(range(num_state_rows), len(self.params))
        self.vocab_size = vocab_size
        self.state = SampleState.empty(num_state_rows, device, vocab_size)
        self.tokens = [self.some_ids(60) if vocab_size else [] for _ in params]
        self.num_prompts = [source.randrange(len(tokens) + 1) for tokens in self.tokens]
        self.banned = [tuple(self.some_ids(5)) if each.min_tokens else () for each in params]
        self.masks: list[torch.Tensor | None] = [None] * len(self.params)
        entries = [self.enter(number) for number in range(len(self.params))]
        enter_rows_reference(self.state, as_tensor(entries).to(device))
        self.rows_S = torch.tensor(self.rows, dtype=torch.int32, device=device)
        self.positions_S = torch.tensor(self.positions, device=device)

    def some_ids(self, count: int) -> list[int]:
        """Ids of the vocabulary, most of them twice or more, the last one among them."""
        few = [self.vocab_size - 1, *(self.source.randrange(self.vocab_size) for _ in range(count // 3))]
        return [self.source.choice(few) for _ in range(self.source.randrange(count + 1))]

    def enter(self, number: int) -> bytes:
        """Fill the tables of a row; returns its line."""
        row, params, tokens = self.rows[number], self.params[number], self.tokens[number]
        end, banned = self.num_prompts[number], self.banned[number]
        has_uses = params.has_penalties or bool(banned)
        if has_uses:
            uses = count_uses(self.vocab_size, tokens[:end], tokens[end:], banned)
            self.state.uses_RV[row] = torch.from_numpy(uses)
        if params.logit_bias:
            self.state.biases_R2E[row] = torch.from_numpy(pack_biases(dict(params.logit_bias)))
        return SampleLine(
            row, int(has_uses), params.top_k, self.seeds[number],
            self.positions[number] + 1 if banned and number % 3 else 0, len(params.logit_bias),
            params.temperature, params.top_p, params.min_p, params.repetition_penalty,
            params.presence_penalty, params.frequency_penalty,
        ).pack()  # fmt: skip

    def mask_some(self, numbers: Sequence[int]) -> None:
        """Give rows a mask each; bits behind the vocabulary are set: no kernel may look at them."""
        generator = torch.Generator().manual_seed(3)
        for line, number in enumerate(numbers):
            words = num_mask_words(self.vocab_size)
            mask_W = torch.randint(-(2**31), 2**31, (words,), generator=generator).int()
            mask_W[self.source.randrange(words)] = -1
            self.masks[number] = mask_W
            self.state.masks_RW[line] = mask_W
            self.state.mask_row_R[self.rows[number]] = line

    def tensors(self) -> list[torch.Tensor]:
        """Everything a captured step reads, in a fixed order."""
        return [*self.state.tensors, self.rows_S, self.positions_S]

    def expected(self, logits_SV: torch.Tensor) -> list[int]:
        rows = [
            SampleRow(
                self.params[number], self.seeds[number], self.positions[number], self.num_prompts[number],
                self.tokens[number], self.banned[number] if number % 3 else (), mask_W=self.masks[number],
            )
            for number in range(len(self.params))
        ]  # fmt: skip
        return sample(logits_SV, rows).ids

    def check(self, logits_SV: torch.Tensor) -> None:
        scratch = SampleScratch(len(self.rows) + 1, logits_SV.shape[1], logits_SV.device)
        ids = sample_rows(logits_SV, self.state, self.rows_S, self.positions_S, scratch).tolist()
        expected = self.expected(logits_SV)
        wrong = [(self.params[i], ids[i], expected[i]) for i in range(len(ids)) if ids[i] != expected[i]]
        assert not wrong, wrong[:5]


class StepContract:
    """Subclass it with a `device` on which `use_triton` holds, and the vocabulary to sample from."""

    device: str
    vocab_size: int
    num_rows: int

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    def randn(self, *shape: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=self.device) * spread

    def test_the_kernel_and_not_the_reference_is_under_test(self) -> None:
        assert use_triton(torch.zeros(1, device=self.device))

    # heads ---------------------------------------------------------------------------------------------

    def tables(self, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.rand(50, head_dim // 2, device=self.device) * 6.3
        return angles.cos(), angles.sin()

    def positions(self, num_tokens: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(50, (num_tokens,), device=self.device).to(dtype)

    def qkv(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> FramedTensor:
        num_tokens, num_heads, num_kv_heads, head_dim = shape
        return FramedTensor((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), dtype, self.device)

    @every_dtype
    @pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize(
        "shape",  # T, N, G, H; the heads of (2, 33, 1, 128) take more than one program
        [(1, 9, 3, 64), (5, 4, 2, 80), (2, 33, 1, 128), (0, 2, 2, 8)],
        ids=str,
    )
    def test_heads_with_a_cache(
        self, shape: tuple[int, int, int, int], has_norm: bool, dtype: torch.dtype
    ) -> None:
        num_tokens, num_heads, num_kv_heads, head_dim = shape
        qkv = self.qkv(shape, dtype)
        weights = (self.randn(head_dim).to(dtype), self.randn(head_dim).to(dtype)) if has_norm else None
        transform = HeadTransform(weights, *self.tables(head_dim), num_heads, num_kv_heads, EPS, offset=1.0)
        slots = torch.randperm(NUM_SLOTS, device=self.device)[:num_tokens]
        slots[1:2] = -1  # padding
        caches = [
            torch.full((NUM_SLOTS, num_kv_heads, head_dim), 7.0, dtype=dtype, device=self.device)
            for _ in range(4)
        ]
        positions = self.positions(num_tokens, torch.int32)
        with nan_in_fresh_memory():
            q, k, v = norm_rope_write(
                qkv.view, transform, positions, CacheSlots(caches[0], caches[1], slots.int())
            )
        expected_q, _, _ = norm_rope_write_reference(
            qkv.view, transform, positions, CacheSlots(caches[2], caches[3], slots)
        )
        assert_same(q, expected_q)
        assert_same(caches[0], caches[2])
        assert torch.equal(caches[1], caches[3])
        assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim)
        qkv.assert_untouched()

    @every_dtype
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_heads_without_a_cache_equal_norm_and_rope(self, offset: float, dtype: torch.dtype) -> None:
        shape = (5, 6, 2, 80)
        qkv, tables, positions = self.qkv(shape, dtype), self.tables(80), self.positions(5)
        q_weight, k_weight = self.randn(80).to(dtype), self.randn(80).to(dtype)
        with nan_in_fresh_memory():
            transform = HeadTransform((q_weight, k_weight), *tables, 6, 2, EPS, offset)
            q, k, v = norm_rope_write(qkv.view, transform, positions)
        raw_q, raw_k, raw_v = split_heads(qkv.view, 6, 2)
        expected_q, expected_k = rope(
            rms_norm(raw_q, q_weight, eps=EPS, offset=offset),
            rms_norm(raw_k, k_weight, eps=EPS, offset=offset),
            *tables,
            positions,
        )
        assert_same(q, expected_q)
        assert_same(k, expected_k)
        assert v.data_ptr() == raw_v.data_ptr() and v.shape == raw_v.shape

    def test_keys_and_values_are_kept_beside_the_cache_on_demand(self) -> None:
        shape = (5, 9, 3, 80)
        qkv, positions = self.qkv(shape, torch.bfloat16), self.positions(5)
        transform = HeadTransform(None, *self.tables(80), 9, 3, EPS)
        keys, values = (
            torch.zeros((NUM_SLOTS, 3, 80), dtype=torch.bfloat16, device=self.device) for _ in range(2)
        )
        slots = torch.randperm(NUM_SLOTS, device=self.device)[:5]
        with nan_in_fresh_memory():
            cache = CacheSlots(keys, values, slots, keeps=True)
            _, k, v = norm_rope_write(qkv.view, transform, positions, cache)
        assert torch.equal(k, keys[slots]) and torch.equal(v, values[slots])

    @every_dtype
    def test_keys_and_values_are_written_to_their_slots(self, dtype: torch.dtype) -> None:
        qkv = self.qkv((5, 3, 3, 20), dtype)
        _, k, v = split_heads(qkv.view, 3, 3)
        slots = torch.tensor([4, -1, 23, 0, 9], device=self.device)
        caches = [torch.full((NUM_SLOTS, 3, 20), 7.0, dtype=dtype, device=self.device) for _ in range(4)]
        write_slots(k, v, CacheSlots(caches[0], caches[1], slots))
        write_slots_reference(k, v, CacheSlots(caches[2], caches[3], slots))
        assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
        assert torch.equal(caches[0][4], k[0]) and bool((caches[1][5:9] == 7.0).all())

    @pytest.mark.parametrize(
        ("kept_as", "is_fixed"),
        [(torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.int8, False)],
        ids=["fp8", "fp8, fixed scales", "int8"],
    )
    @pytest.mark.parametrize("is_projected", [True, False])
    def test_heads_are_written_as_codes(
        self, is_projected: bool, kept_as: torch.dtype, is_fixed: bool
    ) -> None:
        """Fixed scales are other ones for each head, some too small for its elements."""
        shape, block_size = (5, 9, 3, 80), 4
        qkv, positions = self.qkv(shape, torch.float32), self.positions(5)
        slots = torch.tensor([4, -1, 23, 0, 9], device=self.device)
        blank = torch.zeros((2, NUM_SLOTS, 3, 80), dtype=torch.uint8, device=self.device)
        caches = []
        for _ in range(2):
            keys, values = blank.clone().view(kept_as)
            scales = torch.full((2, NUM_SLOTS // block_size, 3, block_size), 7.0, device=self.device)
            fixed = torch.logspace(-5, -2, 6, device=self.device).view(2, 3) if is_fixed else None
            caches.append(CacheSlots(keys, values, slots, scales=KVScales(*scales), fixed=fixed))
        transform = HeadTransform(None, *self.tables(80), 9, 3, EPS)
        if is_projected:
            norm_rope_write(qkv.view, transform, positions, caches[0])
            norm_rope_write_reference(qkv.view, transform, positions, caches[1])
        else:
            _, k, v = split_heads(qkv.view, 9, 3)
            write_slots(k, v, caches[0])
            write_slots_reference(k, v, caches[1])
        for ours, theirs in zip(caches[0][:2], caches[1][:2], strict=True):
            distance = (ours.float() - theirs.float()).abs()  # a rotation may round otherwise
            assert (distance > 0).float().mean() < 0.005 and theirs.float().any()
            step = torch.ones_like(distance) if kept_as is torch.int8 else theirs.float().abs() / 8 + 2**-9
            assert (distance <= step).all()
        assert caches[0].scales is not None and caches[1].scales is not None
        for ours, theirs in zip(caches[0].scales, caches[1].scales, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
            assert (ours == 7.0).sum() == (NUM_SLOTS - 4) * 3
        if is_fixed:
            assert all((codes.float().abs() == 448).any() for codes in caches[0][:2])

    @pytest.mark.parametrize("kept_as", LARGEST, ids=["fp8", "int8"])
    @pytest.mark.parametrize("is_projected", [True, False])
    def test_codes_of_tiny_heads_and_of_not_a_number(self, is_projected: bool, kept_as: torch.dtype) -> None:
        slots = torch.arange(3, device=self.device)
        qkv, positions = self.qkv((3, 3, 3, 20), torch.float32), self.positions(3)
        heads = qkv.view.view(3, 9, 20)
        heads[1] *= 1e-37
        heads[2, 3:, 13] = torch.nan  # in the second half alone: rotated, in both
        kept = torch.zeros((2, 4, 3, 20), dtype=torch.uint8, device=self.device).view(kept_as)
        scales = torch.full((2, 1, 3, 4), 7.0, device=self.device)
        cache = CacheSlots(kept[0], kept[1], slots, scales=KVScales(scales[0], scales[1]))
        if is_projected:
            norm_rope_write(qkv.view, HeadTransform(None, *self.tables(20), 3, 3, EPS), positions, cache)
        else:
            write_slots(*split_heads(qkv.view, 3, 3)[1:], cache)
        assert not kept[:, 1].float().any() and (scales[..., 1] == 0).all()
        assert (scales[..., 0] > 0).all() and scales[..., 2].isnan().all()

    # sampling ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "spread, dtype", [(0.5, torch.float32), (3.0, torch.bfloat16), (12.0, torch.float32)], ids=str
    )
    def test_rows_are_sampled_as_the_sampler_does(self, spread: float, dtype: torch.dtype) -> None:
        source = random.Random(int(spread * 10))
        rows = SampledRows([random_params(source) for _ in range(self.num_rows)], self.device)
        rows.check(self.randn(self.num_rows, self.vocab_size, spread=spread).to(dtype))

    def test_biases_bans_penalties_and_masks_are_those_of_the_sampler(self) -> None:
        """In one batch with rows that ask for nothing, at a vocabulary that is no multiple of 32."""
        source, vocab_size = random.Random(21), 4096 + 37
        params = [asking_params(source, vocab_size, number) for number in range(self.num_rows + 2)]
        rows = SampledRows(params, self.device, seed=4, vocab_size=vocab_size)
        rows.mask_some(range(2, len(params), 3))
        rows.check(self.randn(len(params), vocab_size, spread=3.0).bfloat16())

    @pytest.mark.parametrize("num_allowed", [1, 40])
    def test_masks_that_leave_few_tokens(self, num_allowed: int) -> None:
        """As those of a grammar do: most groups of a row have no token at all, whatever its filters are."""
        source = random.Random(num_allowed)
        rows = SampledRows(
            [random_params(source) for _ in range(self.num_rows)], self.device, vocab_size=self.vocab_size
        )
        rows.mask_some(range(0, self.num_rows, 2))
        for line, number in enumerate(range(0, self.num_rows, 2)):
            mask_W = torch.zeros(num_mask_words(self.vocab_size), dtype=torch.int32)
            for token_id in source.sample(range(self.vocab_size), num_allowed):
                mask_W[token_id // 32] |= bit_of(token_id)
            rows.masks[number] = rows.state.masks_RW[line] = mask_W
        rows.check(self.randn(self.num_rows, self.vocab_size, spread=3.0).bfloat16())

    @pytest.mark.parametrize("vocab_size", [1, 31, 32, 33])
    def test_a_mask_of_any_vocabulary(self, vocab_size: int) -> None:
        params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)]
        rows = SampledRows(params, self.device, vocab_size=vocab_size)
        rows.mask_some([2, 0])
        logits = self.randn(3, vocab_size)
        rows.check(logits)
        for line in range(2):  # only the last token is left, then none
            rows.state.masks_RW[line] = 0
            rows.state.masks_RW[line, -1] = bit_of(vocab_size - 1)
        scratch = SampleScratch(3, vocab_size, self.device)
        ids = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch)
        assert ids.tolist()[0] == ids.tolist()[2] == vocab_size - 1
        behind = -(1 << vocab_size % 32) if vocab_size % 32 else 0  # the bits behind the vocabulary
        rows.state.masks_RW[:, -1] = behind
        ids = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch)
        assert ids.tolist()[0] == ids.tolist()[2] == NO_TOKEN

    def test_with_many_rows_a_program_takes_several_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two of the three tiles of a row at a time: the last program has one; some rows are flat."""
        monkeypatch.setattr("infer.kernels.sampling.sample_rows._ROWS_PER_TILE", 3)
        source = random.Random(9)
        rows = SampledRows([random_params(source) for _ in range(7)], self.device)
        logits = self.randn(7, 2 * TILE + 100, spread=3.0)
        logits[::4] *= 0.01
        rows.check(logits)

    def test_sampling_by_the_reference(self) -> None:
        source = random.Random(5)
        rows = SampledRows([random_params(source) for _ in range(60)], self.device)
        logits = self.randn(60, 300, spread=3.0)
        ids = sample_rows_reference(logits, rows.state, rows.rows_S, rows.positions_S)
        assert ids.tolist() == rows.expected(logits)

    @pytest.mark.parametrize("vocab_size", [1, 511, 4097])
    def test_sampling_of_other_vocabularies(self, vocab_size: int) -> None:
        source = random.Random(vocab_size)
        rows = SampledRows([random_params(source) for _ in range(4)], self.device)
        rows.check(self.randn(4, vocab_size, spread=2.0))

    def test_sampling_among_ties_and_forbidden_tokens(self) -> None:
        source = random.Random(1)
        rows = SampledRows([random_params(source) for _ in range(self.num_rows)], self.device)
        logits = self.randn(self.num_rows, self.vocab_size, spread=2.0).round()
        logits[::3].masked_fill_(torch.rand_like(logits[::3]) < 0.9, -torch.inf)
        logits[1::3, 100:] = -torch.inf
        logits[2] = 1.5  # all alike
        logits[5] = -torch.inf
        logits[5, 3] = -2.0  # one left
        rows.check(logits)

    def test_a_crowd_of_likely_tokens_does_not_fit_among_the_candidates(self) -> None:
        """Most large logits lie in one stretch of the vocabulary: the groups' peaks mislead."""
        params = [
            SamplingParams(top_p=0.9),
            SamplingParams(top_k=700),
            SamplingParams(top_k=3, top_p=0.5),
            SamplingParams(top_k=700, top_p=0.3, min_p=1e-3),
        ]
        assert self.vocab_size > 2 * MAX_CANDIDATES
        logits = self.randn(len(params), self.vocab_size)
        logits[:, : MAX_CANDIDATES + 500] += 9.0
        SampledRows(params, self.device).check(logits)

    def test_a_row_without_a_finite_peak_has_no_token(self) -> None:
        logits = self.randn(10, self.vocab_size)
        logits[0, 7] = torch.nan
        logits[1, self.vocab_size - 1] = torch.inf
        logits[2] = -torch.inf
        logits[3] = torch.nan
        params = [SamplingParams(temperature=t, top_p=p) for t in (0.0, 0.8) for p in (1.0, 0.9)]
        rows = SampledRows([*params, *params, *params[:2]], self.device)
        expected = rows.expected(logits)
        assert expected[:4] == [NO_TOKEN] * 4 and NO_TOKEN not in expected[4:]
        rows.check(logits)
        rows.check(logits.flip(0))

    def test_padding_rows_are_left_alone(self) -> None:
        rows = SampledRows([SamplingParams(top_p=0.9), SamplingParams()], self.device)
        logits = self.randn(2, self.vocab_size)
        logits[0] = torch.nan
        expected = rows.expected(logits)
        rows.rows_S[0] = -1
        scratch = SampleScratch(2, self.vocab_size, self.device)
        ids = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch)
        assert ids.tolist() == [0, expected[1]]
        assert ids.data_ptr() == scratch.ids_S.data_ptr()

    def test_the_same_scratch_memory_serves_step_after_step(self) -> None:
        """Rows that need every kernel, then none of them, then other rows again: nothing is left behind."""
        flat, plain = SamplingParams(top_p=0.95), SamplingParams(temperature=0.7)
        few, greedy = SamplingParams(top_k=20, top_p=0.95), SamplingParams(temperature=0.0)
        wide_min_p, huge_k = SamplingParams(min_p=1e-4), SamplingParams(top_k=3000)
        steps = [[flat, wide_min_p, huge_k], [greedy, plain, few], [few, flat, plain], [huge_k, few, flat]]
        scratch = SampleScratch(3, self.vocab_size, self.device)
        for number, params in enumerate(steps):
            rows = SampledRows(params, self.device, seed=number)
            logits = self.randn(3, self.vocab_size, spread=0.5)
            ids = sample_rows(logits, rows.state, rows.rows_S, rows.positions_S, scratch)
            assert ids.tolist() == rows.expected(logits), number

    def test_logits_of_a_wider_matrix(self) -> None:
        """A vocabulary padded for the tensor cores: the rows are views, and the padding must not win."""
        padded = torch.full((4, self.vocab_size + 40), 1e9, device=self.device)
        padded[:, : self.vocab_size] = self.randn(4, self.vocab_size)
        params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=9, top_p=0.9)]
        SampledRows([*params, params[0]], self.device).check(padded[:, : self.vocab_size])

    # state of the rows ---------------------------------------------------------------------------------

    def test_a_step_gathers_what_its_rows_need(self) -> None:
        rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=self.device)
        last_token = torch.tensor([11, 12, 13, 14], device=self.device)
        position = torch.tensor([0, 5, 6, 9], device=self.device)
        tables = torch.tensor([[8, 0, 0], [1, 2, 0], [3, 4, 0], [5, 7, 6]], dtype=torch.int32)
        out = StepInputs.empty(5, self.device)
        got = gather_step(rows, last_token, position, tables.to(self.device), block_size=4, out=out.first(3))
        assert [column.tolist() for column in got] == [[14, 0, 11], [9, 0, 0], [25, -1, 32], [10, 0, 1]]
        assert [c.dtype for c in got] == [torch.int64, torch.int64, torch.int64, torch.int32]
        assert got.tokens_S.data_ptr() == out.tokens_S.data_ptr()

    def test_rows_advance(self) -> None:
        last_token = torch.tensor([1, 2, 3, 4], device=self.device)
        position = torch.tensor([10, 20, 30, 40], device=self.device)
        rows = torch.tensor([2, -1, 0, 3], dtype=torch.int32, device=self.device)
        ids = torch.tensor([77, 88, NO_TOKEN, 99], device=self.device)
        advance_rows(rows, ids, torch.tensor([31, 5, 11, 48], device=self.device), last_token, position)
        assert last_token.tolist() == [0, 2, 77, 99]
        assert position.tolist() == [11, 20, 31, 48]

    def test_rows_that_draft_go_on_from_their_ids(self) -> None:
        rows = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
        tables = torch.tensor([[4, 5], [6, 7], [8, 9]], dtype=torch.int32)
        results = []
        for device, turn in (("cpu", next_turn_reference), (self.device, next_turn)):
            out = StepInputs.empty(4, device)
            out.positions_S.copy_(torch.tensor([3, 0, 5, 7]))  # the last one's table ends here
            out.lens_S.copy_(torch.tensor([4, 0, 6, 8]))
            ids, drafts = torch.tensor([11, 0, 13, -1], device=device), torch.empty(4, dtype=torch.int64)
            drafts = drafts.to(device)
            turn(rows.to(device), ids, tables.to(device), out, drafts, block_size=4)
            results.append([*(x.tolist() for x in out), drafts.tolist()])
        tokens, positions, slots, lens, drafts_made = results[1]
        assert (tokens, positions, lens) == ([11, 0, 13, 0], [4, 0, 6, 8], [5, 0, 7, 9])
        assert slots[:3] == [36, -1, 22] and drafts_made == [11, 0, 13, 0]
        for got, expected in zip(results[1], results[0], strict=True):
            assert got[:3] == expected[:3]

    @pytest.mark.parametrize("count", [1, 3, 8, 16])
    def test_ids_of_a_turn_become_the_nodes_of_the_next(self, count: int) -> None:
        """Drafts by the path to each; positions by depth, slots by number, and a bit for each ancestor."""
        tree, rows, firsts = tree_of(count), [2, -1, 0], {2: 6, 0: 3}
        parents = [0, *(node - back for node, back in enumerate(tree.backs, 1))]
        tables = torch.tensor([[4, 9, 7, 5, 1], [6, 6, 6, 6, 6], [8, 2, 11, 3, 12]], dtype=torch.int32)
        positions = torch.tensor([3, 99, 6], device=self.device)
        num_rows, drafts = len(rows), torch.zeros((count, 4), dtype=torch.int64, device=self.device)
        computed = [0]
        for turn in tree_turns(tree, torch.device(self.device)):
            nodes = [node for node, depth in enumerate(tree.depths, 1) if depth == turn.depth]
            best = torch.tensor(
                [
                    [1000 * rank + 10 * parent + place for parent in computed for place in range(num_rows)]
                    for rank in range(turn.num_best)
                ]
            )
            after, found = [node for node in nodes if node in parents], []
            for grow in (next_nodes, next_nodes_reference):
                out = StepInputs.empty(len(after) * num_rows, self.device)
                seen, copy = torch.zeros((2, len(out.tokens_S)), device=self.device).long(), drafts.clone()
                grow(
                    torch.tensor(rows, dtype=torch.int32, device=self.device), best.to(self.device),
                    turn.links_3C, positions, tables.to(self.device), out, seen, copy,
                    block_size=4, depth=turn.depth,
                )  # fmt: skip
                found.append((*(x.tolist() for x in out), seen.tolist(), copy.tolist()))
            assert found[0] == found[1]
            tokens, places, slots, lens, (starts, bits), made = found[0]
            for node in nodes:
                ids = [1000 * tree.ranks[node - 1] + 10 * parents[node] + place for place in range(num_rows)]
                assert made[node - 1] == [*ids, 0]
            for index, (node, place) in enumerate(product(after, range(num_rows))):
                if (row := rows[place]) < 0:
                    assert (tokens[index], slots[index], lens[index]) == (0, -1, 0)
                    continue
                at, path = firsts[row] + node, {0, node}
                while parents[node]:
                    node = parents[node]
                    path.add(node)
                assert slots[index] == int(tables[row, at // 4]) * 4 + at % 4 and lens[index] == at + 1
                assert (places[index], starts[index]) == (firsts[row] + turn.depth, firsts[row])
                assert bits[index] == sum(1 << each for each in path)
                assert tokens[index] == made[at - firsts[row] - 1][place]
            drafts, computed = torch.tensor(made, device=self.device), after
        assert not computed

    @pytest.mark.parametrize("count", [0, 8, 16])
    def test_windows_are_judged(self, count: int) -> None:
        """As the host judges them (execution/trees.py), next to chains, and to rows whose fate is decided."""
        source = random.Random(count)
        rows, tokens, positions, ids, decided, starts, seen, slots = (list[int]() for _ in range(8))
        expected, sources = dict[int, list[int]](), list[int]()
        for row in source.sample(range(40), 10):
            is_tree = source.random() < 0.7
            shape = (tree_of if is_tree else chain_of)(count)
            backs, first, begin = [0, *shape.backs], len(rows), source.randrange(50)
            mine = [source.randrange(2, 5) for _ in backs]
            drawn = [source.randrange(2, 5) for _ in backs]
            path, fate = kept_path(drawn, mine[1:], backs), [-1] * len(backs)
            if source.random() < 0.2:
                path = [*range(source.randint(0, shape.depth) + 1)]
                fate = [int(node == path[-1]) for node in range(len(backs))]
            bits = [1]
            for node, back in enumerate(backs[1:], 1):
                bits.append(bits[node - back] | 1 << node)
            depths = [0, *shape.depths]
            rows += [row] * len(backs)
            tokens, ids, decided = tokens + mine, ids + drawn, decided + fate
            positions += [begin + depth for depth in depths]
            starts += [begin if is_tree else NO_TREE] * len(backs)
            seen += bits if is_tree else [NO_TREE] * len(backs)
            slots += (own := source.sample(range(100), len(backs)))
            sources += [own[node] for node in path] + own[len(path) :]
            last = path[-1]
            expected[row] = [drawn[last], mine[last], positions[first + last] + 1]
        columns = [rows, tokens, positions, ids, decided, starts, seen, slots]
        numbers = [torch.tensor([*column, -1, -1], device=self.device) for column in columns]
        found = []
        for judge in (judge_windows, judge_windows_reference):
            state, moved = torch.full((3, 40), -7, device=self.device), numbers[7].clone()
            tree_and_slots = torch.stack(numbers[5:7]), numbers[7]
            judge(*[numbers[0].int(), *numbers[1:5], *tree_and_slots, *state, moved])
            found.append((state.tolist(), moved.tolist()))
        assert found[0] == found[1] and found[0][1] == [*sources, -1, -1]
        for row in range(40):
            assert [line[row] for line in found[0][0]] == expected.get(row, [-7] * 3)

    def test_lines_of_a_window_and_its_drafts(self) -> None:
        drafts = torch.tensor([50, 51, 52, 53], device=self.device)
        lines = torch.full((9, 8), -1)
        lines[0, :7] = torch.tensor([3, 3, 3, 1, 1, 0, 0])
        lines[1, :5] = torch.tensor([8, 9, 10, 2, 3])
        lines[4, :7] = torch.tensor([7, -2, -4, 0, -5, 0, -3])  # drafts 0, 2, 3 and 1
        lines[5, :5] = lines[1, :5] - 1
        lines[5, 5:7] = torch.tensor([-2, -3])  # the last token of row 0, and one after it
        lines[6:8, :5] = torch.tensor([[30, 31, 32, 33, 34], [9, 8, 7, 6, 5]])
        tables = torch.tensor([[[1, 2]] * 4, [[5, 6]] * 4], dtype=torch.int32, device=self.device)
        last = torch.tensor([77, 0, 0, 0], device=self.device)
        state = DraftedRows(last, torch.tensor([3, 9, 9, 9], device=self.device), tables, 4)
        found = []
        for unpack in (unpack_window, unpack_window_reference):
            rows, lens = torch.zeros((2, 8), dtype=torch.int32, device=self.device)
            table = torch.zeros((4, 8), dtype=torch.int64, device=self.device)
            unpack(lines.to(self.device), drafts, state, rows, lens, table)
            found.append((rows.tolist(), lens.tolist(), table.tolist()))
        assert found[0] == found[1]
        assert found[0][0] == [3, 3, 3, 1, 1, 0, 0, -1] and found[0][1] == [8, 9, 10, 2, 3, 4, 5, 0]
        assert found[0][2][:2] == [[7, 50, 52, 0, 53, 77, 51, 0], [7, 8, 9, 1, 2, 3, 4, 0]]
        assert found[0][2][2:] == [[30, 31, 32, 33, 34, 7, 8, -1], [9, 8, 7, 6, 5, 23, 24, -1]]

    def test_tables_change_where_a_diff_says(self) -> None:
        tables = torch.zeros((3, 4), dtype=torch.int32, device=self.device)
        diffs = torch.tensor([[2, 1, 9], [-1, 0, 5], [0, 3, 4]], dtype=torch.int32, device=self.device)
        apply_table_diffs(tables, diffs)
        assert tables.tolist() == [[0, 0, 0, 4], [0, 0, 0, 0], [0, 9, 0, 0]]

    def test_rows_enter_with_how_they_are_sampled(self) -> None:
        """Each in the types of the state: what does not fit is brought as near as possible; masks go."""
        tiny = torch.finfo(torch.float32).tiny
        lines = [
            SampleLine(3, 1, 40, 2**64 - 1, 77, 2, 0.1, 0.1, 0.3, 1.2, -0.5, 0.25),
            SampleLine(-1, top_k=7, seed=7, temperature=7.0, top_p=7.0, min_p=7.0),
            SampleLine(0, top_k=2**40, seed=2**63, temperature=1e-45),
            SampleLine(4, top_k=-1, seed=-5, top_p=1e-9, min_p=1e-4),
        ]
        state = SampleState.empty(5, self.device)
        state.mask_row_R.fill_(1)
        enter_rows(state, as_tensor([line.pack() for line in lines]).to(self.device))
        assert state.line(3) == lines[0]._replace(seed=-1)
        assert state.line(0) == lines[2]._replace(top_k=2**31 - 1, seed=-(2**63), temperature=tiny)
        assert state.line(4) == lines[3]._replace(top_k=0)
        assert state.line(1) == state.line(2) == SampleLine(0)
        assert state.mask_row_R.tolist() == [-1, 1, 1, -1, -1]

    def test_sampled_tokens_are_counted_for_rows_that_ask(self) -> None:
        state = SampleState.empty(5, self.device, vocab_size=7)
        entries = [SampleLine(row, has_uses=int(row != 1)).pack() for row in range(5)]
        enter_rows(state, as_tensor(entries).to(self.device))
        state.uses_RV[3, 2], state.uses_RV[4, 6] = IN_PROMPT | 5, IS_BANNED | MAX_COUNT
        rows = torch.tensor([3, 1, -1, 0, 4, 2], dtype=torch.int32, device=self.device)
        ids = torch.tensor([2, 3, 4, NO_TOKEN, 6, 5], device=self.device)
        nothing = torch.zeros(5, dtype=torch.int64, device=self.device)
        expected = state.uses_RV.clone()
        expected[3, 2], expected[2, 5] = IN_PROMPT | 6, 1
        advance_rows(rows, ids, ids, nothing, nothing.clone())
        assert (state.uses_RV != expected).sum() == 2, "none of the host's tokens is counted"
        advance_rows(rows, ids, ids, nothing, nothing.clone(), state)
        assert torch.equal(state.uses_RV, expected)

    def test_rows_are_given_tokens_from_the_host(self) -> None:
        """Rows in 64 bits, as the host sends them, with one of padding for the sake of alignment."""
        last_token, position = torch.zeros((2, 3), dtype=torch.int64, device=self.device).unbind()
        packed = torch.tensor([[2, 0, 1, -1], [7, 8, 9, 0], [70, 80, 90, 0]], device=self.device)
        advance_rows(packed[0], packed[1], packed[2], last_token, position)
        assert (last_token.tolist(), position.tolist()) == ([8, 9, 7], [80, 90, 70])

    # blocks of the cache -------------------------------------------------------------------------------

    @every_dtype
    @pytest.mark.parametrize(
        "shape",  # L, N, P, G, H; blocks of several programs, of a small part of one, of one and a part
        [(2, 5, 16, 8, 128), (3, 4, 3, 1, 7), (1, 5, 16, 5, 112)],
        ids=str,
    )
    def test_a_block_is_copied_in_all_layers(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype
    ) -> None:
        data = self.randn(shape[0], 2, *shape[1:]).to(dtype)
        expected = data.clone()
        copies = [(1, 3), (3, 0), (2, 2), (0, 1)]  # a destination may be a later source
        for source, destination in copies:
            copy_block(data, source, destination)
            copy_block_reference(expected, source, destination)
        assert torch.equal(data, expected)
        piece = torch.zeros_like(data[:, :, :1])
        copy_block(data, 2, 0, piece)  # gathered, and scattered
        copy_block(piece, 0, 3, data)
        assert torch.equal(data[:, :, 3], data[:, :, 2])

    def test_layers_may_be_more_than_31_bits_apart(self) -> None:
        """The last value lies beyond element 2^31; on the CPU what lies between is never really allocated."""
        num_blocks = 2**30 // 128 + 1
        if self.device == "cuda" and torch.cuda.mem_get_info()[0] < 8 << 30:
            pytest.skip("needs 8 GiB of free GPU memory")
        data = torch.empty((1, 2, num_blocks, 2, 1, 64), dtype=torch.float16, device=self.device)
        data[:, :, 0] = block = self.randn(1, 2, 2, 1, 64).half()
        data[:, :, -1] = 0
        copy_block(data, 0, num_blocks - 1)
        assert torch.equal(data[:, :, -1], block) and torch.equal(data[:, :, 0], block)

    def test_an_empty_step(self) -> None:
        rows = torch.empty(0, dtype=torch.int32, device=self.device)
        state = torch.zeros(2, dtype=torch.int64, device=self.device)
        tables = torch.zeros((2, 2), dtype=torch.int32, device=self.device)
        assert gather_step(rows, state, state, tables, block_size=4).tokens_S.shape == (0,)
        advance_rows(rows, rows.long(), rows.long(), state, state)
        apply_table_diffs(tables, torch.empty((0, 3), dtype=torch.int32, device=self.device))
        enter_rows(
            SampleState.empty(2, self.device),
            torch.empty((0, NUM_FIELDS), dtype=torch.int64, device=self.device),
        )
        scratch = SampleScratch(2, 8, self.device)
        samples = SampleState.empty(1, self.device)
        logits = torch.empty((0, 8), device=self.device)
        assert sample_rows(logits, samples, rows, rows.long(), scratch).shape == (0,)
