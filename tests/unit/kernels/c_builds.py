"""The C library in two builds: for this processor, and without any of its instructions."""

from __future__ import annotations

import functools

import pytest

from infer.kernels.cpu.build import BuildError, build_library
from infer.kernels.cpu.library import Library

BUILDS = ("native", "portable")


@functools.cache
def c_library(build: str) -> Library:
    flags = ("-DINFER_PORTABLE",) if build == "portable" else ()
    try:
        return Library(build_library(extra_flags=flags))
    except BuildError as error:
        pytest.skip(str(error))
