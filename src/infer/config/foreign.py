"""Settings of other engines that have no knob of the same meaning here.

A name that means the same as a knob is one of its aliases (settings.py). A setting in this table is accepted
if its value asks for nothing (`--speculative-eagle-topk 1`). Any other value is refused, with advice: as a
flag, in a file and as a keyword.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from infer.errors import ConfigError, nearest


def _unbuilt(what: str) -> str:
    return f"{what} is not built yet; leave it out"


_GPUS, _IMAGES = "GPUs share every weight equally; use tensor_parallel_size", _unbuilt("input of images")
_OVERRIDES = _unbuilt("overriding the config of a checkpoint")
_ADAPTIVE = "the number of drafts adapts to the load; leave it out, or use adaptive_speculation"
_DRAFT = "a draft model has the device and the context length of the model; leave it out"
_EXACT = "a draft is kept where the model draws the same token; leave it out"

# setting: the value that asks for nothing, and the advice for other values
FOREIGN: Mapping[str, tuple[object, str]] = {
    "speculative_num_draft_tokens": (
        None,
        "it also counts the token before the drafts; use num_speculative_tokens, which is one less",
    ),
    "speculative_eagle_topk": (1, "drafts are chains; leave it out"),
    "speculative_accept_threshold_single": (1.0, _EXACT),
    "speculative_accept_threshold_acc": (1.0, _EXACT),
    "draft_min": (0, _ADAPTIVE),
    "draft_p_min": (0.75, _ADAPTIVE),
    "ctx_size_draft": (0, _DRAFT),
    "gpu_layers_draft": (None, _DRAFT),
    "device_draft": (None, _DRAFT),
    "enable_expert_parallel": (False, _GPUS),
    "distributed_executor_backend": (None, _GPUS),
    "tensor_split": (None, _GPUS),
    "max_cpu_loras": (None, "adapters stay on the model's device; use max_loras"),
    "cpu_offload_gb": (0, _unbuilt("a model that is partly on the CPU")),
    "limit_mm_per_prompt": (None, _IMAGES),
    "mmproj": (None, _IMAGES),
    "hf_overrides": (None, _OVERRIDES),
    "rope_scaling": (None, _OVERRIDES),
    "cache_type_k": ("auto", "keys and values are of one type; use kv_cache_dtype=int8 or fp8"),
    "cache_type_v": ("auto", "keys and values are of one type; use kv_cache_dtype=int8 or fp8"),
    "n_gpu_layers": (None, "all layers are on one device; use device=cpu or device=cuda"),
    "parallel": (None, "requests share the whole cache, there are no slots; use max_batch_size"),
    "kv_offloading_backend": ("native", "evicted blocks go to host memory; use swap_space"),
    "enable_hierarchical_cache": (False, "use swap_space, the memory for evicted blocks"),
    "hicache_ratio": (None, "use swap_space, the memory for evicted blocks"),
    "trust_remote_code": (False, "code from a checkpoint is never run; leave it out"),
    "load_format": ("auto", "the format is found from the files; leave it out"),
    "tokenizer_mode": ("auto", "there is one tokenizer per model; leave it out"),
    "flash_attn": (False, "use attention_backend=flash"),
    "batch_size": (None, "use max_num_batched_tokens for tokens of a step, max_batch_size for sequences"),
    "ubatch_size": (None, "use max_num_batched_tokens"),
    "n_predict": (None, "each request limits its own output; use max_tokens"),
    "hf_repo": (None, "use model, which takes a hub id (org/name)"),
    "mlock": (False, "weights are read into memory when the model is loaded; leave it out"),
    "compilation_config": (None, "kernels are compiled ahead of time; leave it out, or use_cuda_graphs"),
    "enable_auto_tool_choice": (
        True,
        "tool calls are always parsed; clients that want none send tool_choice 'none'",
    ),
    "enable_reasoning": (True, "reasoning is always separated; to turn that off, use reasoning_parser=none"),
    "enable_sleep_mode": (False, "the server's admin routes load and unload models; leave it out"),
}

SHORT_FLAGS: Mapping[str, str] = {
    "n_gpu_layers": "-ngl", "model_draft": "-md", "ctx_size_draft": "-cd", "gpu_layers_draft": "-ngld",
    "device_draft": "-devd", "parallel": "-np", "tp": "-tp", "pp": "-pp",
}  # fmt: skip
"""Settings for which other engines also have a short flag."""

SCHEMES = (
    "nvfp4", "marlin", "aqlm", "hqq", "torchao", "modelopt", "experts_int8",
)  # fmt: skip
"""Values of `quantization` that only other engines have."""

FORMS = ("auto", "none", "int8", "int4", "fp8", "int4+int8", "fp32", "bf16")
"""The forms in which weights can be kept, on one device or another."""
FORMATS = ("gptq", "awq", "compressed-tensors", "squeezellm", "bitsandbytes", "fp8", "gguf")
"""The formats in which files publish quantized matrices."""
FILE_FORMS = ("mxfp4", "nf4", "fp4", "lut4", "e5m2", "int5", "int6")
"""Forms that only come from files: no weights are rounded to them."""
OTHER_FORMATS = {"gptq_marlin": "gptq", "awq_marlin": "awq", "nf4": "bitsandbytes", "fp4": "bitsandbytes"}
"""Names that flags of other engines have for a format."""
METHODS = ("auto-round", "fbgemm_fp8", "modelopt")  # names that a config may use for one of these formats


def is_quantization(value: str) -> bool:
    """Return True if a value of `quantization` is known here or to another engine; schemes may be added."""
    return value in (*FORMS, *FORMATS, *OTHER_FORMATS, *SCHEMES, *METHODS, *FILE_FORMS)


def refuse_quantization(value: str) -> NoReturn:
    """Raise an error that lists the values that `quantization` may have, on any device and for any file."""
    raise ConfigError(
        f"quantization must be a form, one of {', '.join(FORMS)}, or the format of the file, one of "
        f"{', '.join(FORMATS)}; got {value!r}{hint_of_quantization(value)}"
    )


def hint_of_quantization(value: str) -> str:
    """Return the end of a message: a hint at the value that may have been meant."""
    if value in FILE_FORMS:
        return ", a form that only files have: auto keeps it; leave quantization out"
    if value.startswith(("ct-", "fp8-", "gguf-")):
        names = {"ct": "compressed-tensors", "fp8": "fp8", "gguf": "gguf"}
        name = names[value.partition("-")[0]]
        return (
            f", a scheme of 'infer quantize', whose files are recognised; leave quantization out, or use "
            f"{name}"
        )
    bits = re.findall(r"\d", value)  # a different number of bits is not a misspelling
    found = nearest(value, [each for each in (*FORMS, *FORMATS) if re.findall(r"\d", each) == bits])
    return f"; did you mean {found}?" if found else ""


def check_foreign(name: str, value: object) -> None:
    """Refuse a setting of another engine unless its value asks for nothing."""
    nothing, advice = FOREIGN[name]
    # if the default is 0, "none" means the same; if the default is None, 0 asks for something
    no_number = ("none", "0", "false") if nothing is not None and not nothing else ()
    if str(value).lower() in {str(nothing).lower(), *no_number}:
        return
    allowed = "left out" if nothing is None else nothing
    raise ConfigError(f"{name} must be {allowed}, got {value!r}: {advice}")
