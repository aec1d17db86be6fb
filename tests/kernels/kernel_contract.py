"""What every Triton kernel promises, wherever it runs: it equals its reference.

The promises are written once, as the methods of `KernelContract`, and tested twice: under Triton's
interpreter on the CPU (`interpreted.py`) and compiled on a real GPU (`tests/gpu/test_kernels.py`).

Three traps are set for a kernel. Its inputs are views into a tensor that is NaN everywhere else, so a
read outside the view shows; its outputs start as NaN, so an element that is not written shows; and the
tensor around the inputs is compared afterwards, so a write to the wrong place shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_reference,
)
from infer.kernels.elementwise.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from infer.kernels.runtime.dispatch import use_triton
from infer.kernels.sampling.logprob_table import logprob_table

# Relative and absolute. bfloat16 keeps 8 bits, so 2^-7 is one unit in the last place; the interpreter
# cuts off what a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))

EPS = 1e-5


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Make `torch.empty` return NaN, as PyTorch does in its deterministic mode.

    The public function would import a compiler, which takes four seconds of every process.
    """
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class FramedTensor:
    """Random numbers with NaN before, between and behind the rows: `view` is what the kernel gets."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        row_len = math.prod(shape[1:])
        self.frame = torch.full((shape[0] + 2, row_len + 16), torch.nan, dtype=dtype, device=device)
        self.view = self.frame[1:-1, 8:-8].view(shape)
        self.view.copy_(torch.randn(shape, device=device))
        self.before = self.frame.clone()

    def assert_untouched(self) -> None:
        torch.testing.assert_close(self.frame, self.before, rtol=0, atol=0, equal_nan=True)


def far_apart_rows(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Three rows whose third starts at element 2^31: the offset no longer fits in 32 bits.

    Memory between the rows is never touched, so on the CPU it is never really allocated.
    """
    assert shape[0] == 3
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    strides = [2**30, *(math.prod(shape[dim + 1 :]) for dim in range(1, len(shape)))]
    memory = torch.empty(2**31 + math.prod(shape[1:]), dtype=torch.float16, device=device)
    return memory.as_strided(shape, strides).copy_(torch.randn(shape, device=device))


class KernelContract:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    def framed(self, *shape: int, dtype: torch.dtype) -> FramedTensor:
        return FramedTensor(shape, dtype, self.device)

    def weight(self, size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def test_the_kernel_and_not_the_reference_is_under_test(self) -> None:
        assert use_triton(torch.zeros(1, device=self.device))

    @every_dtype
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize(
        "shape",
        [(1, 64), (5, 123), (2, 4096), (0, 64), (3, 1), (1, 1, 64), (5, 3, 123), (7, 9, 256)],
        ids=str,
    )
    def test_rms_norm(self, shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
        x, weight = self.framed(*shape, dtype=dtype), self.weight(shape[-1], dtype)
        with nan_in_fresh_memory():
            y = rms_norm(x.view, weight, eps=EPS, offset=offset)
        assert_same(y, rms_norm_reference(x.view, weight, EPS, offset))
        x.assert_untouched()

    @every_dtype
    @pytest.mark.parametrize("shape", [(5, 123), (3, 4, 64)], ids=str)
    def test_rms_norm_in_place(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Part of a wider projection is written over, and nothing beside it."""
        width = torch.Size(shape[1:]).numel()
        wide = torch.randn(shape[0], width + 40, device=self.device, dtype=dtype)
        before, weight = wide.clone(), self.weight(shape[-1], dtype)
        part = wide[:, 8 : 8 + width].view(shape)
        assert rms_norm(part, weight, eps=EPS, out=part) is part
        expected = rms_norm_reference(before[:, 8 : 8 + width].view(shape), weight, EPS, 0.0)
        assert_same(part.contiguous(), expected)
        assert torch.equal(wide[:, :8], before[:, :8]) and torch.equal(wide[:, -32:], before[:, -32:])

    def test_rms_norm_takes_a_weight_of_another_dtype(self) -> None:
        x, weight = self.framed(3, 96, dtype=torch.bfloat16), self.weight(96, torch.float32)
        y = rms_norm(x.view, weight, eps=EPS)
        assert_same(y, rms_norm_reference(x.view, weight, EPS, 0.0))

    @every_dtype
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize("shape", [(1, 576), (5, 123), (0, 64), (2, 4096)], ids=str)
    def test_add_rms_norm(self, shape: tuple[int, int], offset: float, dtype: torch.dtype) -> None:
        x, residual = self.framed(*shape, dtype=dtype), self.framed(*shape, dtype=dtype)
        weight = self.weight(shape[-1], dtype)
        with nan_in_fresh_memory():
            y, new_residual = add_rms_norm(x.view, residual.view, weight, eps=EPS, offset=offset)
        expected_y, expected_residual = add_rms_norm_reference(x.view, residual.view, weight, EPS, offset)
        assert_same(new_residual, expected_residual)
        assert_same(y, expected_y)
        x.assert_untouched()
        residual.assert_untouched()

    @every_dtype
    @pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
    @pytest.mark.parametrize("shape", [(5, 123), (2, 4096)], ids=str)
    def test_add_rms_norm_of_parts(self, shape: tuple[int, int], num_parts: int, dtype: torch.dtype) -> None:
        """Their sum is not rounded before it is added: the result is the exact one, rounded once."""
        x = torch.randn(num_parts, *shape, device=self.device)
        residual, weight = self.framed(*shape, dtype=dtype), self.weight(shape[-1], dtype)
        with nan_in_fresh_memory():
            y, new_residual = add_rms_norm(x, residual.view, weight, eps=EPS, offset=1.0)
        if dtype == torch.float16 or self.device == "cuda":  # the interpreter rounds those
            exact = (x.double().sum(0) + residual.view.double()).to(dtype)
            torch.testing.assert_close(new_residual, exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
            assert dtype == torch.float32 or (new_residual != exact).float().mean() < 0.02
        expected_y, expected_residual = add_rms_norm_reference(x, residual.view, weight, EPS, 1.0)
        assert_same(new_residual, expected_residual)
        assert_same(y, expected_y)
        residual.assert_untouched()

    @every_dtype
    def test_add_rms_norm_of_a_mixture(self, dtype: torch.dtype) -> None:
        """Parts of the stream's type: the same bits as when their sum is stored, then added."""
        outputs = torch.randn(5, 8, 123, device=self.device).to(dtype)
        residual, weight = torch.randn(5, 123, device=self.device).to(dtype), self.weight(123, dtype)
        with nan_in_fresh_memory():
            both = add_rms_norm(outputs.transpose(0, 1), residual, weight, eps=EPS)
        total = torch.zeros(5, 123, device=self.device)
        for choice in range(8):
            total += outputs[:, choice]
        for y, expected in zip(both, add_rms_norm(total.to(dtype), residual, weight, eps=EPS), strict=True):
            assert_same(y, expected)
            if (
                dtype != torch.bfloat16 or self.device == "cuda"
            ):  # which the interpreter rounds in its own way
                assert torch.equal(y, expected)

    @every_dtype
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 123), (2, 2 * 1536), (0, 2 * 8)], ids=str)
    def test_gated_activation(self, shape: tuple[int, int], activation: str, dtype: torch.dtype) -> None:
        gate_up = self.framed(*shape, dtype=dtype)
        with nan_in_fresh_memory():
            y = gated_activation(gate_up.view, activation=activation)
        assert_same(y, gated_activation_reference(gate_up.view, activation))
        gate_up.assert_untouched()

    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's exp()
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gated_activation_is_right_far_from_zero(self, activation: str) -> None:
        gate = torch.tensor([-1e4, -200.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 200.0, 1e4], device=self.device)
        gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
        y = gated_activation(gate_up, activation=activation)
        assert_same(y, gated_activation_reference(gate_up, activation))

    def test_an_unknown_activation_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
            gated_activation(torch.zeros(1, 2, device=self.device), activation="swish")

    def test_rows_beyond_2_to_the_31_elements_are_found(self) -> None:
        x, weight = far_apart_rows((3, 64), self.device), self.weight(64)
        assert_same(rms_norm(x, weight, eps=EPS), rms_norm_reference(x, weight, EPS, 0.0))
        for actual, expected in zip(
            add_rms_norm(x, x, weight, eps=EPS), add_rms_norm_reference(x, x, weight, EPS, 0.0), strict=True
        ):
            assert_same(actual, expected)
        assert_same(gated_activation(x, activation="silu"), gated_activation_reference(x, "silu"))

    def test_heads_beyond_2_to_the_31_elements_are_found(self) -> None:
        q = far_apart_rows((3, 2, 32), self.device)
        weight = self.weight(32)
        assert_same(rms_norm(q, weight, eps=EPS), rms_norm_reference(q, weight, EPS, 0.0))

    @every_dtype
    @pytest.mark.parametrize(("vocab_size", "width"), [(3, 20), (97, 0), (4096, 1), (9000, 20), (12_289, 40)])
    def test_logprob_table(self, vocab_size: int, width: int, dtype: torch.dtype) -> None:
        logits = self.framed(5, vocab_size, dtype=dtype)
        logits.view[1, : vocab_size // 2] = -torch.inf  # forbidden, with whole tiles of it
        logits.before.copy_(logits.frame)
        chosen = [vocab_size - 1, vocab_size - 1, 0, -1, int(logits.view[4].argmax())]
        places = [4, 0, 1, 3]
        with nan_in_fresh_memory():
            table = logprob_table(
                logits.view, torch.tensor(chosen, device=self.device), width,
                torch.tensor(places, device=self.device),
            ).cpu()  # fmt: skip
        logits.assert_untouched()
        num_top = min(width, vocab_size)
        assert table.shape == (len(places), 2 + 2 * num_top)
        rows = logits.view[places].double().cpu()
        logprobs = torch.log_softmax(rows, dim=-1)
        own = torch.tensor([max(chosen[place], 0) for place in places]).unsqueeze(1)
        fractions = table.view(torch.float32).double()
        torch.testing.assert_close(fractions[:, :1], logprobs.gather(1, own), rtol=1e-5, atol=1e-5)
        assert table[:, 1].tolist() == (1 + (rows > rows.gather(1, own)).sum(dim=1)).tolist()
        ids, top = table[:, 2 : 2 + num_top].long(), fractions[:, 2 + num_top :]
        torch.testing.assert_close(top, logprobs.topk(num_top, dim=-1).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(top, logprobs.gather(1, ids), rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == num_top for row in ids.tolist())
        if num_top:  # a greedy token is the first of equal ones, and its logprob the same to the bit
            assert ids[0, 0] == chosen[4] and table[0, 0] == table[0, 2 + num_top]

    def test_logprob_table_of_all_rows(self) -> None:
        logits = self.framed(3, 500, dtype=torch.float32)
        chosen = torch.tensor([1, 2, 3], device=self.device)
        places = torch.arange(3, device=self.device)
        table = logprob_table(logits.view, chosen, 5)
        torch.testing.assert_close(table, logprob_table(logits.view, chosen, 5, places), rtol=0, atol=0)
        assert logprob_table(logits.view[:0], chosen[:0], 5).shape == (0, 12)

    @every_dtype
    def test_logprob_table_of_equal_logits_has_the_smallest_ids(self, dtype: torch.dtype) -> None:
        logits = torch.zeros((1, 5000), dtype=dtype, device=self.device)
        logits[0, [0, 5, 4999]] = -0.0
        chosen = torch.tensor([4999], device=self.device)
        table = logprob_table(logits, chosen, 20)
        assert table[0, 1] == 1 and table[0, 2:22].tolist() == list(range(20))
        logits[0, [2100, 4000]] = 1.0
        table = logprob_table(logits, chosen, 20)
        assert table[0, 1] == 3 and table[0, 2:22].tolist() == [2100, 4000, *range(18)]

    def test_logprob_table_of_a_beam_search_with_many_stop_ids(self) -> None:
        logits = torch.randn((2, 5000), device=self.device)
        table = logprob_table(logits, torch.tensor([7, 8], device=self.device), 1100)
        found = logits.gather(
            1, table[:, 2:1102].long()
        )  # of two that are almost equal either may come first
        torch.testing.assert_close(found, logits.topk(1100, dim=-1).values)
