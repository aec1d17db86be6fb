from __future__ import annotations

from dataclasses import replace

import pytest

from infer.cache.memory import (
    CacheSize,
    LayerSizes,
    activation_bytes,
    format_bytes,
    kv_bytes_per_token,
    size_cache,
    workspace_share,
)
from infer.config import CacheConfig, SchedulerConfig
from infer.errors import ConfigError

SIZES = LayerSizes(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
)


def size(cache: CacheConfig, *, free_bytes: int = 0, max_seq_len: int = 100) -> CacheSize:
    scheduler = SchedulerConfig(max_batch_size=4)
    return size_cache(cache, scheduler, max_seq_len=max_seq_len, bytes_per_token=10, free_bytes=free_bytes)


def test_keys_and_values_of_all_layers_are_counted() -> None:
    assert kv_bytes_per_token(30, 3, 64, 4) == 46080  # SmolLM2-135M: 45 KiB
    assert kv_bytes_per_token(32, 8, 128, 2) == 128 << 10  # Llama 3.1 8B


def test_the_cache_is_as_told_or_as_fits_and_never_more_than_can_be_used() -> None:
    assert size(CacheConfig(num_blocks=7)) == CacheSize(7, 16, 10)
    assert size(CacheConfig(), free_bytes=16 * 10 * 5 + 9) == CacheSize(5, 16, 10)
    assert size(CacheConfig(kv_cache_memory="1KiB"), free_bytes=10**9) == CacheSize(6, 16, 10)
    assert size(CacheConfig(), free_bytes=10**9) == CacheSize(4 * 7, 16, 10)  # 4 sequences of 7 blocks


def test_a_contiguous_cache_is_counted_in_whole_sequences() -> None:
    cache = CacheConfig(kv_cache_backend="contiguous")
    assert size(cache, free_bytes=2999) == CacheSize(2, 100, 10)
    assert size(cache, free_bytes=10**9) == CacheSize(4, 100, 10)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("paged", "the KV cache gets 150 B, but one block of 16 tokens takes 160 B; give it more with"),
        ("contiguous", "the KV cache gets 150 B, but one sequence of max_seq_len 100 takes 1000 B;"),
    ],
)
def test_a_cache_without_room_says_what_it_gets_and_what_it_takes(backend: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(CacheConfig(kv_cache_backend=backend), free_bytes=159)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("'infer plan' shows what fits")


def test_activations_grow_with_the_step_or_with_the_rows_that_sample() -> None:
    """The first figure was measured: 125 MiB for 2048 tokens of SmolLM2-135M in float32."""

    def mebibytes(sizes: LayerSizes = SIZES, **step: int) -> float:
        given = {"num_tokens": 2048, "num_rows": 8, "bytes_per_element": 4} | step
        return activation_bytes(sizes, **given) / 2**20

    assert mebibytes() == pytest.approx(125, rel=0.1)
    assert mebibytes(num_tokens=1024) == mebibytes() / 2
    assert mebibytes(bytes_per_element=2) == mebibytes() / 2
    assert mebibytes(num_tokens=1, num_rows=64) == 64 * 49152 * 16 / 2**20  # the logits, four times
    wide_heads = replace(SIZES, num_heads=64, num_kv_heads=32)
    assert mebibytes(wide_heads) > mebibytes()


def test_the_workspace_is_one_layer_padded_to_twice() -> None:
    assert workspace_share(30) * 30 == 2


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
    ]
