"""The store moves blocks where it is told to, in every layer, keys and values alike, and in order."""

from __future__ import annotations

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout, TransferKind
from tests.support.kv_store import fill_store

NUM_LAYERS, BLOCK_SIZE = 3, 2


def make_store(kept_as: torch.dtype | None = None) -> KVStore:
    """Every block holds numbers of its own: 100 * layer + block for keys, the negative for values."""
    store = KVStore(
        layout=KVLayout.whole(NUM_LAYERS), num_blocks=4, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=4,
        dtype=torch.float32, device=torch.device("cpu"), num_host_blocks=2, kept_as=kept_as,
    )  # fmt: skip
    fill_store(store, float("nan"))
    for layer in range(NUM_LAYERS if kept_as is None else 0):
        for slot in range(4 * BLOCK_SIZE):
            store.keys[layer][slot] = 100 * layer + slot // BLOCK_SIZE
            store.values[layer][slot] = -(100 * layer + slot // BLOCK_SIZE)
    return store


def blocks_in(store: KVStore) -> list[int]:
    """Which block's numbers each block holds now; all layers must agree."""
    seen = []
    for layer in range(NUM_LAYERS):
        keys, values = (side[layer].view(4, -1) for side in (store.keys, store.values))
        assert torch.equal(keys, -values) and torch.equal(keys, keys[:, :1].expand_as(keys))
        seen.append([int(number) - 100 * layer for number in keys[:, 0]])
    assert seen == [seen[0]] * NUM_LAYERS
    return seen[0]


def test_a_copied_block_is_the_same_in_every_layer() -> None:
    store = make_store()
    store.transfer([(TransferKind.COPY, 1, 3)])
    assert blocks_in(store) == [0, 1, 2, 1]


def test_moves_happen_in_order() -> None:
    store = make_store()
    store.transfer(
        [
            (TransferKind.COPY, 1, 3),
            (TransferKind.COPY, 3, 0),
            (TransferKind.SWAP_OUT, 2, 1),
            (TransferKind.COPY, 0, 2),
            (TransferKind.SWAP_IN, 1, 1),
            (TransferKind.COPY, 1, 0),
        ]
    )
    assert blocks_in(store) == [2, 2, 1, 1]


@pytest.mark.parametrize("kept_as", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_block_of_codes_moves_with_its_scales(kept_as: torch.dtype) -> None:
    store = make_store(kept_as)
    plain = make_store()
    assert store.num_bytes == plain.num_bytes * (4 + 4) // (4 * 4)  # 4 codes and a scale for 4 floats
    for layer, scales in enumerate(store.scales):
        assert scales is not None
        for side in scales:
            side.copy_(torch.arange(4.0)[:, None, None] + layer)
        for codes in (store.keys[layer], store.values[layer]):
            codes.view(torch.uint8).copy_(torch.arange(4).repeat_interleave(BLOCK_SIZE)[:, None, None])
    store.transfer(
        [
            (TransferKind.COPY, 1, 3),
            (TransferKind.SWAP_OUT, 2, 1),
            (TransferKind.COPY, 3, 2),
            (TransferKind.SWAP_IN, 1, 0),
        ]
    )
    for layer, scales in enumerate(store.scales):
        assert scales is not None
        for side in scales:
            assert (side[:, 0, 0] - layer).tolist() == [2, 1, 1, 1]
        for codes in (store.keys[layer], store.values[layer]):
            assert codes.view(torch.uint8)[::BLOCK_SIZE, 0, 0].tolist() == [2, 1, 1, 1]
    fill_store(store, float("nan"))
    assert all(scales is not None and scales.keys.isnan().all() for scales in store.scales)
