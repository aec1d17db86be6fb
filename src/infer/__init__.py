"""infer: an LLM inference engine and OpenAI-compatible server in PyTorch, Triton, CUDA C++ and C.

    from infer import LLM, SamplingParams
    print(LLM().generate("Why is the sky blue?", SamplingParams(max_tokens=64))[0].text)

Names are imported when first used, so `import infer` does not import torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: `infer` is imported before Ctrl-C is handled (__main__.py)
if TYPE_CHECKING:
    from typing import Any

    from infer.constraints.description import Structured as Structured
    from infer.frontend.async_llm import AsyncLLM as AsyncLLM
    from infer.frontend.llm import LLM as LLM
    from infer.frontend.llm import CompletionOutput as CompletionOutput
    from infer.frontend.llm import RequestOutput as RequestOutput
    from infer.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "infer.frontend.async_llm",
    "LLM": "infer.frontend.llm",
    "RequestOutput": "infer.frontend.llm",
    "CompletionOutput": "infer.frontend.llm",
    "SamplingParams": "infer.sampling.params",
    "Structured": "infer.constraints.description",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "Structured",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
