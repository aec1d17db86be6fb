"""From the knobs of speculative decoding to what drafts for an engine.

ngram, suffix     a proposer over texts: nothing to load
draft_model       a second model on the same device, with as many blocks as the first, and a device half
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout
from infer.cache.memory import CacheSize, kv_bytes_per_token
from infer.config.resolve import ResolvedConfig
from infer.config.speculation import MAX_DRAFTS, WINDOW_TOKENS
from infer.engine.draft_model import DraftModel
from infer.engine.speculation import Speculation
from infer.engine.step_costs import measure_step_costs
from infer.errors import ConfigError
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.host_sampling import SyntheticJudge
from infer.execution.torch_device import TorchDevice
from infer.layers.bind import bind
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.loader.random_weights import load_random
from infer.scheduling.scheduler import Scheduler
from infer.speculative.adaptive import DraftLengths, StepCosts
from infer.speculative.ngram import NgramProposer
from infer.speculative.proposer import Proposer
from infer.speculative.suffix import SuffixProposer

logger = logging.getLogger(__name__)

DRAFT_ROWS: Final = 64  # sequences that a model drafts for at once
DRAFT_TOKENS: Final = 2048  # of one order of a model that drafts, which catches up with long texts
HOST_GAP_S: Final = 0.25e-3  # what a GPU waits for the host where steps do not overlap
LOOKUPS: Final[dict[str, type[Proposer]]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


def load_draft(config: ResolvedConfig, loaded: LoadedModel) -> LoadedModel | None:
    """Load the model that drafts, if there is one, beside the one it drafts for."""
    settings = config.settings.speculation
    if settings.draft_model is None:
        return None
    dtype, device = config.settings.load.dtype, str(loaded.device)
    if loaded.source is None:  # weights out of thin air: of a benchmark
        draft = load_random(Path(settings.draft_model), dtype=dtype, device=device)
    else:
        source = resolve_model(settings.draft_model, show_progress=False)
        draft = load_model(source, dtype=dtype, device=device, quantization="auto")
    if draft.config.vocab_size != loaded.config.vocab_size:
        raise ConfigError(
            f"draft_model={settings.draft_model} has {draft.config.vocab_size} tokens and {loaded.name} has "
            f"{loaded.config.vocab_size}: a model can only draft for one with the same vocabulary"
        )
    bind(draft.model, draft.device, deterministic=config.deterministic)()
    return draft


def draft_bytes_per_token(draft: LoadedModel | None, layout: KVLayout) -> int:
    """Return what a token of each of the model's tables takes in the cache of the model that drafts."""
    if draft is None:
        return 0
    model = draft.config
    each = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, draft.dtype.itemsize)
    return each * len(layout.windows)


def make_speculation(
    config: ResolvedConfig,
    loaded: LoadedModel,
    scheduler: Scheduler,
    device: TorchDevice | GpuDevice,
    *,
    draft: LoadedModel | None,
    size: CacheSize,
    layout: KVLayout,
    shape: StateShape,
    costs: StepCosts | None = None,
) -> Speculation | None:
    """Return what gives sequences drafts; None: it is off. `costs` replace this machine's."""
    settings = config.settings.speculation
    if not settings.is_on:
        return None
    vocab_size, proposer, drafter, draft_device = loaded.config.vocab_size, None, None, None
    if draft is not None:
        draft_device = _make_device(config, draft, size, layout, shape)
        drafter = DraftModel(draft_device, scheduler.state, size.num_blocks, max_tokens=DRAFT_TOKENS)
    else:
        proposer = LOOKUPS[
            "ngram" if settings.speculative_method == "auto" else settings.speculative_method
        ]()
    if costs is None:
        gap_s = HOST_GAP_S if config.steps_ahead else 0.0
        costs = measure_step_costs(device, shape, vocab_size=vocab_size, gap_s=gap_s, drafter=draft_device)
        logger.info(
            "steps measured tokens_ms=%s draft_ms=%.2f",
            ",".join(f"{tokens}:{1e3 * seconds:.2f}" for tokens, seconds in costs.pairs),
            1e3 * costs.draft_s,
        )
    if settings.synthetic_acceptance is not None:
        logger.warning(
            "drafts are kept by chance, so the text is wrong: synthetic_acceptance is for benchmarks"
        )
        device.use_judge(SyntheticJudge(settings.synthetic_acceptance))
    return Speculation(
        scheduler,
        DraftLengths(costs),
        proposer,
        drafter,
        max_drafts=settings.max_drafts,
        max_rows=DRAFT_ROWS,
        vocab_size=vocab_size,
        is_adaptive=settings.adaptive_speculation,
        is_synthetic=settings.synthetic_acceptance is not None,
        samples_on_host=not isinstance(device, GpuDevice),
    )


def _make_device(
    config: ResolvedConfig, draft: LoadedModel, size: CacheSize, layout: KVLayout, shape: StateShape
) -> TorchDevice | GpuDevice:
    """Return the device half of the model that drafts, whose layers are all kept by the first table."""
    model = draft.config
    planes = tuple(range(model.num_layers))
    store = KVStore(
        layout=KVLayout(layout.windows, (0,) * model.num_layers, planes, model.num_layers),
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=draft.dtype,
        device=draft.device,
    )
    max_rows = min(DRAFT_ROWS, config.scheduler.max_batch_size)
    if not config.uses_gpu_device:
        return TorchDevice(
            draft.model,
            store,
            shape,
            max_batch_size=max_rows,
            attention_backend=config.backends.attention,
            decode_attention_backend=config.backends.decode_attention,
            record_cpu_step=config.record_cpu_step,
        )
    device = GpuDevice(
        draft.model,
        store,
        shape,
        max_batch_size=max_rows,
        max_tokens=DRAFT_TOKENS,
        max_seq_len=config.max_seq_len,
        use_cuda_graphs=config.use_cuda_graphs,
        attention_backend=config.backends.attention,
        decode_attention_backend=config.backends.decode_attention,
        steps_ahead=MAX_DRAFTS,
        window_tokens=WINDOW_TOKENS,
    )
    device.wait_for_compilers()
    return device
