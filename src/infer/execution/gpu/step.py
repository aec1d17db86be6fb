"""The `StepContext` of a GPU: a ragged batch over the paged store, metadata in device memory.

    tokens      A B | C C C C | D D            first the rows that decode, then the chunks of prompts
    attention   decode kernel | prefill kernel

The model's own kernels write keys and values (`slots`), so `attend` only reads. If all rows decode, the
decode kernel takes the projection and writes them itself (`attend_projected`). Nothing here depends on a
length that the host knows, so a step of decode rows alone can be captured in a CUDA graph and replayed while
sequences grow.

A step with both has two independent kernels, and each leaves most of the GPU idle: a chunk of 128 tokens is a
handful of programs, and decoding rows wait for memory. In a graph they are two branches and run in parallel,
but only if the next kernel is a library's linear, or the selection of rows in the last layer
(models/model.py). Both are launched the ordinary way, after both branches, so the rules of programmatic
dependent launch (kernels/runtime/dispatch.py) need not consider branches.

    backend     rows that decode           chunks of prompts
    auto        CUDA C++, or Triton        Triton; cuDNN for chunks in `dense` (kernels/attention/dense.py)
    triton      Triton                     Triton
    cuda        CUDA C++
    flash                                  PyTorch's FlashAttention if every chunk is fresh, otherwise Triton
    torch_ref   the specification
    invariant   Triton's kernel for prompts, for both: one order of additions, wherever a token is computed

The backend of rows that decode is `DecodeWork.backend` (config/backends.py has the values of the knobs).

The device profile (config/profiles) says which kernel is faster for how many rows.

Shapes:  T tokens, S of them rows that decode, K block tables, N query heads, G kv heads, H head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache

import torch

from infer.cache.kv_store import KVStore
from infer.config.backends import REFERENCE
from infer.errors import ConfigError
from infer.kernels.attention.choice import PROMPT_WAYS, PromptProblem
from infer.kernels.attention.decode import attend_decode, attend_projected
from infer.kernels.attention.decode_cuda import DECODE, PROJECTED, CachedHeads, compile_decode
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.dense import Batch, DenseAttention
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import PrefillChunks, attend_prefill, check_flash
from infer.kernels.delta.paged import recur_paged
from infer.kernels.delta.reference import DeltaRule
from infer.kernels.elementwise.heads import CacheSlots, HeadTransform
from infer.kernels.runtime.choice import choose
from infer.kernels.runtime.dispatch import is_gpu, use_triton
from infer.kernels.runtime.profiles import device_profile, gpu_of
from infer.layers.attention import AttentionLayer, StepContext
from infer.models.config import ModelConfig

logger = logging.getLogger(__name__)


class DeviceAttention:
    """The attention of all steps of a device: its backends and their memory."""

    def __init__(
        self, config: ModelConfig, store: KVStore, backends: tuple[str, str], block_size: int, *,
        max_rows: int, max_tokens: int, max_len: int,
    ) -> None:  # fmt: skip
        """`backends`: the knobs for prompts and for rows that decode."""
        self.backend, device = backends[0], store.device
        chosen = choose_backend(backends, config, store, block_size)
        # compilers start here, and run in the background until `wait`
        pool = ThreadPoolExecutor(1, "compile-attention")
        self._compiled = pool.submit(compile_backend, chosen, config, store, block_size, max_rows)
        pool.shutdown(wait=False)
        self.work = DecodeWork(
            max_rows=max_rows, max_len=max_len, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, device=device, backend=chosen,
        )  # fmt: skip
        attending = [layer for layer in range(config.num_layers) if not config.has_state(layer)]
        self.windows = tuple(dict.fromkeys(map(config.window, attending)))
        self.dense: DenseAttention | None = None
        sees_all = self.windows == (None,) and config.delta is None and config.has_plain_scores
        longest = PromptProblem(
            min(max_tokens, max_len), config.num_heads, config.head_dim, store.dtype, self.backend,
            device_profile(device).attention,
            no_cudnn="" if sees_all else "for models whose layers all see all positions, with plain scores",
        )  # fmt: skip
        if choose(PROMPT_WAYS, longest) == "cudnn":
            self.dense = DenseAttention(
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                scale=config.scale, dtype=store.dtype, device=device, max_tokens=max_tokens, max_len=max_len,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait for the compilers; raise ConfigError if the backend asked for cannot be compiled."""
        self.work.backend = self._compiled.result()

    @property
    def names(self) -> tuple[str, str]:
        """The backends that compute attention of prompts, and of rows that decode."""
        prompts = "cudnn+triton" if self.dense is not None else self.backend.replace("auto", "triton")
        return prompts, self.work.backend.replace("auto", "cuda+triton")


class DeviceStep(StepContext):
    """One step: the positions of its tokens, the slots of their keys and values, and what each may see."""

    def __init__(
        self, store: KVStore, tables_KRB: torch.Tensor, work: DecodeWork, *, block_size: int,
        positions_T: torch.Tensor, slots_KT: torch.Tensor, rows_S: torch.Tensor, lens_S: torch.Tensor,
        chunks: PrefillChunks | None = None, dense: tuple[DenseAttention, Sequence[Batch]] | None = None,
        windows: Sequence[int | None] = (None,), backend: str = "triton", has_shared_rows: bool = False,
        tree_2S: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`has_shared_rows`: several tokens may share a row of the tables, and see each other.

        `tree_2S`: which of them each token sees, if drafts may be trees (kernels/attention/decode.py).
        """
        self._store, self._work = store, work
        self._tables = tables_KRB.unbind()  # tables [R, B], one per block table of the layout
        self._block_size = block_size
        self.positions, self._slots = positions_T, slots_KT.unbind()
        self._rows_S, self._lens_S = self._decoding = rows_S, lens_S
        self._chunks, self._dense = chunks, dense
        self._runs_S4: torch.Tensor | None = None  # rows that decode, for layers with a state
        self._backend, self._has_shared_rows, self._tree_2S = backend, has_shared_rows, tree_2S
        self._tokens: PrefillChunks | None = None  # rows that decode, for the kernel of chunks
        if backend == "invariant" and len(rows_S) and use_triton(lens_S):
            self._tokens = PrefillChunks.from_rows(rows_S, lens_S)
            self._rows_S = rows_S[:0]
        elif len(rows_S):
            for window in windows:
                work.plan(rows_S, lens_S, window=window)
        self._num_rows = self._rows_S.shape[0]

    def slots(self, layer: int) -> CacheSlots:
        """Return the cache of one layer, and the slots of this step's tokens in it."""
        keeps = self._dense is not None  # cuDNN's attention reads no cache
        return self._store.slots(layer, self._slots, keeps=keeps)

    def attend_projected(
        self, layer: AttentionLayer, qkv_TX: torch.Tensor, transform: HeadTransform
    ) -> torch.Tensor | None:
        """Run one kernel from the projection to the output, if every token is a row that decodes."""
        num_rows, store, number = self._num_rows, self._store, layer.number
        decodes_only = self._chunks is None and self._dense is None and 0 < num_rows == qkv_TX.shape[0]
        if not decodes_only or self._backend == "invariant" or not use_triton(qkv_TX):
            return None
        if self._work.backend == REFERENCE or store.fixed[number] is not None:
            return None
        if layer.is_shared or self._has_shared_rows:  # the kernel reads nothing that the step writes
            return None
        if not self._work.choose(num_rows, has_codes=False, decodes_only=True).is_projected:
            return None
        kv = self._kv(layer)
        return attend_projected(qkv_TX, transform, kv, self._rows_S, self._lens_S, self._work)

    def _kv(self, layer: AttentionLayer) -> PagedKV:
        """Return the cache of one layer, as its tokens see it."""
        store, (number, scale, window, softcap, sinks_N, _) = self._store, layer
        tables_RB = self._tables[store.tables[number]]
        keys, values, scales = store.keys[number], store.values[number], store.scales[number]
        return PagedKV(keys, values, tables_RB, self._block_size, scale, window, scales, softcap, sinks_N)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Attend to the cache, which already holds this step's own keys and values."""
        if self._dense is not None and self._chunks is None and not self._num_rows:
            return self._dense[0].attend(q_TNH, k_TGH, v_TGH, self._dense[1])
        kv, num_rows = self._kv(layer), self._num_rows
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        branch = self._branch(q_TNH)
        if branch is not None:
            branch.wait_stream(torch.cuda.current_stream())
        if num_rows:
            out_SNH = out_TNH[:num_rows]
            rows = self._rows_S, self._lens_S, self._work
            attend_decode(q_TNH[:num_rows], kv, *rows, out=out_SNH, tree_2S=self._tree_2S)
        fresh_slots_T = self._slots[self._store.tables[layer.number]] if self._backend == "flash" else None
        with nullcontext() if branch is None else torch.cuda.stream(branch):
            for chunks in filter(None, (self._tokens, self._chunks)):
                attend_prefill(
                    q_TNH, kv, chunks, out=out_TNH, fresh_slots_T=fresh_slots_T,
                    invariant=self._backend == "invariant",
                )  # fmt: skip
        if branch is not None:
            torch.cuda.current_stream().wait_stream(branch)
        if self._dense is not None:
            dense, batches = self._dense
            out_TNH = dense.attend(q_TNH, k_TGH, v_TGH, batches, out=out_TNH)
        return out_TNH

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Advance the recurrent states of all rows; see layers/attention.py."""
        cache, tables_RB = self._store.states[layer], self._tables[self._store.tables[layer]]
        assert cache is not None, f"layer {layer} has no states"
        rows_S, lens_S = self._decoding
        if self._runs_S4 is None:
            self._runs_S4 = PrefillChunks.from_rows(rows_S, lens_S).tiles_W4
        runs_S4, chunks = self._runs_S4, self._chunks
        return recur_paged(
            rule, cache, tables_RB, self._block_size, (rows_S, lens_S), runs_S4, chunks, qkv_TC, b_TV, a_TV
        )

    def _branch(self, q_TNH: torch.Tensor) -> torch.cuda.Stream | None:
        """Return a stream for chunks of prompts in parallel to rows that decode; None: after the rows."""
        has_both = self._num_rows > 0 and self._chunks is not None
        if not has_both or len(q_TNH) <= self._work.profile.branch_from or not is_gpu(q_TNH.device):
            return None
        return _branch_of(q_TNH.device) if torch.cuda.is_current_stream_capturing() else None


class FollowedStep(StepContext):
    """A step that a draft head only follows: keys and values are cached, and nothing attends to them."""

    def __init__(self, store: KVStore, positions_T: torch.Tensor, slots_KT: torch.Tensor) -> None:
        self._store, self.positions, self._slots_KT = store, positions_T, slots_KT

    def slots(self, layer: int) -> CacheSlots:
        """Return the cache of one layer, and the slots of the step's tokens in it."""
        return self._store.slots(layer, self._slots_KT)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Return a tensor of attention's shape, which nothing reads."""
        return q_TNH


def choose_backend(backends: tuple[str, str], config: ModelConfig, store: KVStore, block_size: int) -> str:
    """Choose the backend of rows that decode; `backends`: the knobs for prompts and for rows that decode.

    `auto` means Triton if CUDA C++ does not support the model, the cache or the GPU; `cuda` then raises.
    """
    prompts, asked = backends
    if prompts == "flash":
        check_flash(store.device, config.head_dim)
        _check_plain_scores("attention_backend=flash", config)
    if asked not in ("auto", "cuda"):
        return asked
    if asked == "cuda":
        _check_plain_scores("attention_backend=cuda", config)
    elif not config.has_plain_scores:
        return "triton"
    if asked == "auto" and not is_gpu(store.device):
        return "triton"
    heads = _cached_heads(config, store, block_size)
    return _or_triton(asked, lambda: heads.check(gpu_of(store.device)))


def _check_plain_scores(asked: str, config: ModelConfig) -> None:
    """Raise ConfigError if the scores have caps or sinks, or heads have several sizes."""
    if not config.has_plain_scores:
        raise ConfigError(
            f"{asked} cannot be used with {config.family}, whose scores have a soft cap or sinks, or whose "
            "layers have heads of several sizes; leave it out, or use triton"
        )


def compile_backend(chosen: str, config: ModelConfig, store: KVStore, block_size: int, max_rows: int) -> str:
    """Compile the chosen backend, and return it; without a compiler, `auto` means Triton.

    `max_rows`: the most rows of a step that decodes or verifies drafts, whose tokens count as rows.
    """
    if chosen not in ("auto", "cuda"):
        return chosen
    heads = _cached_heads(config, store, block_size)

    def run() -> None:
        is_whole = chosen == "cuda" or heads.kept_as is not None
        projected_heads = device_profile(store.device).attention.projected_heads
        if is_whole or max_rows * config.num_kv_heads > projected_heads:
            compile_decode(DECODE, heads, store.device)
        compile_decode(PROJECTED, heads, store.device, has_norm=config.qk_norm)

    return _or_triton(chosen, run)


def _cached_heads(config: ModelConfig, store: KVStore, block_size: int) -> CachedHeads:
    kept_as = None if store.scales[0] is None else store.keys[0].dtype
    return CachedHeads(
        store.dtype, config.num_heads, config.num_kv_heads, config.head_dim, block_size, kept_as
    )


def _or_triton(asked: str, work: Callable[[], None]) -> str:
    """Return the backend asked for if `work` succeeds, or Triton if it fails and the backend is `auto`."""
    try:
        work()
    except ConfigError as error:
        if asked != "auto":
            raise
        logger.info("all rows that decode are computed by Triton: %s", error)
        return "triton"
    return asked


@lru_cache(maxsize=16)
def _branch_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
