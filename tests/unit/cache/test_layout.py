"""Which layers share a block, and how many blocks a sequence needs, against a count by hand."""

from __future__ import annotations

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import MAX_TABLES, KVLayout, blocks_of_sequence, longest_sequence
from infer.layers.stages import stage_layers


def gemma(num_layers: int, window: int = 1024) -> list[int | None]:
    """Five local layers, then a global one."""
    return [None if (layer + 1) % 6 == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("num_layers", "num_planes", "num_tables"), [(26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 10, 7)]
)
def test_every_layer_has_a_place_of_its_own(num_layers: int, num_planes: int, num_tables: int) -> None:
    windows = gemma(num_layers)
    layout = KVLayout.of(windows, 32768)
    assert (layout.num_planes, len(layout.windows)) == (num_planes, num_tables)
    assert len(set(zip(layout.tables, layout.planes, strict=True))) == num_layers
    assert [layout.windows[table] for table in layout.tables] == windows
    assert max(layout.planes) < num_planes
    assert layout.windows[0] is None, "what sees everything comes first"


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("windows", [[None] * 7, gemma(12), gemma(26)])
def test_layers_in_stages_share_tables_and_each_stage_has_its_own_planes(
    windows: list[int | None], num_stages: int
) -> None:
    stages = stage_layers(len(windows), num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(windows)))
    assert len(stages[-1]) == min(map(len, stages)) >= max(map(len, stages)) - 1
    layout = KVLayout.of(windows, 32768, stages=stages)
    assert [layout.windows[table] for table in layout.tables] == windows
    for stage in stages:
        places = {(layout.tables[layer], layout.planes[layer]) for layer in stage}
        assert len(places) == len(stage) and max(plane for _, plane in places) < layout.num_planes
    assert layout.num_layers < KVLayout.of(windows, 32768).num_layers


def test_layers_that_see_alike_have_one_table() -> None:
    assert KVLayout.of([None] * 5, 100) == KVLayout.whole(5)
    assert KVLayout.of([100] * 5, 100) == KVLayout.whole(5), "no sequence outgrows the window"
    assert KVLayout.of([99] * 5, 100).windows == (99,)
    assert KVLayout.of([99] * 5, 100).num_planes == 5


def test_there_are_no_more_tables_than_groups_need() -> None:
    layout = KVLayout.of([*range(1, 12), None], 100)
    assert len(layout.windows) == 12 > MAX_TABLES
    assert layout.num_planes == 1


@pytest.mark.parametrize("max_chunk", [1, 7, 64, None])
@pytest.mark.parametrize("window", [1, 6, 16, 33])
def test_no_chunk_of_a_sequence_needs_more_than_the_bound(window: int, max_chunk: int | None) -> None:
    size, num_tokens = 4, 150
    layout = KVLayout((None, window), (0, 1), (0, 0), 1)
    for offset in range(size):
        most, computed = 0, 0
        while computed < num_tokens:
            stop = min(
                computed + (offset if offset and not computed else max_chunk or num_tokens), num_tokens
            )
            first = max(computed - window + 1, 0) // size
            most = max(most, -(-stop // size) - first)
            computed = stop
        bound = blocks_of_sequence(layout.windows, num_tokens, size, max_chunk) - -(-num_tokens // size)
        assert most <= bound <= most + 2
    assert (
        longest_sequence(
            layout.windows, blocks_of_sequence(layout.windows, num_tokens, size, max_chunk), size, max_chunk
        )
        >= num_tokens
    )
    assert longest_sequence(layout.windows, 9, size, None) == 16


def test_a_model_of_windows_alone_has_no_longest_sequence() -> None:
    layout = KVLayout.of([16] * 3, 1000)
    assert longest_sequence(layout.windows, 9, 4, 8) > 10**9
    assert longest_sequence(layout.windows, 6, 4, 8) == 6 * 4


def test_layers_of_one_plane_lie_in_the_same_memory() -> None:
    """Blocks keep them apart: whichever table has a block, its layers write there."""
    layout = KVLayout.of([None, 4, 4, None, 4, 4], 100)
    store = KVStore(
        layout=layout, num_blocks=3, block_size=2, num_kv_heads=1, head_dim=2, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert (layout.num_planes, layout.windows, store.tables) == (2, (None, 4, 4), (0, 1, 1, 0, 2, 2))
    assert store.num_bytes == 2 * 2 * 3 * 2 * 2 * 4
    store.keys[1].fill_(7.0)
    assert torch.equal(store.keys[0], store.keys[1]) and torch.equal(store.keys[4], store.keys[1])
