"""The line that is logged when an engine is built: its limits, its kernels and its number formats.

    engine built model=SmolLM2-135M-Instruct max_seq_len=8192 max_batch_size=64 kv_cache=5.6GiB
        kv_cache_tokens=130112 prefix_caching=on preemption=recompute device=cpu threads=4 attention=c
        decode_attention=c mlp=kernels weights="Q4_1+Q8_0 92.0MiB, kept as int4 ..." products=exact
        dtype=float32 kv_cache_dtype=float32 speculation=ngram,8

Read it first to find out why a prompt is refused, why requests wait, or why a step is slow. A setting that
another setting turns off is named at the end, as `note="..."`.
"""

from __future__ import annotations

import torch

from infer.cache.memory import CacheSize
from infer.config.knobs import format_bytes
from infer.config.resolve import ResolvedConfig
from infer.config.settings import FAST_PRODUCTS_COST

PRODUCTS = {"exact": "exact", "fast": f'"fast, activations in 8 bits: {FAST_PRODUCTS_COST}"'}


def describe_engine(model: str, config: ResolvedConfig, size: CacheSize, attention: tuple[str, str]) -> str:
    """Return the line: a fixed text and the decisions of the start as key=value.

    `attention`: the kernels that compute attention for prompts, and for decoding rows.
    """
    pairs = {
        "model": model,
        "max_seq_len": config.max_seq_len,
        "max_batch_size": config.scheduler.max_batch_size,
        "kv_cache": format_bytes(size.num_bytes).replace(" ", ""),
        "kv_cache_tokens": size.num_tokens,
        **_host_tier(size),
        "prefix_caching": "on" if config.use_prefix_caching else "off",
        "preemption": _preemption(config),
        **_computer(config),
        "attention": attention[0],
        "decode_attention": attention[1],
        **({"model_impl": config.model_impl} if config.model_impl != "infer" else {}),
        **({"mlp": config.backends.mlp} if config.model_impl == "infer" else {}),
        "weights": _weights(config),
        **({"products": PRODUCTS[found]} if (found := products(config)) else {}),
        "dtype": config.dtype,
        "kv_cache_dtype": '"fp8, scales of the checkpoint"'
        if config.has_fixed_kv_scales
        else kv_cache_dtype(config),
        **_speculation(config),
    }
    line = "engine built " + " ".join(f"{key}={value}" for key, value in pairs.items())
    notes = [f"{name} is {why}" for name, why in config.overruled.items()]
    return f'{line} note="{"; ".join(notes)}"' if notes else line


def _weights(config: ResolvedConfig) -> str:
    """Return the form of the weights; for a quantized checkpoint also its format and how it was kept."""
    form = config.dtype if config.weights in ("as stored", "none") else config.weights
    if config.kept_as:
        return f'"{", ".join(filter(None, (config.published_as, config.kept_as)))}"'
    if not config.published_as:
        return form
    became = f"kept as {form}" if form.startswith("int") else f"unpacked to {config.dtype}"
    return f'"{config.published_as}, {became}"'


def products(config: ResolvedConfig) -> str:
    """Return how integer products on a CPU round activations: exact or fast; "": there are none."""
    if config.device.startswith("cuda") or not config.weights.startswith("int"):
        return ""
    return "fast" if config.settings.run.cpu_products == "fast" else "exact"


def kv_cache_dtype(config: ResolvedConfig) -> str:
    """Return the number format of keys and values."""
    kept_as = config.settings.cache.kv_cache_dtype.removesuffix("_per_token_head")
    return config.dtype if kept_as in ("auto", "none") else kept_as


def _computer(config: ResolvedConfig) -> dict[str, object]:
    load, found = config.settings.load, dict[str, object](device=config.device)
    if config.device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(config.device).replace(" ", "_")
    else:
        found["threads"] = torch.get_num_threads()
    for name, number in (("ranks", load.tensor_parallel_size), ("stages", load.pipeline_parallel_size)):
        if number > 1:
            found[name] = f'"{number}, which share {load.device}"' if load.names_gpu else number
    return found


def _host_tier(size: CacheSize) -> dict[str, object]:
    """Return the size of the host blocks, if there are any."""
    num_bytes = size.num_host_blocks * size.bytes_per_block
    return {"host_cache": format_bytes(num_bytes).replace(" ", "")} if num_bytes else {}


def _speculation(config: ResolvedConfig) -> dict[str, object]:
    """Return the speculative method and the most drafts of a sequence; empty if it is off."""
    settings = config.settings.speculation
    return {"speculation": f"{settings.method},{settings.max_drafts}"} if settings.is_on else {}


def _preemption(config: ResolvedConfig) -> str:
    """Return the preemption mode; `auto` without host memory for swapping is recompute."""
    mode = config.scheduler.preemption
    return "recompute" if mode == "auto" and not config.settings.cache.has_host_memory else mode
