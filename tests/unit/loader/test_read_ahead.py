from __future__ import annotations

import os
from pathlib import Path

import pytest

from infer.loader.find.source import ModelSource
from infer.loader.read_ahead import CHUNK_BYTES, codes_dir, codes_prefix, read_ahead, start_reading_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")


def advice_for(monkeypatch: pytest.MonkeyPatch, source: ModelSource, max_bytes: int) -> dict[str, set[int]]:
    """The chunks that the system is asked for, by file."""
    asked: dict[str, set[int]] = {}

    def advise(fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        asked.setdefault(name, set()).update(range(start // CHUNK_BYTES, (start + length) // CHUNK_BYTES))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read_ahead(source, max_bytes)
    return asked


def write_sparse(path: Path, num_chunks: float) -> None:
    with path.open("wb") as file:
        file.truncate(int(num_chunks * CHUNK_BYTES))


def test_the_first_bytes_of_all_weights_are_asked_for_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("b.safetensors", 4), ("a.safetensors", 2.5), ("c.safetensors", 9), ("other.bin", 1)):
        write_sparse(tmp_path / name, size)
    source = ModelSource(path=tmp_path, name="m", is_gguf=False)
    everything = advice_for(monkeypatch, source, 1 << 40)
    assert list(everything) == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert [len(chunks) for chunks in everything.values()] == [3, 4, 9]
    assert all(chunks == set(range(len(chunks))) for chunks in everything.values())
    some = advice_for(monkeypatch, source, 5 * CHUNK_BYTES)
    assert some == {"a.safetensors": {0, 1, 2}, "b.safetensors": {0, 1, 2}}


def test_a_gguf_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sparse(tmp_path / "m.gguf", 2)
    source = ModelSource(path=tmp_path / "m.gguf", name="m", is_gguf=True)
    assert advice_for(monkeypatch, source, 1 << 40) == {"m.gguf": {0, 1}}


def test_kept_codes_are_asked_for_before_the_weights_they_were_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_sparse(tmp_path / "m.gguf", 2)
    source = ModelSource(path=tmp_path / "m.gguf", name="m", is_gguf=True)
    codes_dir().mkdir(parents=True)
    prefix = codes_prefix(source)
    names = [f"{prefix}-old.safetensors", f"{prefix}-new.safetensors", f"{prefix}-1.4711.unfinished"]
    for age, name in enumerate([*names, "00000000-another.safetensors"]):
        write_sparse(codes_dir() / name, 3)
        os.utime(codes_dir() / name, (0, 1000 + age))
    asked = advice_for(monkeypatch, source, 1 << 40)
    assert list(asked.items()) == [(names[1], {0, 1, 2}), ("m.gguf", {0, 1})]
    assert advice_for(monkeypatch, source, 3 * CHUNK_BYTES)[names[1]] == {0, 1, 2}
    write_sparse(source.path, 4)  # other weights than those
    assert advice_for(monkeypatch, source, 1 << 40) == {"m.gguf": {0, 1, 2, 3}}


def test_a_file_that_is_gone_is_left_to_the_loader(tmp_path: Path) -> None:
    thread = start_reading_ahead(ModelSource(path=tmp_path / "gone.gguf", name="m", is_gguf=True))
    thread.join()
