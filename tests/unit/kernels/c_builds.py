"""The C library in several builds: for this processor, for a lesser one, and without any instructions."""

from __future__ import annotations

import functools
import platform

import pytest

from infer.kernels.cpu.build import CBuildError, build_library
from infer.kernels.cpu.library import Library

IS_X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = {"native": (), "portable": ("-DINFER_PORTABLE",)} | ({"avx2": ("-mno-avx512f",)} if IS_X86 else {})
BUILDS = tuple(FLAGS)


@functools.cache
def c_library(build: str) -> Library:
    try:
        return Library(build_library(extra_flags=FLAGS[build]))
    except CBuildError as error:
        pytest.skip(str(error))
