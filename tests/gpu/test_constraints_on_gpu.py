"""Constraints on a GPU: forced tokens, masks and free rows in graphs and beside them, a step ahead or not."""

from __future__ import annotations

from typing import Any

import pytest

from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from tests.gpu.graphs import FEW_SIZES

pytest.importorskip("jsonschema")  # which checks the outputs

from tests.integration.test_structured import PARAMS, check_texts, make_engine, run  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def loaded(checkpoint: str) -> LoadedModel:
    source = resolve_model(checkpoint, revision=None, show_progress=False)
    return load_model(source, dtype="float32", device="cuda")


@pytest.mark.parametrize("name", ["usual", "no overlap", "no graphs", "no jumps", "squeezed", "swapping"])
def test_every_way_to_make_steps_gives_valid_outputs(loaded: LoadedModel, checkpoint: str, name: str) -> None:
    """Tokens may differ where a batch of another size rounds otherwise; on a CPU they are compared."""
    rows: dict[str, dict[str, Any]] = {
        "no overlap": {"use_overlap": False},
        "no graphs": {"use_cuda_graphs": False},
        "squeezed": {"block_size": 4, "num_blocks": 34, "preemption": "recompute"},
        "swapping": {"block_size": 4, "num_blocks": 34, "preemption": "swap", "swap_blocks": 60},
    }
    engine = make_engine(loaded, **FEW_SIZES, **rows.get(name, {}))
    engine._guided.jumps = name != "no jumps"
    tokens = run(engine)
    assert len({number for number, _ in tokens}) == len(PARAMS)
    check_texts(tokens, checkpoint)
