"""What a fresh process imports: `import infer`, `--help` and a server no torch, an engine nothing of text."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "transformers", "huggingface_hub", "tokenizers", "llguidance", "numpy", "yaml", "rich",
    "prompt_toolkit",
}  # fmt: skip


def heavy_modules_after(code: str) -> set[str]:
    """Which of the HEAVY modules a fresh interpreter has imported once it has run `code`."""
    script = (
        f"import sys\n{code}\nprint('loaded:', *(name for name in {sorted(HEAVY)} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_light_imports_stay_light() -> None:
    lines = (
        "import infer",
        "from infer import SamplingParams",
        "import infer.config.settings, infer.errors, infer.log",
        "from infer.cli.main import build_parser; build_parser().format_help()",
    )
    assert heavy_modules_after("\n".join(lines)) == set()


def test_help_needs_no_torch() -> None:
    asked = (["--help"], ["generate", "--help"], ["chat", "--help"], ["--version"])
    lines = (f"try: main({arguments})\nexcept SystemExit: pass" for arguments in asked)
    assert heavy_modules_after("\n".join(("from infer.cli.main import main", *lines))) == set()


@pytest.mark.parametrize(
    "modules",
    [
        "infer.server.serve, infer.server.app, infer.server.fleet.fleet, infer.client.process_client, "
        "infer.sampling.params",
        "infer.client.process",  # which imports it beside reading its orders
    ],
)
def test_a_server_is_imported_without_torch_and_without_a_matcher(modules: str) -> None:
    heavy = {"torch", "transformers", "huggingface_hub", "llguidance"}
    assert not heavy_modules_after(f"import {modules}") & heavy


def test_a_mistake_in_the_flags_is_reported_without_torch() -> None:
    code = "from infer.cli.main import main\nassert main(['generate', 'x', '--temperature', '-1']) == 2"
    assert heavy_modules_after(code) == set()


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import infer

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = infer.LMM


def test_the_server_package_is_imported_when_first_used() -> None:
    script = "import sys, infer.server; assert 'fastapi' not in sys.modules; infer.server.create_app"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_process_imports_neither_a_tokenizer_nor_a_matcher_until_it_needs_them() -> None:
    """In a fresh interpreter, so that what its modules import counts as well."""
    script = (
        "import sys, infer.client.process, infer.client.load, infer.engine.build\n"
        "roots = ('tokenizers', 'jinja2', 'llguidance', 'infer.tokenizer', 'infer.frontend')\n"
        "text = [name for name in sys.modules if name.startswith(roots)]\n"
        "assert not text, text"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ON_META = """
import sys, torch
from infer.layers.facts import RopeScaling
from infer.layers.rotary import Rotary, frequencies, stretch
with torch.device("meta"):
    plain = frequencies(7, 10_000.0)
    llama3 = RopeScaling(kind="llama3", factor=8.0, high_freq_factor=4.0, original_context_len=8192)
    slow = stretch(plain, 10_000.0, llama3, 8192)
    rotary = Rotary(slow, 5)
assert rotary.cos_PR.is_meta and rotary.cos_PR.dtype == torch.float32
print(*rotary.sin_PR.shape, "torch._dynamo" in sys.modules)
"""


def test_a_shape_without_memory_does_not_wake_the_compiler() -> None:
    """PyTorch counts on its meta device in Python, and imports its compiler for that, which takes seconds."""
    found = subprocess.run([sys.executable, "-c", ON_META], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["5", "4", "False"]
