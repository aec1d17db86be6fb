"""Which marked tests can run here: `network` needs a registry that answers, `gpu` needs a GPU.

A test that cannot run is skipped with the reason, and asking costs nothing when no such test was
collected. The registry is asked through pip, so that a mirror, a proxy or a certificate of the
user's own configuration counts.

Property tests draw the same few examples in every run, so that a failure is of the change and not of the
day; the slow tests draw ten times as many, and fresh ones (`--hypothesis-profile=thorough`).

PyTorch's random numbers begin anew with every test, and oneDNN, which a product can switch off on some
processors, is on: which tests ran before in the same process changes nothing.

Bytecode is kept, even where the environment says otherwise: without it, each worker rewrites every test file
anew, and each process that a test starts compiles the package.

`checkpoint` is the one tiny model of all tests that need any: a Llama with random weights, to be read only.

Ctrl-C ends what a test starts, also where the suite itself was started in the background and ignores it.

Every test finds the log as `import infer` leaves it, whatever command lines were run before. It is put right
before a test and not after: what is there after it are pytest's own handlers as well, of a test that is over.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no deadlines: timings are for benchmarks
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile("fixed")


gc.disable()  # until all tests are collected: nothing of packages and tests is garbage
_FREEZING: dict[str, Callable[[], None]] = {"freeze": gc.freeze, "unfreeze": gc.unfreeze}


@pytest.fixture(autouse=True)
def _log_as_imported() -> None:
    logger = logging.getLogger("infer")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures
def pytest_runtest_setup() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # tests that do without it stay quick
        # the CPU's alone where there is no other: `manual_seed` looks for devices of all kinds each time
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
        torch.backends.mkldnn.enabled = True
    comparison: Any = sys.modules.get("torch.testing._comparison")
    if (
        comparison is not None
    ):  # the first comparison would import a package for seconds, of which none is here
        comparison._HAS_DTENSOR = False


def pytest_collection_finish() -> None:
    """Hide packages and tests from the garbage collector, which walks whenever an engine is closed.

    On a machine with a GPU, the first engine that thaws what it froze would bring them back, and each walk
    after it would take half a second. So engines in tests neither freeze nor thaw; the tests of freezing ask
    for `real_freezing`.
    """
    _freeze_again()
    gc.enable()
    for name in _FREEZING:
        setattr(gc, name, lambda: None)


def _freeze_again() -> None:
    gc.collect()
    _FREEZING["freeze"]()


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> None:
    """Let the HTTP clients of a process share its certificates, as long to read as forty requests take."""
    for name in ("httpx._transports.default", "httpx2._transports.default"):
        transports: Any = sys.modules.get(name)
        if transports is not None:
            transports.create_ssl_context = functools.cache(transports.create_ssl_context)


@pytest.fixture(scope="module", autouse=True)
def _frozen_after_each_file() -> Iterator[None]:
    """Hide what a file's tests have imported and cached as well."""
    yield
    _freeze_again()


@pytest.fixture
def real_freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let objects be frozen and thawed within a test."""
    with monkeypatch.context() as patch:
        for name, function in _FREEZING.items():
            patch.setattr(gc, name, function)
        yield
    _FREEZING["freeze"]()


@functools.cache
def registry_answers() -> bool:
    command = [sys.executable, "-m", "pip", "--timeout", "5", "--retries", "0", "index", "versions", "pip"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # the tests that are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("network") and not registry_answers():
            item.add_marker(pytest.mark.skip(reason="no package registry answers"))
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
        if "integration" in item.path.parts:
            # Other people's clients leave sockets and loops to the garbage collector, which runs whenever.
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    from scripts.make_checkpoint import make_checkpoint

    directory: Path = tmp_path_factory.mktemp("tiny") / "llama"
    make_checkpoint("llama", directory)
    return str(directory)
