"""The linear of warpgroups, emulated: its barriers, its index maps, what follows the product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.elementwise.rms_norm import add_rms_norm_reference
from infer.kernels.linear import cuda as linear_cuda
from infer.kernels.linear import wgmma as linear_wgmma
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig
from infer.kernels.runtime import tensor_map
from tests.kernels.emulated_wgmma import EmulatedLaunch, encode_tiled
from tests.kernels.kernel_contract import nan_in_fresh_memory
from tests.kernels.linear_contract import EPS, assert_near, gate

ONE_BLOCK = WgmmaConfig(16, 64, stages=2)
TWO_BLOCKS = WgmmaConfig(32, 128, stages=2, split=2, blocks=2)
THREE_BLOCKS = WgmmaConfig(96, 64, stages=3, split=3)
FOUR_BLOCKS = WgmmaConfig(48, 64, stages=3, split=4)  # 12 tokens each, a number that divides no warp
WIDE = WgmmaConfig(128, 192, stages=4)  # so many rows and tokens that no register holds the residual

LONG = 968  # sixteen chunks, the last of them cut: more than stages
SHORT = 136  # three chunks: fewer


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(linear_cuda, "load_variant", EmulatedLaunch)
    monkeypatch.setattr(tensor_map, "encoder", lambda: encode_tiled)
    linear_wgmma._kernel.cache_clear()
    with nan_in_fresh_memory():
        yield
    linear_wgmma._kernel.cache_clear()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).bfloat16()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@pytest.mark.parametrize(
    ("config", "num_tokens", "K"),
    [
        (ONE_BLOCK, 9, LONG),
        (ONE_BLOCK, 16, SHORT),
        (ONE_BLOCK, 1, 8),
        (TWO_BLOCKS, 31, LONG),
        (TWO_BLOCKS, 17, SHORT),
        (FOUR_BLOCKS, 33, LONG),
        (FOUR_BLOCKS, 48, SHORT),  # three chunks for four blocks
    ],
)
def test_each_product_finds_its_place(config: WgmmaConfig, num_tokens: int, K: int) -> None:
    """Small integers: exact in any order, so that a wrong index shows in every bit."""
    N = config.rows + 8  # a tile, and one that is cut
    x, w = integers(num_tokens, K + 40)[:, :K], integers(N, K)
    bias = integers(N) if config is TWO_BLOCKS else None
    expected = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    assert torch.equal(launch(config, x, w, bias_N=bias), expected.bfloat16())


@pytest.mark.parametrize(
    ("config", "activation", "dtype"),
    [
        (ONE_BLOCK, "silu", torch.bfloat16),
        (TWO_BLOCKS, "gelu_tanh", torch.float16),
        (WgmmaConfig(96, 192, 2), "gelu", torch.bfloat16),
    ],
)
def test_the_gate(config: WgmmaConfig, activation: str, dtype: torch.dtype) -> None:
    """A tile that is cut has rows of `up` in the place of the gate's; none of them may be seen."""
    num_tokens, N = config.width - 1, config.rows // 2 + 8
    x, w = random(num_tokens, LONG, dtype=dtype), random(2 * N, LONG, dtype=dtype, scale=0.05)
    expected = gate(F.linear(x.double(), w.double()), activation)
    assert_near(launch(config, x, w, activation=activation), expected)


def add(
    config: WgmmaConfig, num_tokens: int, D: int, K: int, *, offset: float = 1.0
) -> tuple[ResidualSum, torch.Tensor]:
    """Into a stream whose rows lie apart; what `ResidualSum` holds is the reference's to the bit."""
    x, w, gain = integers(num_tokens, K), integers(D, K), random(D)
    residual = random(num_tokens, 2 * D)[:, :D]
    added = launch_add(config, ResidualInput(residual, gain, offset), x, w)
    total = (F.linear(x.float(), w.float()) + residual.float()).bfloat16()
    assert torch.equal(added.sum_MN, total)
    assert torch.equal(added.scaled_MN, (total.float() * (gain.float() + offset)).bfloat16())
    assert added.squares_PM.shape == (-(-D // config.rows), num_tokens)
    for part, first in zip(added.squares_PM, range(0, D, config.rows), strict=True):
        columns = total[:, first : first + config.rows].double()
        assert torch.allclose(part, columns.square().sum(1), rtol=1e-6)
    normed, _ = add_rms_norm_reference(
        total.double(), torch.zeros_like(total).double(), gain.double(), EPS, offset
    )
    return added, normed


@pytest.mark.parametrize(
    ("config", "num_tokens", "K"),
    [(ONE_BLOCK, 9, SHORT), (THREE_BLOCKS, 95, LONG), (WIDE, 100, SHORT)],
)
def test_the_sum_its_scaled_form_and_its_squares(config: WgmmaConfig, num_tokens: int, K: int) -> None:
    add(config, num_tokens, config.rows + 40, K)


@pytest.mark.parametrize(
    ("config", "num_tokens", "activation"),
    [
        (ONE_BLOCK, 9, ""),
        (FOUR_BLOCKS, 33, "silu"),
        (WgmmaConfig(128, 64, 2, split=3), 127, ""),
    ],
)
def test_what_is_left_of_the_norm(config: WgmmaConfig, num_tokens: int, activation: str) -> None:
    """Of few parts and of more than the helpers take at a time."""
    D = 296
    w, bias = random(2 * 40 if activation else 72, D, scale=0.05), None if activation else random(72)
    added, normed = add(WIDE, num_tokens, D, SHORT)
    expected = F.linear(normed, w.double(), None if bias is None else bias.double())
    expected = gate(expected, activation) if activation else expected
    many = torch.rand(100, num_tokens).double()
    many *= added.squares_PM.sum(0) / many.sum(0)
    for squares_PM in (added.squares_PM, many):
        y = launch_of_sum(
            config, added._replace(squares_PM=squares_PM), w, eps=EPS, bias_N=bias, activation=activation
        )
        assert_near(y, expected)


def test_what_the_kernel_would_misread_is_refused() -> None:
    w = integers(64, 64)
    with pytest.raises(AssertionError, match="17 tokens with .*width=16"):
        launch(ONE_BLOCK, integers(17, 64), w)
    with pytest.raises(AssertionError, match=r"\(1, 16\)"):
        launch(ONE_BLOCK, integers(64, 16).T, w)
    with pytest.raises(AssertionError, match="float16"):
        launch(ONE_BLOCK, integers(16, 64).half(), w)


BROKEN = {
    "wait_until(&shared.full[i % STAGES], i / STAGES & 1);": ("", "multiplied before its bytes have come"),
    "wait_for_products<1>();": ("wait_for_products<2>();", "overwritten that is still to be read"),
    "meet(1, 32 * WARPS);": ("", "written over before it was read"),
    "    if (!EARLY || warp >= WARPS) wait_for_kernel_before();": ("", "tokens are copied before the wait"),
    "        meet_in_cluster();": (
        "        { arrive_in_cluster(); wait_for_cluster(); }", "read before the cluster has met",
    ),
    "        arrive_in_cluster();\n        wait_for_cluster();\n    }\n}": ("    }\n}", "a block has left"),
}  # fmt: skip


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: BROKEN[line][1])
def test_the_emulator_sees_what_a_gpu_would_only_sometimes_show(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel without one of its waits: on a GPU that may go well for a long time."""
    instead, rule = BROKEN[line]
    for path in linear_wgmma.SOURCE.parent.glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    source = tmp_path / linear_wgmma.SOURCE.name
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, instead))

    monkeypatch.setattr(linear_wgmma, "SOURCE", source)
    with pytest.raises(AssertionError, match=rule):
        launch(WgmmaConfig(16, 64, stages=2, split=2), integers(16, LONG), integers(64, LONG))
