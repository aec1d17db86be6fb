"""An engine whose decode attention is the CUDA kernel, emulated: the tokens are those of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.engine import build
from infer.errors import ConfigError
from infer.kernels.cuda import paged_attention
from infer.sampling.params import SamplingParams
from tests.support.tiny import make_engine, random_prompts, run_engine
from tests.unit.kernels.emulated_cuda import EmulatedKernels, emulated_kernels

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
REQUESTS = [(prompt, PARAMS) for prompt in random_prompts(3)]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernels]:
    loaded = []

    def load(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> EmulatedKernels:
        loaded.append(emulated_kernels(defines))
        return loaded[-1]

    monkeypatch.setattr(build, "keeps_state_on_device", lambda backend, device: True)
    monkeypatch.setattr(paged_attention, "load_kernels", load)
    monkeypatch.setattr(paged_attention, "_index", lambda device: 0)
    monkeypatch.setattr(paged_attention, "_num_sms", lambda device: 3)
    return loaded


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])  # the second has windows
def test_attention_by_the_cuda_kernel_changes_no_token(family: str, emulated: list[EmulatedKernels]) -> None:
    engine = make_engine(family, attention_backend="cuda", max_batch_size=2)
    assert emulated, "the kernel is compiled when the engine is built, not in its first step"
    assert run_engine(engine, REQUESTS) == run_engine(
        make_engine(family, attention_backend="naive"), REQUESTS
    )
    assert {name for name, _ in emulated[0].launched} == {"paged_attention", "merge_splits"}


def test_flash_and_cuda_need_a_gpu() -> None:
    for backend in ("flash", "cuda"):
        with pytest.raises(ConfigError, match=f"attention_backend={backend} needs a GPU"):
            build.keeps_state_on_device(backend, torch.device("cpu"))
