"""Triton's files as they were written, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.kernels.runtime import triton_cache

pytest.importorskip("triton")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    triton_cache._temporary_folder.cache_clear()
    return triton_cache._make_manager()


def fill(folder: Any) -> dict[str, str]:
    group = {name: folder.put(data, name) for name, data in (("k.cubin", b"\x7fELF"), ("k.json", "{}"))}
    folder.put_group("k.json", group)
    return group


def test_what_was_written_is_found_again(manager: Any) -> None:
    group = fill(manager("key"))
    assert manager("key").get_group("k.json") == group
    assert manager("key").get_file("k.cubin") == group["k.cubin"]
    assert manager("other").get_group("k.json") is None


@pytest.mark.parametrize("damaged", ["k.cubin", "k.json", "__grp__k.json", "k.cubin.sha256"])
@pytest.mark.parametrize("data", [b"", b"\x7fE", b"\x86garbage"])
def test_a_damaged_file_is_not_found_and_written_again(manager: Any, damaged: str, data: bytes) -> None:
    group = fill(manager("key"))
    (Path(group["k.cubin"]).parent / damaged).write_bytes(data)
    assert manager("key").get_group("k.json") is None
    fill(manager("key"))
    assert manager("key").get_group("k.json") == group


def test_files_of_other_programs_are_taken_as_they_are(manager: Any) -> None:
    folder = Path(manager("key").cache_dir)
    (folder / "k.cubin").write_bytes(b"\x7fELF")
    paths = {"child_paths": {"k.cubin": str(folder / "k.cubin")}}
    (folder / "__grp__k.json").write_text(json.dumps(paths))
    assert manager("key").get_group("k.json") == paths["child_paths"]
    (folder / "__grp__k.json").write_bytes(b"\x86")
    assert manager("key").get_group("k.json") is None


def test_a_folder_that_cannot_be_made_is_done_without(
    manager: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("")
    group = fill(manager("key"))
    assert not group["k.cubin"].startswith(str(tmp_path / "cache"))
    assert manager("key").get_group("k.json") == group
    assert "not kept" in caplog.text


def test_where_nothing_can_be_written_a_line_says_it(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(triton_cache, "_temporary_folder", lambda: str(tmp_path / "cache" / "too"))
    with pytest.raises(ConfigError, match="set TRITON_CACHE_DIR to a folder that can be written"):
        manager("key")


def test_a_choice_of_the_user_stays() -> None:
    import triton

    before = triton.knobs.cache.manager_class
    try:
        triton.knobs.cache.manager_class = None
        triton_cache.install(triton)
        made = triton.knobs.cache.manager_class
        assert made is not None
        triton_cache.install(triton)
        assert triton.knobs.cache.manager_class is made
    finally:
        triton.knobs.cache.manager_class = before
