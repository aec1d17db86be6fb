"""Preparations for the first step: compiled kernels, loaded libraries, captured graphs.

    compile   every kernel that a step of any size needs, unless it is in Triton's cache
    try       steps of padding that are never captured, because libraries choose and load kernels by size;
              also some rare kinds of orders (rare_orders.py)
    capture   the sizes that are graphs (graphs.py), while cuDNN makes its plans

A step of padding reads nothing from the cache and writes nothing to it. It runs on a *view* of the model with
two layers of each kind, the first and the last. These need the same kernels and memory as all layers, in a
fraction of the time. The model itself is not touched, so nothing here disturbs a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch

from infer.cache.layout import TransferKind
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import StepSize
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.sending import reserve_pinned
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks
from infer.kernels.runtime.compile_ahead import compile_once, compiling_ahead
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.sampling.logprob_table import logprob_table
from infer.models.model import Model

logger = logging.getLogger(__name__)


class WarmUp:
    """Prepares a GPU's device half for its steps, a piece at a time."""

    def __init__(self, device: GpuDevice) -> None:
        self._device, self.launcher = device, device.launcher
        backend = self.launcher.attention.backend
        self._pads = is_gpu(self.launcher.device) and backend != "flash"  # flash cannot attend to padding
        self.phases: dict[str, float] = {}  # seconds that `prepare` has taken, by what was prepared
        self._preparations = self._prepare()
        self.launcher.graphs.warm_up = self._warm_up

    @cached_property
    def _ends(self) -> Model:
        """A view of the model with the first and the last layer of each kind."""
        model = _whole(self.launcher)
        kinds = _kinds(model)
        ends = {
            place for kind in kinds for place in (kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind))
        }
        return model.with_layers(sorted(ends))

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Prepare one piece of what steps need to run without waiting; False: all is done.

        A server calls it until all is done, and only then is ready. In a program that generates only once,
        each step prepares what it needs itself.
        """
        start = time.perf_counter()
        with self.launcher.alone():
            phase = next(self._preparations, None)
        if phase is not None:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start
        return phase is not None

    def _prepare(self) -> Iterator[str]:
        """Prepare everything that a step can need; yield the name of the phase after each piece."""
        launcher = self.launcher
        if self._pads:
            self.compile()
            yield "compile"
            launcher.rows.send_padding()
            launcher.store.transfer([(TransferKind.COPY, 0, 0)])
            for num_tokens, num_rows in self._ragged_sizes():
                self._try(partial(self._run_ragged, self._ends, num_tokens, num_rows))
                yield "try"
            self._try(partial(self.sample_padding, self._output_sizes()))
            yield "try"
            for order, masks in self._device.rare_orders():
                self._try(partial(self._device.run_half, order, masks))
                yield "try"
            self._try(reserve_pinned)
            yield "try"
        self._capture_during_plans()
        yield "capture"
        seconds = " ".join(f"{phase}_s={seconds:.2f}" for phase, seconds in self.phases.items())
        logger.info("steps prepared %s", seconds)

    def _capture_during_plans(self) -> None:
        """Capture all sizes in a thread. This one makes cuDNN's plans, which PyTorch keeps by thread.

        Making a plan releases the GIL; a capture holds it nearly all the time.
        """
        dense = self.launcher.attention.dense
        with ThreadPoolExecutor(1, "capture-steps") as pool:
            captured = pool.submit(self._capture_all)
            while dense is not None and dense.prepare():
                pass
            captured.result()

    @torch.inference_mode()
    def _capture_all(self) -> None:
        if is_gpu(self.launcher.device):
            torch.cuda.set_device(self.launcher.device)  # the device of this thread
        while self.launcher.graphs.prepare():
            pass

    @torch.inference_mode()
    def step_seconds(self, num_tokens: int) -> float:
        """Measure a step of `num_tokens` of prompts and a few decoding rows; return the least of 3 times."""
        launcher, graphs = self.launcher, self.launcher.graphs
        num_rows = graphs.decode_rows[min(7, len(graphs.decode_rows) - 1)]
        size, seconds = graphs.size_for(num_rows, num_tokens), []
        for _ in range(3):
            launcher.inputs.blank()
            self._synchronize()
            start = time.perf_counter()
            if size is None:
                self._run_ragged(_whole(launcher), num_tokens, num_rows)
            else:
                graphs.forward(size)
                graphs.sample(size)
                graphs.follow(size)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def _synchronize(self) -> None:
        if self._pads:
            torch.cuda.synchronize(self.launcher.device)

    def _ragged_sizes(self) -> list[tuple[int, int]]:
        """Return sizes of steps that are not captured: tokens of prompts, and rows that decode with them.

        Libraries choose and load kernels by the sum. Half of the sizes of each kind are multiples of 16.
        """
        most, num_rows = self.launcher.max_tokens, self.launcher.graphs.decode_rows[-1]
        sizes = [*range(self.launcher.profile.ragged_tokens, 4096, 256), *range(4096, most, 512), most - 8]
        sizes = [size + 8 * (place // 2 % 2) for place, size in enumerate(sizes) if num_rows < size < most]
        return [(size - num_rows * (place % 2), num_rows * (place % 2)) for place, size in enumerate(sizes)]

    def _output_sizes(self) -> list[int]:
        """Return numbers of rows that a ragged step samples: all small ones, and large ones of each kind."""
        most = len(self.launcher.inputs.rows_S) + 1
        return sorted({*range(1, min(18, most)), *range(24, most, 8), *range(31, most, 16)})

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the kernels of steps of all sizes, unless Triton's cache has them; no kernel runs."""
        if self._pads:
            launcher = self.launcher
            kinds = sorted({str(kind) for kind in _kinds(_whole(launcher))})
            backends = launcher.attention.backend, launcher.attention.work.backend
            facts = launcher.model.config, kinds, *backends, launcher.graphs.sizes
            head = None if launcher.head is None else launcher.head.model.config
            with launcher.alone():
                compile_once(self._compile_ahead, *facts, head, launcher.store.keys[0])

    def _compile_ahead(self) -> bool:
        """Trace all captured steps without running them, which compiles their kernels in parallel.

        False: a step could not be traced, because it takes indices from what no kernel has computed. Its
        kernels are compiled when it first runs.
        """
        launcher = self.launcher
        try:
            with compiling_ahead(launcher.device):
                launcher.rows.send_padding()
                for size in launcher.graphs.sizes:
                    self._warm_up(size)
                for num_rows in launcher.graphs.decode_rows:
                    self._run_ragged(self._ends, launcher.profile.ragged_tokens, num_rows)
                self.sample_padding(self._output_sizes())
        except torch.AcceleratorError:
            raise
        except (IndexError, RuntimeError) as error:
            logger.debug("not all steps are compiled ahead of time: %s", error)
            return False
        return True

    def _warm_up(self, size: StepSize) -> None:
        """Run a step of padding of this size, so that capturing it finds everything loaded."""
        with self.launcher.alone():
            self.launcher.inputs.blank()
            self.launcher.sample_logits(size, self.launcher.compute_logits(self._ends, size))
            self.launcher.follow_sized(size)

    def _try(self, run: Callable[[], object]) -> None:
        """Run some work on padding; if it fails, only log that."""
        try:
            run()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # probably out of memory: a prompt may still find room
            reason = str(error).partition("\n")[0]
            logger.warning("cannot run a step of padding ahead of time step=%s error=%s", run, reason)

    def _run_ragged(self, model: Model, num_tokens: int, num_rows: int, num_dense: int = 0) -> None:
        """Run the layers of a step of padding, the last `num_dense` tokens as a separate fresh prompt."""
        if num_tokens <= 0:
            return
        launcher = self.launcher
        launcher.inputs.blank()
        rows_S = launcher.inputs.rows_S[:num_rows]
        launcher.gather(rows_S)
        chunk = PrefillChunk(num_rows + num_tokens - num_dense, num_dense, 0, 0)
        dense = launcher.attention.dense
        batches = dense.split([chunk])[0] if dense and num_dense else []
        tiles_W4 = torch.zeros((1, 4), dtype=torch.int32, device=launcher.device)
        tiles = PrefillChunks.from_arrays(tiles_W4, [PrefillChunk(0, 0, 0, 0)], tiles_W4)
        launcher.forward(model, num_rows + num_tokens, rows_S, tiles, batches)
        launcher.follow_padding(num_rows + num_tokens)

    @torch.inference_mode()
    def load(self) -> None:
        """Run padding through steps that are not captured, so that their kernels are loaded."""
        if self._pads:
            for work in (self.launcher.rows.send_padding, self.compute_padding, self.sample_padding):
                self._try(work)

    @torch.inference_mode()
    def compute_padding(self) -> None:
        """Compute the layers of the largest possible step, all of it padding."""
        launcher, dense = self.launcher, self.launcher.attention.dense
        num_rows = min(launcher.graphs.decode_rows[-1], launcher.max_tokens - 1)
        with launcher.alone():
            self._run_ragged(self._ends, launcher.max_tokens - num_rows, num_rows)
            longest = dense.prepare_longest() if dense is not None else 0
            if longest:  # one less: a prompt that does not fill its shape is copied, which takes most memory
                self._run_ragged(self._ends, launcher.max_tokens, 0, longest - 1)

    @torch.inference_mode()
    def sample_padding(self, counts: Sequence[int] = ()) -> None:
        """Sample the most rows of padding that a step can have, or each number of rows in `counts`."""
        launcher = self.launcher
        launcher.inputs.blank()
        rows_S, width = launcher.inputs.rows_S, launcher.model.config.hidden_size
        hidden_SD = torch.zeros((len(rows_S), width), dtype=launcher.store.dtype, device=launcher.device)
        places_S = torch.zeros_like(rows_S, dtype=torch.int64)
        with launcher.alone():
            for count in counts or (len(rows_S),):
                logits_SV = launcher.logits(launcher.model, hidden_SD[:count])
                launcher.sample_rows(logits_SV, rows_S[:count], places_S[:count])
                logprob_table(logits_SV, places_S[:count], 0)


def _whole(launcher: StepLauncher) -> Model:
    assert isinstance(launcher.model, Model), "a head has nothing but its turns to prepare"
    return launcher.model


def _kinds(model: Model) -> list[tuple[object, ...]]:
    """Return the traits of each layer that decide its kernels: window, width, parts, storage of weights."""

    def kept(stored: Any) -> tuple[object, ...]:
        if stored is None:
            return ()
        compiled = getattr(stored, "compiled", None)
        return type(stored), stored.spec.form, stored.bias is not None, compiled and compiled.num_ready

    return [
        (
            model.config.window(number),
            model.config.mlp_size(number),
            *((type(part), *kept(getattr(part, "stored", None))) for part in layer.modules()),
        )
        for number, layer in enumerate(model.layers)
    ]
