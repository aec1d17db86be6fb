"""Steps as CUDA graphs: hundreds of kernel launches become one.

Launching a kernel costs the CPU several microseconds, and a small model's layer computes hardly longer. A
*graph* is the recorded list of all launches of a step, and replaying it is a single call. A recording freezes
addresses, grid sizes and Python's branches. So a step is captured once per *size*, rounded up to one of a
few. It reads all changing values from device memory (execution/gpu/rows.py), and the rest of the size is
padding, for which every kernel does nothing.

    37 rows that decode           ──► size (40, 0):  rows [12, 3, 7, ..., -1, -1, -1] ──► replay
    20 rows, 100 prompt tokens    ──► size (32, 128)
    30 rows, 32 prompt tokens     ──► size (32, 32), few enough for the kernels that decode
    3 rows that verify 4 drafts   ──► size (16, 0, windows): each of their 15 tokens is a row of its own
    3 rows that draft 4 tokens    ──► size (4, 0, 4 drafts): four turns, each from the ids of the last
    20 rows, 900 prompt tokens    ──► size (64, 1024) of a small model; no graph of a large one
    170 rows, 800 prompt tokens   ──► size (192, 832), a short step of a busy server

A step is two graphs: the *forward*, from rows to logits, and the *sampler*, from logits to ids. The host may
fill token masks while the forward runs, and launches the sampler when they are ready. A draft head adds a
third graph, the *follower*, which is skipped where nothing is to be drafted.

A server captures all sizes before it is ready (`prepare`); otherwise a size is captured when it is first
needed. All graphs share one memory pool, because only one runs at a time. The pool begins as one block of the
planned size, which the allocator splits and joins as tensors come and go. Allocated piece by piece, it would
need a block for each size of tensor, and twice the memory. The largest step is captured first, so that the
others find room in its memory.

Prompts are worth a graph as long as a layer takes longer to launch than to compute (`most_tokens`): launching
a layer costs the CPU half a millisecond, and computing a thousand tokens in a layer of a 0.6B model costs a
large GPU a tenth of that. Padding is computed like any other token, so these sizes are close together. Only
`prepare` captures them: launching such a step kernel by kernel takes less time than capturing it.

The *short steps* of a large model, in which a busy server computes its prompts (scheduling/scheduler.py), are
captured too. All of them have the same number of tokens, rows included, and they follow each other closely.
Without graphs, streams would wait for the host, which launches a layer hardly faster than the GPU computes
it.

PyTorch's own capture context first returns all cached memory, on the device and in pinned host memory, and
later steps wait a quarter of a second to get it back. Here memory is returned only if a capture runs out of
it.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from infer.config.profiles.profile import GraphProfile
from infer.config.speculation import WINDOW_TOKENS
from infer.models.config import ModelConfig

logger = logging.getLogger(__name__)

DRAFT_SIZES = (1, 2, 4, 8, 16, 32)  # captured numbers of rows that draft; the largest batch is one more


class StepSize(NamedTuple):
    """The room of a captured step."""

    num_rows: int  # rows that decode; with `has_windows`, tokens of rows that verify drafts
    num_tokens: int  # tokens of prompts
    has_windows: bool = False
    has_adapters: bool = False  # True: some rows have adapters; False: the step does not even look
    num_drafts: int = 0  # drafts of each row, made in turns that go on from each other's ids
    has_trees: bool = False  # True: these drafts are trees


class CapturedStep(NamedTuple):
    """A step to be replayed, and the memory to which its forward writes the logits."""

    forward: torch.cuda.CUDAGraph
    sampler: torch.cuda.CUDAGraph
    follower: torch.cuda.CUDAGraph | None  # None: there is no draft head
    logits_SV: torch.Tensor  # memory that belongs to the graphs (`borrow`)


def decode_sizes(max_rows: int, profile: GraphProfile) -> list[int]:
    """Return the captured numbers of rows that decode; the last one holds the largest batch."""
    sizes = [size for size in profile.decode_rows if size < max_rows]
    sizes += range(profile.decode_rows[-1] + profile.row_step, max_rows, profile.row_step)
    return [*sizes, max_rows]


def most_tokens(config: ModelConfig, max_tokens: int, profile: GraphProfile) -> int:
    """Return the most prompt tokens for which a graph of this model is worth it.

    They are at most half of `max_tokens`, so that graphs fit into the planned memory for activations.
    A draft head computes no prompts.
    """
    if not max_tokens:
        return 0
    weights = config.all_layer_weights / config.num_layers
    limit = min(profile.launched_layer / weights, max_tokens / 2)
    fitting = (tokens for tokens in profile.prompt_tokens if tokens <= limit)
    return max(fitting, default=profile.mixed_tokens[-1])


def short_step(config: ModelConfig, max_tokens: int, num_tokens: int, profile: GraphProfile) -> int:
    """Return `num_tokens` if short steps need sizes of their own, because no other size fits; otherwise 0.

    Small GPUs get none: they have no room for that many streams, and graphs take memory from the cache.
    """
    is_wanted = most_tokens(config, max_tokens, profile) < num_tokens <= max_tokens // profile.short_parts
    return num_tokens if is_wanted else 0


def captured_tokens(config: ModelConfig, max_tokens: int, num_tokens: int, profile: GraphProfile) -> int:
    """Return the prompt tokens of the largest captured step; a short step has `num_tokens` in all."""
    short = short_step(config, max_tokens, num_tokens, profile)
    return max(most_tokens(config, max_tokens, profile), short - profile.row_step)


class StepGraphs:
    """One captured step per size.

    `forward` launches the kernels of a step up to the logits and returns the logits; `sample` launches the
    kernels that sample them, and `follow` lets a draft head see the step. `blank` fills the inputs of a step
    with padding. `pool_bytes`: size of the pool's first block. `short_step`: the tokens of a short
    step, rows included; 0: none. `window_tokens`: the most tokens of rows that verify drafts; 0: none.
    `has_adapters`: steps without prompts are also captured for rows with adapters. `num_drafts`: the most
    drafts of a row on a device that only drafts; 0: on others. `drafts_trees`: drafts are usually trees, and
    turns of chains are captured when they are first needed. `profile` has the sizes.
    """

    def __init__(
        self, forward: Callable[[StepSize], torch.Tensor], sample: Callable[[StepSize, torch.Tensor], object],
        blank: Callable[[], None], *, follow: Callable[[StepSize], object] | None = None, max_rows: int,
        max_tokens: int, captures: bool, pool_bytes: int = 0, short_step: int = 0, window_tokens: int = 0,
        has_adapters: bool = False, num_drafts: int = 0, drafts_trees: bool = False, profile: GraphProfile,
    ) -> None:  # fmt: skip
        self._profile = profile
        self._forward, self._sample, self._blank, self._follow = forward, sample, blank, follow
        self.warm_up: Callable[[StepSize], object] = lambda size: sample(size, forward(size))
        self._captures = captures
        self._logits_SV: torch.Tensor | None = None  # logits of a forward without a graph, until sampled
        self.decode_rows = decode_sizes(max_rows, profile)
        self._mixed_rows = [*(rows for rows in profile.mixed_rows if rows < max_rows), max_rows]
        self._mixed_tokens = [tokens for tokens in profile.mixed_tokens if tokens <= max_tokens]
        self._prompt_tokens = [tokens for tokens in profile.prompt_tokens if tokens <= max_tokens]
        self._many_tokens = [tokens for tokens in profile.many_tokens if tokens <= max_tokens]
        self._many_rows = [*(rows for rows in profile.many_rows if rows < max_rows), max_rows]
        self._window_tokens = decode_sizes(window_tokens, profile) if window_tokens else []
        self._draft_rows = [*(rows for rows in DRAFT_SIZES if rows < max_rows), max_rows]
        self._short_step = short_step
        row_step = profile.row_step
        short_rows = range(row_step, min(max_rows, short_step - row_step) + 1, row_step)
        self._short_sizes = [StepSize(rows, short_step - rows) for rows in short_rows]
        sizes = [
            *(StepSize(rows, 0) for rows in self.decode_rows),
            *(StepSize(rows, tokens) for tokens in self._mixed_tokens for rows in self._mixed_rows),
            *(StepSize(0, tokens) for tokens in self._prompt_tokens),
            *(StepSize(rows, tokens) for tokens in self._many_tokens for rows in self._many_rows),
            *self._short_sizes,
            *(StepSize(tokens, 0, has_windows=True) for tokens in self._window_tokens),
        ]
        if num_drafts:  # rows of a device that drafts never decode, alone or next to a prompt
            sizes = [s for s in sizes if s.num_tokens and s.num_rows in (0, self._mixed_rows[0])]
            for (fewer, rows), count in product(pairwise([0, *self._draft_rows]), range(1, num_drafts + 1)):
                if not drafts_trees or (fewer + 1) * (count + 1) <= WINDOW_TOKENS:  # a step has room for them
                    sizes.append(StepSize(rows, 0, num_drafts=count, has_trees=drafts_trees))
        if has_adapters:
            sizes += [size._replace(has_adapters=True) for size in sizes if not size.num_tokens]
        self.sizes = sorted(sizes, key=sum, reverse=True)
        self._graphs: dict[StepSize, CapturedStep] = {}
        self._uncaptured: set[StepSize] = set()
        self.is_agreed = True  # True: all ranks have captured the same sizes; False: this is not known
        self.is_replaying = False  # True: the last forward was a captured graph
        self._pool: Any = None  # handle of the memory pool
        self._pool_bytes, self._has_block = pool_bytes, False  # bytes of its first block; is it allocated?

    def size_for(self, num_rows: int, num_tokens: int) -> StepSize | None:
        """Return the smallest size with room for rows and prompt tokens; None: no graph has that many."""
        if not num_tokens:
            return StepSize(_at_least(self.decode_rows, num_rows), 0)
        if not self._mixed_tokens or num_tokens > self._mixed_tokens[-1]:
            return self._large_size(num_rows, num_tokens)
        return StepSize(_at_least(self._mixed_rows, num_rows), _at_least(self._mixed_tokens, num_tokens))

    def window_size_for(self, num_tokens: int) -> StepSize | None:
        """Return the smallest size with room for the tokens of rows that verify drafts; None: too many."""
        if not self._window_tokens or num_tokens > self._window_tokens[-1]:
            return None
        return StepSize(_at_least(self._window_tokens, num_tokens), 0, has_windows=True)

    def padded_window(self, num_tokens: int) -> int:
        """Return the number of tokens that the windows of a step are padded to."""
        size = self.window_size_for(num_tokens)
        return num_tokens if size is None else size.num_rows

    def draft_size_for(self, num_rows: int, num_drafts: int, *, is_tree: bool = False) -> StepSize:
        """Return the smallest size with room for rows that draft."""
        rows = _at_least(self._draft_rows, num_rows)
        return StepSize(rows, 0, num_drafts=num_drafts, has_trees=is_tree)

    def is_captured(self, size: StepSize) -> bool:
        """True if a step of this size has been captured."""
        return size in self._graphs

    def padded_rows(self, num_rows: int) -> int:
        """Return the number of rows that `num_rows` decoding rows are padded to, captured or not.

        Their kernels are compiled ahead of time, for few numbers of rows.
        """
        return _at_least(self.decode_rows, num_rows) if num_rows else 0

    def _large_size(self, num_rows: int, num_tokens: int) -> StepSize | None:
        """Return the size for many prompt tokens; None unless its graph has been captured."""
        sizes = self._many_tokens if num_rows else self._prompt_tokens
        if sizes and num_tokens <= sizes[-1]:
            rows = _at_least(self._many_rows, num_rows) if num_rows else 0
            size = StepSize(rows, _at_least(sizes, num_tokens))
        else:
            rows = -(-num_rows // self._profile.row_step) * self._profile.row_step
            size = StepSize(rows, self._short_step - rows)
            padding = size.num_tokens - num_tokens
            if size not in self._short_sizes or not 0 <= padding < self._profile.most_padding:
                return None
        is_known = size in self._graphs and self.is_agreed
        return size if is_known or not self._captures else None

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Keep the graphs that all ranks have: ranks that run a step in different ways never meet.

        `gather` returns the bytes of every rank.
        """
        for size, *found in zip(self.sizes, *gather(bytes(map(self.is_captured, self.sizes))), strict=False):
            if not all(found):
                self._graphs.pop(size, None)
                self._uncaptured.add(size)
        self.is_agreed = True

    def ensure(self, size: StepSize) -> bool:
        """Capture a size unless this was tried before; True: it was tried now, so the inputs are padding."""
        if not self._captures or size in self._graphs or size in self._uncaptured:
            return False
        try:
            self._capture(size)
        except Exception as error:  # out of memory, or a kernel that does not compile: the step may still run
            if isinstance(error, torch.AcceleratorError):
                torch.cuda.synchronize()  # raises if the device is lost, and not if it only refused a capture
            logger.exception("steps of %s run kernel by kernel: they cannot be captured into a graph", size)
            self._uncaptured.add(size)
        return True

    def forward(self, size: StepSize) -> None:
        """Launch a step of this size over the current inputs, up to its logits; call `ensure` before.

        Call `sample` after it, with no other step between the two.
        """
        captured = self._graphs.get(size)
        self.is_replaying = captured is not None
        if captured is None:
            self._logits_SV = None  # logits of a step that failed before it was sampled
            self._logits_SV = self._forward(size)
        else:
            captured.forward.replay()

    def sample(self, size: StepSize) -> torch.Tensor:
        """Launch the sampler of the step whose forward was launched last.

        Return the sampled logits, which must be read in the same stream before the next step.
        """
        captured = self._graphs.get(size)
        if captured is None:
            logits_SV, self._logits_SV = self._logits_SV, None
            assert logits_SV is not None, "a step is sampled once, after its forward"
            self._sample(size, logits_SV)
            return logits_SV
        captured.sampler.replay()
        return captured.logits_SV

    def follow(self, size: StepSize) -> None:
        """Let the draft head, if there is one, see the last sampled step."""
        captured = self._graphs.get(size)
        if captured is None:
            if self._follow is not None:
                self._follow(size)
        elif captured.follower is not None:
            captured.follower.replay()

    def prepare(self) -> bool:
        """Capture the next size; False: none is left."""
        return any(self.ensure(size) for size in self.sizes)

    def _capture(self, size: StepSize) -> None:
        """Run a step of padding, which compiles its kernels and changes nothing; then record it."""
        self._blank()
        self.warm_up(size)
        try:
            self._graphs[size] = self._record(size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._graphs[size] = self._record(size)

    def _record(self, size: StepSize) -> CapturedStep:
        torch.cuda.synchronize()
        with _no_garbage_collection(), torch.cuda.stream(_stream_of(torch.cuda.current_device())):
            with self._recording() as forward:
                self._take_block()
                logits_SV = self._forward(size)
            with self._recording() as sampler:  # the logits are held, so no other tensor gets their memory
                self._sample(size, logits_SV)
            follower = None
            if self._follow is not None:
                with self._recording() as follower:
                    self._follow(size)
            return CapturedStep(forward, sampler, follower, borrow(logits_SV))

    def _take_block(self) -> None:
        """Allocate the pool's first block; without room for it, the pool grows piece by piece."""
        if self._has_block or not self._pool_bytes:
            return
        num_bytes, self._pool_bytes = self._pool_bytes, 0  # not tried again if there is no room
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda")  # freed at once, and kept by the pool
        self._pool_bytes, self._has_block = num_bytes, True

    @contextmanager
    def _recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with suppress(Exception):  # the first error is worth more than this one
                graph.capture_end()
            if not self._graphs:  # a pool ends with the last graph in it
                self._pool, self._has_block = None, False
            raise
        graph.capture_end()


def borrow(x: torch.Tensor) -> torch.Tensor:
    """Return a view of GPU memory that does not keep it allocated: other graphs may use it in turn."""
    itemsize = x.element_size()
    memory = SimpleNamespace(
        __cuda_array_interface__={
            "version": 3,
            "shape": tuple(x.shape),
            "strides": tuple(stride * itemsize for stride in x.stride()),
            "typestr": f"<i{itemsize}",
            "data": (x.data_ptr(), False),
        }
    )
    return torch.as_tensor(memory, device=x.device).view(x.dtype)


@lru_cache(maxsize=16)
def _stream_of(device: int) -> torch.cuda.Stream:
    """Return the one stream of all captures: cuBLAS keeps memory for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing old graphs during a capture, which CUDA would refuse."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return sizes[bisect_left(sizes, wanted)]
