from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.cache.host_bytes import free_host_bytes
from infer.cache.memory import (
    CacheSize,
    DeviceMemory,
    Scratch,
    StepBytes,
    check_host_blocks,
    fit_cache,
    kv_bytes_per_token,
    pinned_bytes,
    size_cache,
    workspace_share,
)
from infer.config.knobs import format_bytes
from infer.config.resolve import resolve_scheduler
from infer.config.settings import CacheConfig, EngineConfig
from infer.engine.cache_fit import step_bytes
from infer.errors import ConfigError, NoRoom
from infer.models.config import ModelConfig

SIZES = ModelConfig(  # SmolLM2-135M
    family="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_len=8192,
    norm_eps=1e-5,
    activation="silu",
    tie_embeddings=True,
)

SCHEDULER = resolve_scheduler(EngineConfig.from_knobs(max_batch_size=8, max_num_batched_tokens=2048), 8192)


def size(cache: CacheConfig, *, free_bytes: int = 0, max_seq_len: int = 100) -> CacheSize:
    scheduler = resolve_scheduler(EngineConfig.from_knobs(max_batch_size=4), max_seq_len)
    return size_cache(cache, scheduler, max_seq_len=max_seq_len, bytes_per_token=10, free_bytes=free_bytes)


def test_keys_and_values_of_all_layers_are_counted() -> None:
    assert kv_bytes_per_token(30, 3, 64, 4) == 46080  # SmolLM2-135M: 45 KiB
    assert kv_bytes_per_token(32, 8, 128, 2) == 128 << 10  # Llama 3.1 8B


@pytest.mark.parametrize("given", [{"swap_blocks": 9}, {"swap_space": "1440B"}])
def test_host_memory_without_a_use_is_not_taken(given: dict[str, Any]) -> None:
    for knobs, number in (
        ({}, 9),
        ({"preemption": "recompute"}, 9),  # cached prefixes go there
        ({"preemption": "recompute", "use_prefix_caching": False}, 0),
        ({"kv_cache_backend": "naive"}, 0),
    ):
        config = EngineConfig.from_knobs(max_batch_size=4, num_blocks=7, **given, **knobs)
        scheduler = resolve_scheduler(config, 100)
        found = size_cache(config.cache, scheduler, max_seq_len=100, bytes_per_token=10, free_bytes=0)
        assert found.num_host_blocks == number, knobs


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
        ("paged", "the memory left for the KV cache (150 B) is too little: one block of 16 tokens takes"),
        (
            "contiguous",
            "the memory left for the KV cache (150 B) is too little: one sequence of max_seq_len 100 takes",
        ),
    ],
)
def test_a_cache_without_room_says_what_it_gets_and_what_it_takes(backend: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(CacheConfig(kv_cache_backend=backend), free_bytes=159)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("'infer plan' shows what fits")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"kv_cache_memory": "9B"},  # less than a token's
            "kv_cache_memory=9B is too little: one block of 16 tokens takes 160 B;",
        ),
        (
            {"num_blocks": 2, "kv_cache_backend": "contiguous"},
            "num_blocks=2 (320 B) is too little: one sequence of max_seq_len 100 takes 1000 B;",
        ),
    ],
)
def test_a_cache_that_was_asked_for_names_the_knob_that_asked(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(CacheConfig(**knobs), free_bytes=10**9)
    assert str(caught.value).startswith(message)


def test_activations_grow_with_the_step_or_with_the_rows_that_sample() -> None:
    """The first figure was measured: 125 MiB for 2048 tokens of SmolLM2-135M in float32."""

    def mebibytes(
        sizes: ModelConfig = SIZES, num_tokens: int = 2048, num_rows: int = 8, bytes_per_element: int = 4
    ) -> float:
        scheduler = replace(SCHEDULER, max_num_batched_tokens=num_tokens, max_batch_size=num_rows)
        step = step_bytes(scheduler, sizes, max_seq_len=8192, bytes_per_element=bytes_per_element)
        assert step.total == step.activations  # nothing is captured on a CPU
        return step.activations / 2**20

    assert mebibytes() == pytest.approx(125, rel=0.1)
    assert mebibytes(num_tokens=1024) == mebibytes() / 2
    assert mebibytes(bytes_per_element=2) == mebibytes() / 2
    assert mebibytes(num_tokens=1, num_rows=64) == 64 * 49152 * 16 / 2**20  # the logits, four times
    wide_heads = replace(SIZES, num_heads=64, num_kv_heads=32)
    assert mebibytes(wide_heads) > mebibytes()


def test_the_workspace_is_one_layer_padded_to_twice() -> None:
    assert workspace_share(30) * 30 == 2
    assert workspace_share(30, gathers=False) == 0


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
    ]


STEP = step_bytes(SCHEDULER, SIZES, max_seq_len=8192, bytes_per_element=4)


def fit(free_bytes: int, *, gathers: bool = True, **knobs: Any) -> CacheSize:
    return fit_cache(
        CacheConfig(**knobs),
        SCHEDULER,
        STEP,
        max_seq_len=8192,
        bytes_per_token=46080,
        free_bytes=free_bytes,
        share=0.9,
        workspace=workspace_share(30, gathers=gathers),
    )


def test_the_cache_leaves_room_for_a_step_and_its_workspace() -> None:
    activations = STEP.activations
    size = fit(1 << 30)
    assert size.num_bytes * (1 + workspace_share(30)) + activations <= 1 << 30
    assert size.num_bytes > 0.75 * (1 << 30)
    assert fit(1 << 30, num_blocks=size.num_blocks) == size
    assert fit(40 << 30).num_tokens == 8 * 8192  # never more than can be used
    in_place = fit(1 << 30, gathers=False)
    assert size.num_bytes < in_place.num_bytes <= (1 << 30) - activations


def refusal(free_bytes: int, **knobs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(free_bytes, **knobs)
    return str(caught.value)


def advice(message: str, knob: str) -> str:
    """The value that a refusal says would do."""
    found = re.search(rf"; set {knob}=(\S+) or less, or leave it out to have the size chosen$", message)
    assert found is not None, message
    return found[1]


def test_more_blocks_than_there_is_room_for_are_refused_with_how_many_fit() -> None:
    said = refusal(1 << 30, num_blocks=10**10)
    assert said.startswith(
        "num_blocks=10000000000 (6866455.1 GiB) is more than there is: 1.0 GiB are free once the weights are "
        "loaded, and a step's activations take up to 132.0 MiB; "
    )
    largest = int(advice(said, "num_blocks"))
    assert fit(1 << 30, num_blocks=largest).num_blocks == largest
    assert advice(refusal(1 << 30, num_blocks=largest + 1), "num_blocks") == str(largest)


@pytest.mark.parametrize(("asked", "free"), [("3GiB", 1 << 30), ("3GiB", 5 << 29), ("1TiB", 40 << 30)])
def test_more_memory_than_there_is_is_refused_with_how_much_there_is(asked: str, free: int) -> None:
    """The last one has room for all that eight sequences could ever use, and still not for what was asked."""
    said = refusal(free, kv_cache_memory=asked)
    assert said.startswith(f"kv_cache_memory={asked} is more than there is: {format_bytes(free)} are free")
    most = advice(said, "kv_cache_memory")
    assert fit(free, kv_cache_memory=most).num_bytes > 0.8 * min(free, 8 * 8192 * 46080)


def test_no_room_at_all_is_said() -> None:
    assert refusal(100 << 20).startswith(
        "there is no room for a KV cache: 100.0 MiB are free once the weights"
    )


def test_captured_steps_and_buffers_are_counted_on_a_gpu() -> None:
    step = step_bytes(SCHEDULER, SIZES, max_seq_len=8192, bytes_per_element=2, graph_tokens=512)
    assert step.total == step.activations + step.graphs + step.buffers
    per_token = (4 * 576 + 4 * 1536) * 2
    block, workspace = (8 + 512) * per_token + 8 * 49152 * 2, 32 << 20
    assert step.graphs == int(1.25 * block) + workspace and step.graph_block == block + workspace
    assert step.buffers == 16 * 8 * 9 * 64 * 4 + 8 * 49152 * 6 + workspace
    assert StepBytes(5, 7, 2, 1).activations == 7
    less = fit_cache(
        CacheConfig(), SCHEDULER, step, max_seq_len=8192, bytes_per_token=23040, free_bytes=1 << 28, share=1.0
    )
    assert less.num_bytes <= (1 << 28) - step.total < less.num_bytes + 16 * 23040


def test_a_device_has_room_for_what_is_free_and_allowed() -> None:
    memory = DeviceMemory(total=100 << 30, free=60 << 30, held=10 << 30, share=0.9)
    assert memory.others == 30 << 30
    assert memory.room == 54 << 30
    assert memory.describe() == "54.0 GiB are free next to 30.0 GiB of other processes"
    assert replace(memory, free=90 << 30).describe() == "81.0 GiB are free", "to itself"
    assert memory.with_weights(10 << 30).room == 45 << 30
    assert memory.with_weights(10 << 30).others == 30 << 30
    assert replace(memory, limit=90 << 30).room == 60 << 30
    memory = replace(memory, limit=24 << 30)
    assert memory.room == 14 << 30
    assert memory.with_weights(4 << 30).describe() == "10.0 GiB of the 24.0 GiB of device_memory are left"
    assert replace(memory, limit=None, share=1.0).describe() == "60.0 GiB are free"


def test_a_refusal_names_the_limit_and_what_is_missing() -> None:
    memory = DeviceMemory(total=100 << 30, free=60 << 30, held=10 << 30, limit=(10 << 30) + (100 << 20))
    with pytest.raises(NoRoom) as caught:
        fit_cache(
            CacheConfig(),
            SCHEDULER,
            STEP,
            max_seq_len=8192,
            bytes_per_token=46080,
            free_bytes=memory.room,
            share=1.0,
            left=memory.describe(),
        )
    assert str(caught.value).startswith(
        "there is no room for a KV cache: 100.0 MiB of the 10.1 GiB of device_memory are left once the "
        "weights are loaded, and a step's activations take up to 132.0 MiB; 32.7 MiB are missing for its "
        "first block: "
    )


def test_blocks_in_host_memory_must_fit_there() -> None:
    check_host_blocks(CacheConfig(swap_blocks=10), CacheSize(4, 16, 10, num_host_blocks=10), 1600)
    with pytest.raises(
        ConfigError,
        match="swap_blocks=11 takes 1.7 KiB of host memory.*; set swap_blocks=10 or less$",
    ):
        check_host_blocks(CacheConfig(swap_blocks=11), CacheSize(4, 16, 10, num_host_blocks=11), 1600)


def test_pinned_blocks_are_counted_as_they_are_rounded() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]
    size = CacheSize(4, 16, 10, num_host_blocks=10)
    check_host_blocks(CacheConfig(swap_blocks=10), size, 2048, is_pinned=True)
    with pytest.raises(
        ConfigError,
        match=r"swap_blocks=10 takes 2.0 KiB of host memory \(rounded up to a power of two\), "
        "but 1.6 KiB are free; set swap_blocks=6 or less$",
    ):
        check_host_blocks(CacheConfig(swap_blocks=10), size, 1600, is_pinned=True)
    with pytest.raises(ConfigError, match="set swap_space=1.0KiB or less$"):
        check_host_blocks(CacheConfig(swap_space="1.6KB"), size, 1600, is_pinned=True)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system as seen by a process in these control groups, on a machine with 1000 KiB free."""
    files = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n", "proc/self/cgroup": groups} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "folder", "names"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a", ("memory.max", "memory.current", "inactive_file")),
        ("0::/\n", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu:/x\n4:memory:/a\n",
            "sys/fs/cgroup/memory/a",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_container_has_no_more_memory_than_its_limit(
    tmp_path: Path, groups: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, used, cached = names

    def free(limit_text: str) -> int:
        stat = f"anon 7\n{cached} 50\n"
        files = {limit: limit_text, used: "500\n", "memory.stat": stat}
        return free_host_bytes(machine(tmp_path, groups, {f"{folder}/{k}": v for k, v in files.items()}))

    assert free("2000\n") == 1550  # cached files make way
    assert free("100\n") == 0
    assert free("max\n") == 1000 << 10
    assert free(f"{1 << 62}\n") == 1000 << 10


def test_a_machine_without_control_groups_says_what_is_available(tmp_path: Path) -> None:
    assert free_host_bytes(machine(tmp_path, "", {})) == 1000 << 10


def test_a_matrix_unpacked_for_a_product_is_counted_once_for_any_number_of_tokens() -> None:
    given: dict[str, Any] = {"max_seq_len": 8192, "bytes_per_element": 2, "graph_tokens": 512}
    plain = step_bytes(SCHEDULER, SIZES, **given)
    coded = step_bytes(SCHEDULER, SIZES, **given, scratch=Scratch(layers=100 << 20, head=10 << 20))
    assert coded.layers - plain.layers == coded.scratch == 100 << 20
    assert coded.logits - plain.logits == 10 << 20
    gaps = coded.graph_block - plain.graph_block - (110 << 20)  # those that smaller tensors leave before it
    assert gaps == pytest.approx((100 << 20) / 3, rel=0.2)
