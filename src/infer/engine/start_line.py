"""The one line that a start logs about an engine: what fits into it, and what computes it.

    engine built model=SmolLM2-135M-Instruct max_seq_len=8192 max_batch_size=64 kv_cache=5.6GiB
        kv_cache_tokens=130112 prefix_caching=on preemption=recompute device=cpu threads=4 attention=c
        decode_attention=c mlp=kernels weights="Q4_1+Q8_0 92.0MiB, kept as int4 ..." products=exact
        dtype=float32 kv_cache_dtype=float32 speculation=ngram,8

It answers first why a prompt is refused, why requests wait, and why a step is slow. A setting that another
setting turns off is named at the end, as `note="..."`.
"""

from __future__ import annotations

import torch

from infer.cache.memory import CacheSize, format_bytes
from infer.config.resolve import ResolvedConfig
from infer.config.settings import FAST_PRODUCTS_COST

PRODUCTS = {"exact": "exact", "fast": f'"fast, activations in 8 bits: {FAST_PRODUCTS_COST}"'}


def describe_engine(
    model: str, config: ResolvedConfig, size: CacheSize, *, attention: tuple[str, str]
) -> str:
    """Return the line: a fixed text and what a start has decided, as key=value.

    `attention` names what computes it: for prompts, and for rows that decode.
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
    """The form of the weights; for a quantized checkpoint also what it holds and what became of that."""
    form = config.dtype if config.weights in ("as stored", "none") else config.weights
    if config.kept_as:
        return f'"{", ".join(filter(None, (config.published_as, config.kept_as)))}"'
    if not config.published_as:
        return form
    became = f"kept as {form}" if form.startswith("int") else f"unpacked to {config.dtype}"
    return f'"{config.published_as}, {became}"'


def products(config: ResolvedConfig) -> str:
    """The way integer products round activations on a CPU: exact or fast; empty where there are none."""
    if config.device.startswith("cuda") or not config.weights.startswith("int"):
        return ""
    return "fast" if config.settings.run.cpu_products == "fast" else "exact"


def kv_cache_dtype(config: ResolvedConfig) -> str:
    """The number format in which keys and values are kept."""
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
            found[name] = f'"{number}, which share {load.device}"' if ":" in load.device else number
    return found


def _host_tier(size: CacheSize) -> dict[str, object]:
    """The blocks in host memory, if there are any."""
    num_bytes = size.num_host_blocks * size.bytes_per_block
    return {"host_cache": format_bytes(num_bytes).replace(" ", "")} if num_bytes else {}


def _speculation(config: ResolvedConfig) -> dict[str, object]:
    """The method that proposes drafts, and their largest number; nothing where there are none."""
    settings = config.settings.speculation
    return {"speculation": f"{settings.method},{settings.max_drafts}"} if settings.is_on else {}


def _preemption(config: ResolvedConfig) -> str:
    """The mode; `auto` without host memory to swap to is recompute."""
    mode = config.scheduler.preemption
    return "recompute" if mode == "auto" and not config.settings.cache.has_host_memory else mode
