from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infer.cli import flags
from infer.cli.main import build_parser, main
from infer.cli.serve import read_models, split_name
from infer.client import spawn as spawning
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError


def read(*arguments: str) -> tuple[dict[str, EngineConfig], ServerConfig]:
    args = build_parser().parse_args(["serve", *arguments])
    return read_models(args, flags.knobs_from(args, with_server=True))


def test_without_a_model_the_default_one_is_served_under_its_own_name() -> None:
    models, config = read()
    assert list(models) == [""] and models[""].load.model is None
    assert config == ServerConfig()


def test_several_models_have_names_and_share_the_other_knobs() -> None:
    models, _ = read("a=one", "--model", "b=org/two", "--dtype", "float32")
    assert {name: config.load.model for name, config in models.items()} == {"a": "one", "b": "org/two"}
    assert {config.load.dtype for config in models.values()} == {"float32"}


def test_knobs_of_the_server_do_not_reach_the_engine() -> None:
    models, config = read("one", "--served-model-name", "s", "--api-key", "x", "--api-key", "y", "--no-ui")
    assert list(models) == ["s"] and config.api_key == ("x", "y") and config.ui is False


def test_a_model_may_have_several_names() -> None:
    models, config = read("one", "--served-model-name", "a", "b", "c", "--model-alias", "gpt-4o=a")
    assert list(models) == ["a"]
    assert config.model_alias == ("gpt-4o=a", "b", "c")


def test_a_model_behind_the_names_is_not_taken_for_one(tmp_path: Path) -> None:
    for model in ("org/name", str(tmp_path)):
        with pytest.raises(
            ConfigError, match=f"MODEL goes in front: infer serve {model} --served-model-name a"
        ):
            read("--served-model-name", "a", model)


@pytest.mark.parametrize(
    "given",
    [
        ["a", "a"],
        ["a", "--model-alias", "x=nope"],
        ["a", "--model-alias", "x=a:1,nope:1"],
        ["a", "b", "--model-alias", "b"],
    ],
)
def test_aliases_that_cannot_be_are_refused_before_anything_is_loaded(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="served as 'nope'|given twice"):
        read("one", "--served-model-name", *given)


@pytest.mark.parametrize("alias", ["=a", "a=", "x\ny"])
def test_an_alias_has_a_name_on_both_sides(alias: str) -> None:
    with pytest.raises(ConfigError, match="^model_alias must"):
        ServerConfig(model_alias=(alias,))


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--shutdown-timeout", "7", "drain_timeout"),
        ("--allowed-origins", "https://a.example", "cors_origin"),
        ("--data-parallel-size", "3", "replicas"),
        ("--num-replicas", "3", "replicas"),
    ],
)
def test_familiar_spellings_are_understood(flag: str, value: str, name: str) -> None:
    _, config = read("one", flag, value)
    assert str(getattr(config, name)).strip("(),'") in (value, f"{value}.0")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\x00", "a\u2028b", "\x9b", "\udc80"])
def test_a_name_with_control_characters_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="^served_model_name must not have control characters, got '.*'$"):
        read("one", "--served-model-name", name)
    with pytest.raises(ConfigError, match="^the NAME of --model NAME=MODEL must not have control characters"):
        read("--model", f"{name}=one")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("m", ("", "m")), ("n=m", ("n", "m")), ("n=a=b", ("n", "a=b")), ("./x=y", ("", "./x=y"))],
)
def test_a_name_ends_at_the_first_equals_sign_unless_it_is_a_path(
    text: str, expected: tuple[str, str]
) -> None:
    assert split_name(text) == expected


@pytest.mark.parametrize("arguments", [["a", "--model", "b"], ["n=a", "--model", "n=b"], ["=a"], ["n="]])
def test_models_without_names_of_their_own_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        read(*arguments)


def test_a_model_that_does_not_exist_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setitem(sys.modules, "infer.server.serve", None)  # to import it is an error
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.gguf").write_bytes(b"GGUF")
    assert main(["serve", "--model", "a=good.gguf", "--model", "b=nope"]) == 2
    assert "model 'nope': there is no such file or directory" in capsys.readouterr().err
    assert main(["serve", "--model", "good.gguf", "--draft-model", "small"]) == 2
    assert "model 'small': there is no such file or directory" in capsys.readouterr().err


def test_a_start_that_fails_leaves_no_engine_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is taken by another: the engine process has been started ahead by then."""
    started, start = [], spawning.spawn

    def spawn(module: str) -> subprocess.Popen[bytes]:
        started.append(start(module))
        return started[-1]

    monkeypatch.setattr(spawning, "spawn", spawn)
    (tmp_path / "good.gguf").write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(tmp_path / "good.gguf"), "--port", str(port), "--replicas", "2"]) == 2
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_help_needs_neither_torch_nor_a_web_framework() -> None:
    script = (
        "import sys\nfrom infer.cli.main import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--headless"], "headless is for nodes other than the first; give --node-rank"),
        (["-tp", "2", "--nnodes", "2", "--headless"], "headless is for nodes other than the first"),
        (
            ["--nnodes", "2"],
            r"nnodes=2 must divide .* which is 1; raise one of the two, such as --pipeline-parallel-size 2",
        ),
        (["-tp", "4", "--nnodes", "3"], "nnodes=3 must divide tensor_parallel_size"),
        (["-tp", "2", "--nnodes", "0"], "nnodes must be a positive integer, got 0"),
        (
            ["-tp", "2", "--nnodes", "2", "--node-rank", "2"],
            "node_rank must be from 0 to 1 with nnodes=2, got 2",
        ),
        (["--node-rank", "1"], "node_rank must be from 0 to 0 with nnodes=1, got 1"),
        (
            ["-tp", "2", "--nnodes", "2", "--master-port", "0"],
            "master_port must be a positive integer, got 0",
        ),
        (
            ["-tp", "2", "--nnodes", "2", "--replicas", "2"],
            "nnodes=2 is for one engine, and there would be 2",
        ),
        (["-tp", "2", "--nnodes", "2", "--cluster", "ray", "--node-rank", "1"], "Ray finds node_rank"),
        (["--cluster", "ray", "--master-port", "7"], "Ray finds master_port; leave it out"),
    ],
)
def test_nodes_that_cannot_be_are_refused(given: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read("m", *given)


def test_several_models_do_not_share_nodes() -> None:
    with pytest.raises(ConfigError, match="nnodes=2 is for one engine, and there would be 2"):
        read("a=x", "--model", "b=y", "-tp", "2", "--nnodes", "2")
    models, _ = read("x", "-tp", "2", "--nnodes", "2", "--replicas", "2", "--cluster", "ray")
    assert models[""].load.nnodes == 2
    models, config = read("x", "-pp", "2", "--nnodes", "2", "--node-rank", "1", "--headless")
    assert models[""].load.node_rank == 1 and config.headless
