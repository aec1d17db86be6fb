"""Keys and values in 8 bits: what is written, what is read back, and attention over it on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.kernels.cpu import operations
from infer.kernels.elementwise.heads import CacheSlots, write_slots_reference
from infer.kernels.elementwise.kv_codes import LARGEST, KVScales, encode_reference, read_slots
from tests.kernels.c_builds import BUILDS, c_library
from tests.kernels.test_c_attention import attend_exactly

DTYPES = tuple(LARGEST)
BLOCK = 4


def empty_cache(num_slots: int, G: int, H: int, dtype: torch.dtype) -> CacheSlots:
    """Codes and scales that are not a number wherever nothing was written."""
    keys, values = (
        torch.full((num_slots, G, H), 0x7F, dtype=torch.uint8).view(dtype) for _ in ("keys", "values")
    )
    scales = KVScales(*torch.full((2, num_slots // BLOCK, G, BLOCK), torch.nan))
    return CacheSlots(keys, values, torch.empty(0, dtype=torch.int64), scales=scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * torch.logspace(-8, 4, 50)[:, None, None]
    codes, scales = encode_reference(x, dtype)
    back = codes.float() * scales[..., None]
    largest = x.abs().amax(-1, keepdim=True)
    if dtype is torch.int8:
        half_step = (largest / 254).expand_as(x)
    else:  # 3 bits of mantissa; below the smallest normal number, 2^-6, steps are 2^-9
        power = torch.floor(torch.log2((x / scales[..., None]).abs())).clamp(min=-6)
        half_step = torch.exp2(power - 4) * scales[..., None]
    assert ((back - x).abs() <= half_step * (1 + 1e-5)).all()
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_of_zeros_is_zeros_and_not_a_number_stays_so(dtype: torch.dtype) -> None:
    codes, scales = encode_reference(torch.tensor([[[0.0, 0.0]], [[1.0, torch.nan]]]), dtype)
    back = codes.float() * scales[..., None]
    assert torch.equal(back[0], torch.zeros(1, 2)) and back[1].isnan().all()


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-36, 9e-31, 2e-30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_too_small_for_a_scale_is_zeros(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([[[largest, -largest / 2]]])
    codes, scales = encode_reference(x, dtype)
    back = codes.float() * scales[..., None]
    torch.testing.assert_close(back, x if largest > 1e-30 else 0 * x, rtol=0.01, atol=0)
    assert (scales == 0).all() == (largest < 1e-30)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c_writes_the_codes_and_scales_of_the_reference(build: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    T, G, H, num_slots = 40, 3, 80, 64
    x = torch.randn(2, T, G, H) * torch.logspace(-6, 4, T)[:, None, None]
    x[0, 3], x[1, 4, 1] = 0.0, torch.tensor([1.0, *[2.0**-9 * i / 4 for i in range(79)]])  # ties, tiny codes
    x[0, 5, 0] *= 1e-36
    x[1, 6, 1] *= 1e-42
    slots = torch.randperm(num_slots)[:T].where(torch.arange(T) != 7, -1)
    expected, actual = (empty_cache(num_slots, G, H, dtype)._replace(slots_T=slots) for _ in range(2))
    write_slots_reference(x[0], x[1], expected)
    keys, values, _, _, scales, _ = actual
    operations.write_cache(c_library(build), x[0], x[1], keys, values, slots, scales)
    for ours, theirs in ((keys, expected.keys_PGH), (values, expected.values_PGH)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert scales is not None and expected.scales is not None
    for ours, theirs in zip(scales, expected.scales, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


FIXED = torch.tensor([[0.002, 0.01, 0.5], [0.01, 0.003, 1.7]])


def test_a_fixed_scale_is_that_of_every_token_and_what_is_beyond_it_is_cut_off() -> None:
    """The arithmetic of engines with one scale for a layer: x / scale, clamped to 448, to e4m3."""
    x = torch.randn(30, 3, 64)
    codes, scales = encode_reference(x, torch.float8_e4m3fn, FIXED[0])
    expected = torch.stack(
        [(x[:, g] / FIXED[0, g]).clamp(-448, 448).to(torch.float8_e4m3fn) for g in range(3)], 1
    )
    is_same = codes.view(torch.uint8) == expected.view(torch.uint8)
    assert is_same.float().mean() > 0.9999  # a product with the inverse may fall on the other side of a tie
    assert torch.equal(scales, FIXED[0].expand(30, 3))
    assert (codes[:, 0].float().abs() == 448).any() and codes[:, 2].float().abs().max() < 10


def test_a_fixed_scale_does_not_hide_what_is_not_a_number() -> None:
    x = torch.tensor([[[1.0, torch.nan]], [[torch.inf, 0.0]], [[1.0, 2.0]]])
    _, scales = encode_reference(x, torch.float8_e4m3fn, FIXED[0, :1])
    assert scales[:2].isnan().all() and scales[2] == FIXED[0, 0]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("fixed", [None, FIXED], ids=["its own scales", "fixed scales"])
def test_c_writes_codes_of_fixed_scales_and_hides_no_nan(build: str, fixed: torch.Tensor | None) -> None:
    x = torch.randn(2, 40, 3, 80) * torch.logspace(-6, 2, 40)[:, None, None]
    x[0, 3, 1, 5], x[1, 4, 2, 7] = torch.nan, -torch.inf
    slots = torch.randperm(64)[:40].where(torch.arange(40) != 7, -1)
    blank = [empty_cache(64, 3, 80, torch.float8_e4m3fn) for _ in range(2)]
    expected, actual = (cache._replace(slots_T=slots, fixed=fixed) for cache in blank)
    write_slots_reference(x[0], x[1], expected)
    keys, values, _, _, scales, _ = actual
    operations.write_cache(c_library(build), x[0], x[1], keys, values, slots, scales, fixed)
    assert scales is not None and expected.scales is not None
    pairs = ((keys, expected.keys_PGH), (values, expected.values_PGH))
    for ours, theirs, (codes, expected_codes) in zip(scales, expected.scales, pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        is_finite = ours.isfinite().transpose(1, 2).flatten(0, 1)  # codes of the others say nothing
        assert torch.equal(codes.view(torch.uint8)[is_finite], expected_codes.view(torch.uint8)[is_finite])


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(20, None), (64, 5), (80, 40), (256, None)])
def test_attention_in_c_is_that_over_the_decoded_cache(
    build: str, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    length, count, G = 53, 21, 2
    cache = empty_cache(80, G, head_dim, dtype)
    table = torch.randperm(20)
    positions = torch.arange(length)
    slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
    cache = cache._replace(slots_T=slots)
    k, v = torch.randn(2, length, G, head_dim)
    write_slots_reference(k, v, cache)
    assert cache.scales is not None
    q = torch.randn(count, 6, head_dim)
    items = torch.tensor([(f, min(16, count - f), 0, length - count + f, -1, 0) for f in range(0, count, 16)])
    ours = operations.attend(
        c_library(build), q, cache.keys_PGH, cache.values_PGH, table[None], items,
        block_size=BLOCK, scale=0.3, window=window, scales=cache.scales,
    )  # fmt: skip
    keys, values = (
        read_slots(kept, scales, slots, torch.float32)
        for kept, scales in zip(cache[:2], cache.scales, strict=True)
    )
    expected = attend_exactly(q, keys, values, scale=0.3, window=window)
    torch.testing.assert_close(ours, expected, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("kept_as", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_gathered_is_rounded_once_and_has_no_copy_in_float32(
    kept_as: torch.dtype, dtype: torch.dtype
) -> None:
    """The plan counts an element in the dtype of the model and its code, and no more."""

    class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
        most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            for part in result if isinstance(result, list | tuple) else [result]:
                if part.dtype is not torch.int64 and part.numel() * part.element_size() > self.most:
                    self.most = part.numel() * part.element_size()
            return result

    torch.manual_seed(0)
    cache = empty_cache(80, 4, 64, kept_as)
    assert cache.scales is not None
    write_slots_reference(
        torch.randn(80, 4, 64), torch.randn(80, 4, 64), cache._replace(slots_T=torch.arange(80))
    )
    slots = torch.randint(80, (3, 20))
    with Allocated() as allocated:  # type: ignore[no-untyped-call]
        numbers = read_slots(cache.keys_PGH, cache.scales.keys, slots, dtype)
    assert allocated.most <= max(3 * 20 * 4 * 64 * dtype.itemsize, cache.keys_PGH.numel())
    codes = cache.keys_PGH.float()[slots]
    scales = cache.scales.keys[slots // BLOCK, :, slots % BLOCK][..., None]
    assert torch.equal(numbers, (codes * scales).to(dtype))
