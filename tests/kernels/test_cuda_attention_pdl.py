"""The CUDA kernel asks for keys and values before its wait, but for none that the kernel before it writes.

That one writes the queries and, of each row, the newest key and value. Here NaN is in their place until all
threads of a block have waited, and again when the next block begins.

    a row's tiles   | older positions | older positions | ... | older ones and the newest |
    may be read     |     at once     |     at once     |     |      after the wait       |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.kernels.attention import decode_cuda
from infer.kernels.attention.decode import attend_decode_reference
from infer.kernels.attention.decode_cuda import DECODE, attend_decode_cuda
from tests.kernels.attention_contract import Heads, assert_close, make_paged
from tests.kernels.emulated_cuda import EmulatedLaunch, make_work, plan_on_host
from tests.kernels.projected_contract import newest_slots

SMALL, LARGE = Heads(8, 2, 64), Heads(4, 2, 128)
LENS = [1, 15, 16, 17, 31, 0, 33, 64, 65, 0, 200]  # the newest is the first, the last or amid a tile; padding
EVERY_UNIT, FEW = 64, 1  # SMs: each unit is the first of a block, or a block takes several


@dataclass(frozen=True, slots=True)
class Attended:
    """What the kernel and the reference made of rows of these lengths."""

    lens: list[int]
    actual: torch.Tensor
    expected: torch.Tensor
    num_early_loads: int


@dataclass(slots=True)
class DependentLaunch:
    """Attention by the kernel in `source`, compiled to start while the kernel before still runs."""

    monkeypatch: pytest.MonkeyPatch
    source: Path = DECODE.source

    def __call__(
        self,
        lens: list[int],
        heads: Heads,
        *,
        dtype: torch.dtype = torch.bfloat16,
        block_size: int = 16,
        split_len: int = 1024,
        window: int | None = None,
        num_sms: int = EVERY_UNIT,
    ) -> Attended:
        paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device="cpu")
        rows = torch.randperm(len(lens)).int()  # not the order of the tables
        lens_S = torch.tensor(lens, dtype=torch.int32)[rows.long()]
        rows = torch.where(lens_S == 0, -1, rows)  # as the engine's padding has it
        q = torch.randn(len(lens), heads.num_heads, heads.head_dim).to(dtype)
        work = make_work(heads, max_rows=len(lens), max_len=max(lens), split_len=split_len, num_sms=num_sms)
        plan_on_host(work, rows, lens_S, window=window)
        newest = newest_slots(paged, rows, lens_S).tolist()
        written = [q, *(store[slot] for store in (paged.keys, paged.values) for slot in newest)]
        launches: list[EmulatedLaunch] = []

        def prepare(kernel: Any, defines: Any, device: int, pdl: bool) -> EmulatedLaunch:
            launches.append(EmulatedLaunch(defines, self.source, written_before=written))
            return launches[-1]

        self.monkeypatch.setattr(decode_cuda, "prepare_launch", prepare)
        actual = attend_decode_cuda(q, paged.kv(0.3, window), work)
        expected = attend_decode_reference(q, paged.kv(0.3, window), rows, lens_S)
        return Attended(lens_S.tolist(), actual, expected, launches[0].num_early_loads)

    def change(self, line: str, instead: str, folder: Path) -> None:
        """From now on, the kernel with another line in the place of this one."""
        for path in DECODE.source.parent.glob("*.cu*"):
            (folder / path.name).write_text(path.read_text())
        text = DECODE.source.read_text()
        assert text.count(line) == 1
        self.source = folder / DECODE.source.name
        self.source.write_text(text.replace(line, instead))


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> DependentLaunch:
    torch.manual_seed(0)
    monkeypatch.setattr(decode_cuda, "index_of", lambda device: 0)
    monkeypatch.setattr(decode_cuda, "launch_options", lambda device: {"PDL": True})
    return DependentLaunch(monkeypatch)


@pytest.mark.parametrize("num_sms", [EVERY_UNIT, FEW])
@pytest.mark.parametrize("split_len", [16, 48, 64, 1024])
@pytest.mark.parametrize(
    ("heads", "dtype"), [(SMALL, torch.bfloat16), (LARGE, torch.float16)], ids=["64", "128"]
)
def test_equals_the_reference_wherever_the_newest_position_is(
    heads: Heads, dtype: torch.dtype, split_len: int, num_sms: int, attend: DependentLaunch
) -> None:
    attended = attend(LENS, heads, dtype=dtype, split_len=split_len, num_sms=num_sms)
    assert_close(attended.actual, attended.expected)


@pytest.mark.parametrize("split_len", [48, 1024])
@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_a_window_ends_with_the_newest_position(window: int, split_len: int, attend: DependentLaunch) -> None:
    attended = attend(LENS, SMALL, window=window, split_len=split_len)
    assert_close(attended.actual, attended.expected)


def test_larger_blocks(attend: DependentLaunch) -> None:
    attended = attend([48, 49, 95, 96, 97, 0, 150], SMALL, block_size=48, split_len=32)
    assert_close(attended.actual, attended.expected)


@pytest.mark.parametrize(
    ("length", "split_len", "num_tiles"),
    [
        (1, 64, 0),
        (16, 64, 0),
        (17, 64, 1),
        (32, 64, 1),
        (33, 64, 2),
        (64, 64, 3),
        (65, 64, 4),
        (65, 16, 4),  # in four splits, and the newest in the fifth
        (200, 64, 12),
        (200, 1024, 4),
    ],
)
def test_all_warps_ask_ahead_for_a_tile_of_older_positions(
    length: int, split_len: int, num_tiles: int, attend: DependentLaunch
) -> None:
    """What may be read early is: a lane loads its part of a tile in 4 + 4 pieces, of each kv head's tile."""
    attended = attend([length], SMALL, split_len=split_len)
    assert attended.num_early_loads == num_tiles * SMALL.num_kv_heads * 32 * 8


BOUND = "position + TILE < item.length;"


@pytest.mark.parametrize(
    ("bound", "has_newest"),
    [
        ("position + TILE <= item.length;", lambda length: length % 16 == 0),
        ("true;", lambda length: True),
    ],
    ids=["one too many", "none"],
)
def test_a_wrong_bound_shows_in_just_the_rows_whose_newest_position_it_lets_in(
    bound: str, has_newest: Callable[[int], bool], attend: DependentLaunch, tmp_path: Path
) -> None:
    attend.change(BOUND, bound, tmp_path)
    attended = attend(LENS, SMALL, split_len=64)  # a split is one tile for each warp: all of them come first
    is_broken = [bool(row.isnan().any()) for row in attended.actual]
    assert is_broken == [length > 0 and has_newest(length) for length in attended.lens]
    assert not attended.expected.isnan().any()


@pytest.mark.parametrize(
    ("instead", "rule"),
    [
        ("", "a thread leaves that has not waited"),
        ("if (warp > 0) gdc_wait();", "some threads of a block wait, and others do not"),
    ],
)
def test_a_kernel_that_does_not_wait_is_refused(
    instead: str, rule: str, attend: DependentLaunch, tmp_path: Path
) -> None:
    attend.change("gdc_wait();", instead, tmp_path)
    with pytest.raises(AssertionError, match=rule):
        attend([33], SMALL)
