"""The compiled library, loaded when the first kernel asks for it.

    library()        the library, or None if there is none
    why_not()        the reason why there is none, in one line

On any failure, operations fall back to PyTorch, with one line in the log and no error: a machine without
a compiler is slower, not broken.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

import torch

from infer.kernels.cpu.build import CBuildError, build_library

log = logging.getLogger(__name__)

_lock = threading.Lock()
_state: Library | CBuildError | None = None


MXFP4 = 3  # kind of 4-bit floats in csrc/linear.h, in place of a number of bits


class Library:
    """The compiled C library: two functions that run operations, and the addresses of the operations."""

    def __init__(self, path: Path) -> None:
        try:
            c = ctypes.CDLL(str(path))
        except OSError as error:
            raise CBuildError(f"the compiled library does not load: {error}") from None
        self.path = path
        self.run_one = c.infer_run_one
        self.run_one.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p)
        self.run_one.restype = None
        self.run = c.infer_run
        self.run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self.run.restype = None
        c.infer_linear_scratch.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        c.infer_linear_scratch.restype = ctypes.c_int64
        c.infer_set_threads.argtypes = (ctypes.c_int64,)
        c.infer_set_threads.restype = ctypes.c_int64
        c.infer_variant.restype = ctypes.c_char_p
        self._c = c
        self.variant: str = c.infer_variant().decode()
        self.quantize = self._address("infer_linear_quantize")
        self.linear = {8: self._address("infer_linear_int8"), 4: self._address("infer_linear_int4")}
        for kind, name in {5: "int5", 6: "int6", MXFP4: "mxfp4"}.items():
            if hasattr(c, f"infer_linear_{name}"):  # missing with NEON
                self.linear[kind] = self._address(f"infer_linear_{name}")
        self.pack = self._address("infer_pack")
        self.embed = self._address("infer_embed")
        self.rms_norm = self._address("infer_rms_norm")
        self.layer_norm = self._address("infer_layer_norm")
        self.scale = self._address("infer_scale")
        self.activation = self._address("infer_activation")
        self.rope = self._address("infer_rope")
        self.write_cache = self._address("infer_write_cache")
        self.attend = self._address("infer_attend")
        self.likely = self._address("infer_likely")
        self.all_reduce = self._address("infer_all_reduce")
        self.all_gather = self._address("infer_all_gather")
        self.own_ids = self._address("infer_own_ids")
        self.pass_on = self._address("infer_pass_on")
        self.take_rows = self._address("infer_take_rows")
        self.tick = self._address("infer_tick")
        c.infer_word_get.argtypes = (ctypes.c_void_p,)
        c.infer_word_get.restype = ctypes.c_uint32
        c.infer_word_set.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
        c.infer_word_set.restype = None
        c.infer_word_wait.argtypes = (
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        )  # fmt: skip
        c.infer_word_wait.restype = ctypes.c_int64
        c.infer_word_watch.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
        c.infer_word_watch.restype = ctypes.c_int64
        self.word_watch = c.infer_word_watch
        self.word_get, self.word_set, self.word_wait = c.infer_word_get, c.infer_word_set, c.infer_word_wait
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)
        alone = self.all_reduce, self.all_gather, self.pass_on, self.take_rows, self.tick
        self.exchange = {each: kernel(each) for each in alone}  # called without the lock of the pool
        self.num_threads = 1
        self.set_threads(torch.get_num_threads())

    def set_threads(self, num_threads: int) -> None:
        """Use `num_threads` threads from now on."""
        self.num_threads = int(self._c.infer_set_threads(max(1, num_threads)))

    def linear_scratch(self, num_rows: int, size: int, digits: int) -> int:
        """Bytes of `num_rows` quantised rows of `size` numbers."""
        return int(self._c.infer_linear_scratch(num_rows, size, digits))

    def _address(self, name: str) -> int:
        address = ctypes.cast(getattr(self._c, name), ctypes.c_void_p).value
        assert address is not None, name
        return address


def library() -> Library | None:
    """The library of this process; the first call compiles and loads it."""
    return _state if isinstance(_state, Library) else _load()  # the common case, without the lock


def why_not() -> str:
    """The reason why `library()` is None, in one line."""
    return str(_state) if isinstance(_state, CBuildError) else "it has not been tried"


def _load() -> Library | None:
    global _state
    with _lock:
        if _state is None:
            try:
                _state = Library(build_library())
                log.debug("C kernels: %s, %d threads", _state.variant, _state.num_threads)
            except CBuildError as error:
                _state = error
                log.warning("the C kernels cannot be used, so the CPU is slower: %s", error)
        return _state if isinstance(_state, Library) else None
