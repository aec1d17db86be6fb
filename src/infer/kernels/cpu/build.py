"""Compile the C files on first use, for this processor, into the user's cache directory.

    ~/.cache/infer/kernels/<key>.so        key: hash of sources, flags, compiler and processor

A different source, compiler or processor has a different key, so nothing is ever stale and a cache
that several machines share is safe. The compiler writes to a temporary file, which is renamed into
place: two processes that start together both compile, and either result is complete. The last 32 bytes are a
checksum, which loaders ignore. A library truncated by a full disk or a crash would kill the process that maps
it (SIGBUS), so a library that does not match its checksum is compiled again.

`cc` is the system's C compiler. A build takes a few seconds, once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
TIMEOUT = 300.0  # seconds for the compiler
_CHECKSUM_BYTES = hashlib.sha256().digest_size

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-Wno-psabi", "-fno-math-errno")
_COMPILERS = ("cc", "gcc", "clang")


class CBuildError(Exception):
    """The C library could not be built; the message is one line."""


def build_library(*, extra_flags: tuple[str, ...] = (), directory: Path | None = None) -> Path:
    """The path of the compiled library, which is compiled now if it is not cached."""
    compiler = find_compiler()
    if compiler is None:
        raise CBuildError("there is no C compiler (cc, gcc or clang)")
    flags = (*_FLAGS, _tuning_flag(), *extra_flags)
    directory = directory or cache_directory()
    path = directory / f"{_key(compiler, flags)}.so"
    if not _is_whole(path):
        _compile(compiler, flags, path)
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest() == content[-_CHECKSUM_BYTES:]


def find_compiler() -> str | None:
    """The path of the system's C compiler."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def compiler_version(compiler: str) -> str:
    """First line of the compiler's `--version`."""
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise CBuildError(f"{compiler} does not run: {error}") from None
    return answer.stdout.split("\n", 1)[0]


def cache_directory() -> Path:
    """The folder of compiled libraries: XDG_CACHE_HOME (or ~/.cache), then infer/kernels."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        raise CBuildError("there is no home directory to keep it in; set XDG_CACHE_HOME") from None
    return root / "infer" / "kernels"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Features of the processor as listed by the system; empty if the system has no list."""
    try:
        with open(cpuinfo) as lines:
            wanted = ("flags", "Features", "model name", "CPU part")
            return "".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:
        return ""


def cpu_name() -> str:
    """The model name of the processor, or its architecture if it has no other name."""
    lines = [line for line in cpu_flags().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.processor() or platform.machine()


def _tuning_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for text in (compiler_version(compiler), *flags, platform.machine(), platform.processor(), cpu_flags()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command; returns its exit code and errors. After a timeout, it is killed with its children."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=TIMEOUT)
        finally:
            if process.poll() is None:  # killing only `cc` would leave its subprocesses running
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / "library.so"
            status, said = _run([compiler, *flags, *sources, "-o", str(made), "-lm"])
            if status != 0:
                lines, words = said.splitlines(), (os.strerror(errno.ENOSPC), "error")
                first = next((line for word in words for line in lines if word in line), "it said nothing")
                raise CBuildError(f"{compiler} failed: {first.strip()}")
            with open(made, "r+b") as library:
                checksum = hashlib.sha256(library.read()).digest()
                library.write(checksum)
            os.replace(made, path)
    except OSError as error:
        raise CBuildError(f"{path.parent} cannot be written: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CBuildError(f"{compiler} did not finish within {TIMEOUT:.0f} s") from None
