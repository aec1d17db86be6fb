"""How the linear of warpgroups cuts matrices: what the rule chooses fits, covers all and comes to an end."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch

from infer.errors import DeviceLost
from infer.kernels.linear.coded import CodedForm
from infer.kernels.linear.wgmma import MAX_TOKENS, WgmmaConfig, choose_coded, choose_config
from infer.kernels.runtime import tensor_map
from infer.kernels.runtime.tensor_map import Boxes, TensorMap
from tests.kernels.emulated_wgmma import INVALID_VALUE, encode_tiled

NUM_SMS, SHARED_BYTES, BLOCK_BYTES = (
    132,
    227 << 10,
    1 << 10,
)  # of a multiprocessor; taken from it by each block
RUN_AT_ONCE = {2: 132, 3: 126, 4: 120, 8: 120}  # blocks in clusters of so many, as the driver counts them
TOKENS = [1, 2, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 96, 97, 127, 128]
OUTPUTS = [
    8,
    64,
    72,
    576,
    1024,
    1152,
    2048,
    3072,
    4096,
    6144,
    8192,
    8456,
    12288,
    14336,
    25352,
    128256,
    151936,
]
INPUTS = [8, 64, 136, 512, 576, 1024, 2048, 3072, 4096, 6912, 8192, 12288, 14336, 29568]
SHAPES = list(itertools.product(OUTPUTS, INPUTS, [False, True]))


def chosen(M: int, N: int, K: int, *, gated: bool) -> WgmmaConfig:
    config = choose_config(M, N, K, gated=gated)
    assert config is not None
    return config


def chunks_of_blocks(config: WgmmaConfig, K: int) -> list[int]:
    """How many times 64 columns each block of a cluster multiplies, as the kernel divides them."""
    num_chunks = -(-K // 64)
    ends = [num_chunks * s // config.split for s in range(config.split + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def struct_bytes(config: WgmmaConfig) -> int:
    """Of what lies in shared memory, member by member, from an address that is a multiple of 16 alone."""
    stage = 128 * config.rows + 128 * config.width
    sums = 4 * config.width * (config.rows + 4)
    union = -(-max(config.stages * stage, sums) // 1024) * 1024
    two_barriers, squares = 2 * 8 * config.stages, 8 * 3 * -(-config.width // config.split)
    return 1024 - 16 + union + two_barriers + squares


@pytest.mark.parametrize("M", TOKENS)
def test_what_is_chosen_fits_a_multiprocessor(M: int) -> None:
    for N, K, gated in SHAPES:
        config = chosen(M, N, K, gated=gated)
        assert struct_bytes(config) <= config.shared_bytes, config
        assert config.blocks * (config.shared_bytes + BLOCK_BYTES) <= SHARED_BYTES, config
        assert (
            config.num_threads == 32 * (config.rows // 16 + 4) and config.blocks * config.num_threads <= 2048
        )
        assert M <= config.width <= MAX_TOKENS and config.width - M < max(16, config.width / 2), config


@pytest.mark.parametrize("M", TOKENS)
def test_what_is_chosen_covers_the_matrix(M: int) -> None:
    for N, K, gated in SHAPES:
        config = chosen(M, N, K, gated=gated)
        tiles, box = config.num_tiles(N, gated=gated), config.box_rows(gated=gated)
        assert (tiles - 1) * box < N <= tiles * box, config
        assert (
            config.rows % 64 == 0 and box % 8 == 0 and box <= 256
        )  # warpgroups, patterns, a box of the engine
        assert config.num_parts(N) == -(-N // config.rows)
        assert config.num_blocks(M, N, gated=gated) == tiles * config.split


@pytest.mark.parametrize("M", TOKENS)
def test_every_block_has_work_and_a_stage_to_wait_for(M: int) -> None:
    """A stage is given back one chunk later: who has one stage alone must not need it a second time."""
    for N, K, gated in SHAPES:
        config = chosen(M, N, K, gated=gated)
        chunks = chunks_of_blocks(config, K)
        assert sum(chunks) * 64 >= K and min(chunks) >= (1 if config.split == 1 else 4), config
        assert 1 <= config.stages <= max(chunks), config
        assert config.stages >= min(max(chunks), 4), config


@pytest.mark.parametrize("M", [16, 64, 128])
def test_blocks_that_meet_run_at_the_same_time(M: int) -> None:
    for N, K, gated in SHAPES:
        config = chosen(M, N, K, gated=gated)
        num_blocks = config.num_tiles(N, gated=gated) * config.split
        assert config.split == 1 or num_blocks <= RUN_AT_ONCE[config.split], config


@pytest.mark.parametrize("M", [2, 16, 64])
def test_what_the_rule_is_for(M: int) -> None:
    """As the module says it: of layers of a small model and a large one, and of a head."""

    def num_blocks(N: int, K: int, *, gated: bool = False) -> int:
        config = chosen(M, N, K, gated=gated)
        return config.num_tiles(N, gated=gated) * config.split

    small = [(4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False)]
    assert all(NUM_SMS // 3 < num_blocks(N, K, gated=gated) < 0.86 * NUM_SMS for N, K, gated in small)
    assert 0.9 * NUM_SMS < num_blocks(4096, 12288) <= NUM_SMS  # long rows
    assert 0.9 * NUM_SMS < num_blocks(12288, 4096, gated=True) <= NUM_SMS  # many rows, in one round
    head = chosen(M, 151936, 1024, gated=False)
    assert head.split == 1 and head.blocks > 1


@pytest.mark.parametrize(
    ("M", "N", "K"), [(0, 64, 64), (MAX_TOKENS + 1, 64, 64), (16, 60, 64), (16, 64, 68), (16, 4, 64)]
)
def test_what_is_refused(M: int, N: int, K: int) -> None:
    assert choose_config(M, N, K, gated=False) is None and choose_config(M, N, K, gated=True) is None
    assert choose_config(MAX_TOKENS, 64, 64, gated=False) is not None


# -- what TMA is told --------------------------------------------------------------------

BOXES = Boxes(1 << 40, torch.bfloat16, 33, 968, 2 * 1008, 48)


def test_the_driver_is_told_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def encode(to: Any, *arguments: Any) -> int:
        assert to.value % 64 == 0
        ctypes.memset(to.value, 7, 128)
        told.append(arguments)
        return 0

    monkeypatch.setattr(tensor_map, "encoder", lambda: encode)
    argument = TensorMap()
    assert ctypes.sizeof(argument) == 128
    for boxes, dtype in ((BOXES, 9), (BOXES._replace(dtype=torch.float16), 6)):
        argument.value = boxes
        number, rank, address, sizes, strides, box, steps, *how = told.pop()
        assert (number, rank, address.value) == (dtype, 2, 1 << 40)
        assert [list(array) for array in (sizes, strides, box, steps)] == [
            [968, 33],
            [2016],
            [64, 48],
            [1, 1],
        ]
        assert how == [
            0,
            3,
            3,
            0,
        ]  # not interleaved, the pattern of 128 bytes, 256 bytes to L2, zeros outside
    assert bytes(argument) == bytes([7]) * 128


ODD_ADDRESS, ODD_ROWS = BOXES._replace(address=(1 << 40) + 8), BOXES._replace(row_bytes=2 * 1004)


@pytest.mark.parametrize("odd_one", [ODD_ADDRESS, ODD_ROWS, BOXES._replace(box_rows=264)], ids=str)
def test_a_matrix_that_the_driver_refuses(odd_one: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor map that was there before stays as it was."""
    monkeypatch.setattr(tensor_map, "encoder", lambda: encode_tiled)
    argument = TensorMap()
    argument.value = BOXES
    before = bytes(argument)
    with pytest.raises(DeviceLost, match=f"as a tensor map: error {INVALID_VALUE}"):
        argument.value = odd_one
    assert bytes(argument) == before


@pytest.mark.parametrize(
    "form", [CodedForm("int8"), CodedForm("int4", 32), CodedForm("int4", 32, True)], ids=str
)
@pytest.mark.parametrize("M", [65, 129, 192, 193, 300, 512])
def test_more_tokens_than_a_block_multiplies_have_several(form: CodedForm, M: int) -> None:
    for N, K, gated in SHAPES:
        if K % 64 or (gated and N % 32):
            continue
        config = choose_coded(M, N, K, form, gated=gated)
        assert config is not None
        if not config.many:
            assert config.width >= M
            continue
        tiles = config.num_tiles(N, gated=gated)
        assert config.num_blocks(M, N, gated=gated) == tiles * config.split * -(-M // config.width)
        assert (
            config.shared_bytes + BLOCK_BYTES <= SHARED_BYTES
            and config.stages >= 3
            and config.rounds == (form.group > 0)
        )
    assert choose_coded(513, 4096, 4096, form, gated=False) is None


@pytest.mark.parametrize(
    "form", [CodedForm("fp8"), CodedForm("int4", 128), CodedForm("int4", 32, True)], ids=str
)
@pytest.mark.parametrize("M", [8, 16, 32, 48, 64])
def test_teams_have_work_and_come_to_an_end(form: CodedForm, M: int) -> None:
    """A team gives a stage back with its next one: another must have come until then."""
    for N, K, gated in SHAPES:
        if K % 64 or (gated and N % 32):
            continue
        config = choose_coded(M, N, K, form, gated=gated)
        assert config is not None
        num_stages = -(-K // config.columns // config.split)
        assert config.teams <= num_stages, config
        assert config.teams < config.stages or config.stages >= num_stages, config
        assert config.blocks * config.num_threads <= 2048, config
        assert config.blocks * (config.shared_bytes + BLOCK_BYTES) <= SHARED_BYTES, config
        if config.teams > 1:
            assert M > 16 and not form.has_minima and config.blocks == 1, config
            assert config.num_blocks(M, N, gated=gated) <= NUM_SMS, config


@pytest.mark.parametrize("form", [CodedForm("fp8"), CodedForm("int8", 32), CodedForm("int4", 32)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 128])
def test_coded_weights_have_a_cut_where_x_is_whole_boxes(
    form: CodedForm, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 288 or 1,376 columns are left to another kernel: their tensor map cannot be made."""
    monkeypatch.setattr(tensor_map, "encoder", lambda: lambda *_: 0)
    for K in (8, 40, 64, 288, 576, 768, 1376, 1408, 4096):
        config = choose_coded(num_tokens, 768, K, form, gated=False)
        assert (config is not None) == (K % 64 == 0), K
        if config is not None:
            num_boxes = config.columns // tensor_map.BOX_COLUMNS
            TensorMap().value = Boxes(1 << 40, torch.bfloat16, num_tokens, K, K * 2, config.width, num_boxes)
