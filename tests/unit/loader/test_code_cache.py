"""Codes that are kept on disk: the same as made ones, and never those of another file, form or machine."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.kernels.cpu import operations
from infer.kernels.cpu.library import library
from infer.layers.linear import Projected
from infer.loader import code_cache
from infer.loader.find.source import resolve_model
from infer.loader.formats.checkpoint import write_safetensors
from infer.loader.load import LoadedModel, load_model
from infer.quant import packed
from infer.quant.packed import Int8
from infer.quant.projection import WeightSpec
from infer.sampling.params import SamplingParams
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.tiny import random_prompts, run_engine

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

SIZES = Sizes(vocab_size=300, num_experts=3)
FROM_CACHE = ", read from the cache"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where codes are kept; all of them, however quickly they are made."""
    monkeypatch.setattr(code_cache, "codes_dir", lambda: tmp_path / "cache" / "codes")
    monkeypatch.setattr(code_cache, "SLOW_SECONDS", -1.0)
    yield tmp_path / "cache" / "codes"


def checkpoint_of(path: Path, family: str = "llama", seed: int = 1) -> Path:
    make_checkpoint(family, path, sizes=SIZES, dtype="bfloat16", seed=seed)
    return path


def load(path: Path, quantization: str = "int8", home: str | None = None) -> LoadedModel:
    return load_model(
        resolve_model(str(path)), device="cpu", dtype="auto", quantization=quantization, home=home
    )


def tensors_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    layers = {name: layer for name, layer in loaded.model.named_modules() if isinstance(layer, Projected)}
    kept = {
        f"{name}.{leaf}": tensor
        for name, layer in layers.items()
        for leaf, tensor in layer.stored.tensors.items()
    }
    plain = {name: tensor for name, tensor in loaded.model.named_parameters() if not tensor.is_meta}
    return {name: tensor.contiguous().view(torch.uint8) for name, tensor in (kept | plain).items()}


def assert_same(a: LoadedModel, b: LoadedModel) -> None:
    found, expected = tensors_of(a), tensors_of(b)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def tokens_of(loaded: LoadedModel) -> list[list[list[int]]]:
    engine = build_engine(EngineConfig.from_knobs(num_blocks=64), loaded)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return run_engine(engine, [(prompt, params) for prompt in random_prompts(3)])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    ("quantization", "home"), [("int8", None), ("int4", None), ("fp8", "cuda"), ("int4", "cuda")]
)
def test_a_second_start_reads_what_the_first_made(
    tmp_path: Path, family: str, quantization: str, home: str | None
) -> None:
    """Tied heads, matrices stored transposed and experts included; nothing is rounded again."""
    path = checkpoint_of(tmp_path / "m", family)
    first, second = load(path, quantization, home), load(path, quantization, home)
    assert not first.kept_as.endswith(FROM_CACHE) and second.kept_as == first.kept_as + FROM_CACHE
    coded = [
        m.stored for m in second.model.modules() if isinstance(m, Projected) and m.stored.scheme != "none"
    ]
    assert coded and all(projection.making_seconds() == 0 for projection in coded)
    assert_same(first, second)


def test_the_log_says_that_weights_are_rounded_and_that_they_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint_of(tmp_path / "m")
    with caplog.at_level("INFO"):
        load(path, "int4")
    said = [message.partition("=")[0] for message in caplog.messages]
    assert said.index("weights are rounded while they are loaded matrices") < said.index(
        "codes are kept for the next start path"
    )
    caplog.clear()
    with caplog.at_level("INFO"):
        load(path, "int4")
    assert "rounded" not in caplog.text and "codes were read from the cache" in caplog.text


def test_without_a_terminal_a_line_stands_for_the_bar_while_weights_are_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = resolve_model(str(checkpoint_of(tmp_path / "m")))
    with caplog.at_level("WARNING"):
        load_model(source, device="cpu", quantization="int4", show_progress=True)  # its head has 8 bits
    assert [message.partition("=")[0] for message in caplog.messages] == [
        "weights are rounded while they are loaded matrices"
    ]
    assert caplog.text.rstrip().endswith("to=int4+int8")


def test_greedy_tokens_are_the_same(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "m")
    assert tokens_of(load(path, "int4")) == tokens_of(load(path, "int4"))


def test_forms_do_not_share_a_file(tmp_path: Path, folder: Path) -> None:
    path = checkpoint_of(tmp_path / "m")
    load(path, "int8")
    assert not load(path, "int4").kept_as.endswith(FROM_CACHE)
    assert not load(path, "int8", "cuda").kept_as.endswith(FROM_CACHE)
    assert len(list(folder.iterdir())) == 3
    assert folder.stat().st_mode & 0o077 == 0


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace(path: Path) -> None:
    path.write_bytes(b"not a file of ours")


def _rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"layers.0.", b"layers.9.", 1))


@pytest.mark.parametrize("damage", [_truncate, _flip, _replace, _rename_tensor])
def test_a_damaged_file_is_made_again(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    path = checkpoint_of(tmp_path / "m")
    first = load(path)
    (file,) = folder.iterdir()
    assert callable(damage)
    damage(file)
    with caplog.at_level(logging.WARNING, "infer"):
        again = load(path)
    assert "codes on disk cannot be used" in caplog.text and not again.kept_as.endswith(FROM_CACHE)
    assert_same(first, again)
    assert load(path).kept_as.endswith(FROM_CACHE)  # the new file


@pytest.mark.parametrize("keeps_time", [True, False])
def test_another_checkpoint_has_other_codes(tmp_path: Path, keeps_time: bool) -> None:
    """Also one of the same name, size and time: container images may set the time of all files to one."""
    path, other = checkpoint_of(tmp_path / "m"), checkpoint_of(tmp_path / "other", seed=2)
    load(path)
    expected, weights = load(other), path / "model.safetensors"
    before = weights.stat()
    shutil.copyfile(other / "model.safetensors", weights)
    if keeps_time:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    changed = load(path)
    assert not changed.kept_as.endswith(FROM_CACHE)
    assert_same(changed, expected)


def test_a_checkpoint_may_be_moved(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "m")
    load(path)
    path.rename(tmp_path / "elsewhere")
    assert load(tmp_path / "elsewhere").kept_as.endswith(FROM_CACHE)


def test_what_is_made_quickly_is_not_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "SLOW_SECONDS", 5.0)
    load(checkpoint_of(tmp_path / "m"))
    assert not folder.exists()


def test_plain_numbers_and_the_codes_of_files_are_not_kept(tmp_path: Path, folder: Path) -> None:
    path = checkpoint_of(tmp_path / "m")
    quantize_checkpoint(resolve_model(str(path)), tmp_path / "q", Recipe(scheme="gptq", group_size=32))
    load(path, "none")
    assert not folder.exists()
    load(tmp_path / "q", "auto")  # its head is plain, and becomes int8
    sizes = [file.stat().st_size for file in folder.iterdir()]
    assert sizes and max(sizes) < 300 * 64 * 2


def test_the_log_names_the_form_of_what_is_rounded_not_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint_of(tmp_path / "m")
    quantize_checkpoint(resolve_model(str(path)), tmp_path / "q", Recipe(scheme="gptq", group_size=32))
    with caplog.at_level("INFO"):
        load(tmp_path / "q", "auto")  # its layers have 4 bits already; its head is plain, and becomes int8
    assert "weights are rounded while they are loaded matrices=1 to=int8" in caplog.text


def test_a_disk_that_cannot_take_them_is_a_line_in_the_log(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_of(tmp_path / "m")
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "infer"):
        load(path)
    assert "codes are not kept for the next start" in caplog.text

    folder.unlink()
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "infer"):
        load(path)
    assert "codes are not kept for the next start" in caplog.text and "half of the free space" in caplog.text
    assert not list(folder.iterdir())


def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint_of(tmp_path / "m")
    load(path)
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "infer"):
        assert not load(path).kept_as.endswith(FROM_CACHE)
    assert "writable by its owner alone" in caplog.text


def test_the_oldest_file_makes_room(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [checkpoint_of(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    load(paths[0])
    (first,) = folder.iterdir()
    monkeypatch.setattr(code_cache, "MAX_BYTES", int(first.stat().st_size * 2.5))
    load(paths[1])
    (second,) = set(folder.iterdir()) - {first}
    os.utime(second, (1, 1))
    assert load(paths[0]).kept_as.endswith(FROM_CACHE)  # which has been read since
    load(paths[2])
    assert first.exists() and not second.exists() and len(list(folder.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that passes every check is used, though its time cannot be set."""
    path = checkpoint_of(tmp_path / "m")
    first = load(path)

    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    second = load(path)
    assert second.kept_as.endswith(FROM_CACHE)
    assert_same(first, second)


def int8(parts: Mapping[str, int] | None = None) -> Int8:
    return Int8(WeightSpec(64, 32, torch.float32, torch.device("cpu"), parts or {}))


class OtherInt8(Int8):
    scheme = "other"


def test_the_key_tells_parts_their_order_and_schemes_apart(tmp_path: Path) -> None:
    source = resolve_model(str(checkpoint_of(tmp_path / "m")))
    gate_up, up_gate = int8({"gate": 32, "up": 32}), int8({"up": 32, "gate": 32})
    projections = (gate_up, up_gate, int8(), OtherInt8(int8().spec))
    assert len({code_cache._key({"mlp": projection}, source) for projection in projections}) == 4
    assert code_cache._key({"mlp": gate_up}, source) == code_cache._key({"mlp": gate_up}, source)


def test_the_key_is_of_the_code_that_orders_parts() -> None:
    """Which of gate and up is first, layers/mlp.py decides."""
    root = Path(code_cache.__file__).parents[1]
    found = [{str(path.relative_to(root)) for path in root.glob(pattern)} for pattern in code_cache._CODE]
    assert all(found) and "layers/mlp.py" in set().union(*found)


@pytest.mark.parametrize("size", [0, 1, 3, 7, 64])
def test_a_checksum_is_of_every_byte_of_any_number(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_PIECE_BYTES", 16)
    for tensor in (torch.arange(size, dtype=torch.uint8), torch.arange(size, dtype=torch.float16)):
        before = code_cache._checksum(tensor)
        assert before == code_cache._checksum(tensor.clone())
        for place in range(size):
            changed = tensor.clone()
            changed[place] += 1
            assert code_cache._checksum(changed) != before
    tensor = torch.arange(64, dtype=torch.uint8)
    assert code_cache._checksum(tensor) != code_cache._checksum(tensor.flip(0))  # the order counts, too


def test_a_device_without_memory_for_checksums_makes_codes_again(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_of(tmp_path / "m")

    def fail(tensor: torch.Tensor) -> int:
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "infer"):
        patched.setattr(code_cache, "_checksum", fail)
        first = load(path)
    assert "codes are not kept for the next start" in caplog.text and not list(folder.iterdir())
    load(path)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "infer"):
        patched.setattr(code_cache, "_checksum", fail)
        again = load(path)
    assert "codes are not kept for the next start" in caplog.text and not again.kept_as.endswith(FROM_CACHE)
    assert_same(first, again)


def test_the_time_of_making_has_no_reading_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pack = operations.pack

    def read(num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        nonlocal now
        for first in (0, 32):
            now += 100.0
            yield slice(first, first + 32), torch.ones(32, 32, dtype=torch.bfloat16)

    def copy_to(out: torch.Tensor) -> None:
        nonlocal now
        now += 100.0
        out.fill_(1)

    def pack_in_a_second(*args: Any, **kwargs: Any) -> None:
        nonlocal now
        now += 1.0
        pack(*args, **kwargs)

    monkeypatch.setattr(packed, "moment", lambda device: now)
    monkeypatch.setattr(operations, "pack", pack_in_a_second)
    source = SimpleNamespace(shape=(64, 32), rows=read)
    stored_transposed = SimpleNamespace(shape=(32, 64), copy_to=copy_to, transpose=lambda: None)
    projection = int8()
    projection.load(source, part=None, expert=None, transposed=False)
    assert projection.making_seconds() == 2.0
    projection.load(stored_transposed, part=None, expert=None, transposed=True)
    assert projection.making_seconds() == 3.0
    assert torch.allclose(projection.matrices[0].dequantized(), torch.ones(64, 32), atol=1e-2)


def test_two_that_write_at_once_leave_one_whole_file(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers on one volume may have the same process id, as two threads do."""
    made = [int8(), int8()]
    for number, projection in enumerate(made):
        projection.matrices[0].data.fill_(number + 1)
    caches = [code_cache.CodeCache({"m": projection}, folder / "key.safetensors") for projection in made]
    write, both, written = write_safetensors, threading.Barrier(2, timeout=30), []

    def write_beside_the_other(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        both.wait()
        write(path, tensors)
        written.append(path)
        both.wait()

    monkeypatch.setattr(code_cache, "write_safetensors", write_beside_the_other)
    with caplog.at_level(logging.WARNING, "infer"):
        threads = [threading.Thread(target=cache.keep) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not caplog.text and len(set(written)) == 2
    assert [file.name for file in folder.iterdir()] == ["key.safetensors"]
    read = int8()
    assert code_cache.CodeCache({"m": read}, folder / "key.safetensors").read()
    assert any(torch.equal(read.matrices[0].data, projection.matrices[0].data) for projection in made)


def test_what_a_killed_start_left_unfinished_is_removed_after_a_day(tmp_path: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    ages = {"old.safetensors": 9e5, "a.unfinished": 9e4, "b.4711": 9e4, "c.unfinished": 8e4}
    for name, age in ages.items():
        (folder / name).write_bytes(b"...")
        os.utime(folder / name, (time.time() - age, time.time() - age))
    load(checkpoint_of(tmp_path / "m"))
    (kept,) = {file.name for file in folder.iterdir()} - {"old.safetensors", "c.unfinished"}
    assert kept.endswith(".safetensors") and (folder / "c.unfinished").exists()
    assert (folder / "old.safetensors").exists()
