"""What a model's own files say about its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.errors import CheckpointError
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.pooling import Pooling, read_pooling
from scripts.make_checkpoint import make_checkpoint

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def write(folder: Path, modules: Any, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_that_says_nothing_has_unit_vectors_of_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling(mode="last", normalize=True)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls_token"),  # refused when a request asks for it
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean_tokens+max_tokens"),
        ({}, "last"),
        (None, "last"),  # the folder was not fetched
    ],
)
def test_the_files_of_the_model_decide(tmp_path: Path, config: dict[str, Any] | None, mode: str) -> None:
    folder = write(tmp_path / "m", [TRANSFORMER, POOLING, NORMALIZE], config)
    assert read_pooling(folder) == Pooling(mode=mode, normalize=True)


def test_vectors_keep_their_length_where_the_model_has_no_such_step(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True})
    assert read_pooling(folder) == Pooling(mode="mean", normalize=False)


def test_a_step_that_is_not_made_here_is_named_in_the_mode_and_so_refused_when_asked_for(
    tmp_path: Path,
) -> None:
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    own = TRANSFORMER | {"type": "custom_st.Network"}  # the first is the network, whatever its class
    config = {"pooling_mode_mean_tokens": True}
    folder = write(tmp_path / "m", [own, POOLING, dense, dense | {"idx": 3}, NORMALIZE], config)
    assert read_pooling(folder) == Pooling(mode="mean+Dense", normalize=True)


@pytest.mark.parametrize("path", ["../elsewhere", "/elsewhere", "..", "1_Pooling/.."])
def test_a_model_cannot_send_us_to_files_that_are_not_its_own(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"modules.json names the folder '.*', which is not one of"):
        read_pooling(write(tmp_path / "m", [TRANSFORMER, POOLING | {"path": path}]))


def test_a_file_that_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"modules.json must hold a JSON list, got dict"):
        read_pooling(write(tmp_path / "m", {}))


def test_the_headers_of_a_model_carry_it(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "m")
    assert read_headers(resolve_model(str(tmp_path / "m"))).pooling == Pooling()
    write(tmp_path / "m", [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True})
    assert read_headers(resolve_model(str(tmp_path / "m"))).pooling == Pooling(mode="mean", normalize=False)
