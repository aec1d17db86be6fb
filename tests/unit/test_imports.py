"""What a command costs before it does anything: `import infer`, `--help` and a server import no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "huggingface_hub", "tokenizers", "numpy", "yaml", "rich"}


def heavy_modules_after(code: str) -> set[str]:
    """Which of the HEAVY modules a fresh interpreter has imported once it has run `code`."""
    script = (
        f"import sys\n{code}\nprint('loaded:', *(name for name in {sorted(HEAVY)} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import infer",
        "from infer import SamplingParams",
        "import infer.config.settings, infer.errors, infer.log",
        "from infer.cli.main import build_parser; build_parser().format_help()",
    ],
)
def test_light_imports_stay_light(code: str) -> None:
    assert heavy_modules_after(code) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = f"from infer.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass"
    assert heavy_modules_after(code) == set()


@pytest.mark.parametrize(
    "modules",
    [
        "infer.server.serve, infer.server.app, infer.server.fleet.fleet, infer.client.process_client",
        "infer.client.process",  # which imports it beside reading its orders
    ],
)
def test_a_server_is_imported_without_torch(modules: str) -> None:
    assert not heavy_modules_after(f"import {modules}") & {"torch", "transformers", "huggingface_hub"}


def test_a_mistake_in_the_flags_is_reported_without_torch() -> None:
    code = "from infer.cli.main import main\nassert main(['generate', 'x', '--temperature', '-1']) == 2"
    assert heavy_modules_after(code) == set()


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import infer

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = infer.LMM
