"""Try the package with the lowest or the newest versions that the ranges of pyproject.toml allow.

    python scripts/bounds.py lowest     a fresh environment with every lower bound, then the tests below
    python scripts/bounds.py newest     the same with whatever is newest today
    python scripts/bounds.py lowest --python python3.12 --dir DIR -- tests/unit/server

torch is the one of constraints.txt in both: its lower bound is a build of several gigabytes where a registry
offers none for CPUs. The tests are those of the packages that lean on other people's code without a GPU: the
server, its clients, settings, tokenizer and constraints.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [f"tests/unit/{package}" for package in ("config", "client", "tokenizer", "constraints", "server")]
TOOLS = [
    "pytest",
    "hypothesis",
    "httpx",
    "safetensors",
    "jsonschema",
    "gguf",
    "openai",
    "anthropic",
    "ollama",
]  # what these tests import


def ranges() -> list[str]:
    """Return the requirements of the package, as pyproject.toml has them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[str] = tomllib.load(file)["project"]["dependencies"]
    return found


def lowest(requirements: Sequence[str]) -> list[str]:
    """Return each requirement at its lower bound; torch, which is not tried, is left out."""
    pins = []
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)>=([\w.]+)(;.*)?", requirement)
        if match is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} is no 'name>=version': it has no lower bound")
        if match[1] != "torch":
            pins.append(f"{match[1]}=={match[2]}{match[3] or ''}")
    return pins


def pinned(name: str) -> str:
    """Return a package as constraints.txt has it."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith(f"{name}=="))


def main() -> int:
    """Make the environment, install, run the tests."""
    parser = argparse.ArgumentParser(description="Try the bounds of pyproject.toml.")
    parser.add_argument("which", choices=["lowest", "newest"])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--dir", type=Path, help="where it is made; default: a temporary directory")
    parser.add_argument("tests", nargs="*", default=TESTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        home = args.dir or Path(made)
        home.mkdir(parents=True, exist_ok=True)
        pins = lowest(ranges()) if args.which == "lowest" else []
        constraints = home / f"{args.which}.txt"
        constraints.write_text("\n".join([*pins, pinned("torch")]) + "\n", encoding="utf-8")
        subprocess.run([args.python, "-m", "venv", home / "venv"], check=True)
        python = home / "venv" / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
        subprocess.run([*install, *ranges(), *TOOLS], check=True)
        subprocess.run([python, "-m", "pip", "check"], check=True)
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=--import-mode=importlib",
        ]
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *args.tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
