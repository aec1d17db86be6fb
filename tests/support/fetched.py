"""The default model where `infer fetch` has put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.loader.find import default_model


def fetched_model() -> Path:
    """The file of the default model; the test is skipped where it is not cached."""
    path = default_model.models_dir() / default_model.FILE
    if not path.exists():
        pytest.skip("the default model is not cached; `infer fetch` brings it")
    return path
