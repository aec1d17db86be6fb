"""Real, unmodified clients against a live server: `make test-clients`, which needs package registries.

Each client has a row in `CLIENTS` with the versions that were tried, and a script: Python and Node scripts
use the packages, shell scripts run a program as a user does. Packages are installed once, below
`INFER_CLIENTS_DIR` or the user's cache, and never next to the ones of this project.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.server.app import create_app
from tests.clients.puppet import Asked, serve_puppet
from tests.support.fetched import fetched_model
from tests.support.live_server import KNOBS, serve

pytestmark = [pytest.mark.slow, pytest.mark.network]

SCRIPTS = Path(__file__).parent / "scripts"
CACHE = Path(os.environ.get("INFER_CLIENTS_DIR", Path.home() / ".cache" / "infer-clients"))
INSTALL_S, RUN_S = 900, 300


@dataclass(frozen=True)
class Client:
    """A script and the packages it needs."""

    script: str
    packages: str

    @property
    def is_node(self) -> bool:
        """Whether the packages come from npm."""
        return "@" in self.packages

    @property
    def home(self) -> Path:
        """Where its packages are installed."""
        digest = hashlib.sha256(self.packages.encode()).hexdigest()[:8]
        return CACHE / f"{self.script.replace('.', '-')}-{digest}"


CLIENTS = (
    Client("try_codex.sh", "@openai/codex@0.169.0"),
    Client("try_claude_code.sh", "@anthropic-ai/claude-code@2.1.197"),
    Client("try_opencode.sh", "opencode-ai@1.18.33"),
    Client("try_continue.sh", "@continuedev/cli@1.5.47"),
    Client("try_cline.sh", "cline@3.0.65"),
    Client("try_openai.mjs", "openai@6.49.0 zod@4.6.7"),
    Client("try_anthropic.mjs", "@anthropic-ai/sdk@1.9.0 zod@4.6.7"),
    Client(
        "try_vercel.mjs",
        "ai@6.0.326 @ai-sdk/openai-compatible@2.0.87 @ai-sdk/openai@3.0.139 @ai-sdk/anthropic@3.0.138 "
        "zod@4.6.7",
    ),
    Client("try_ollama.mjs", "ollama@0.6.4"),
    Client("try_openai.py", "openai==3.51.0"),
    Client("try_anthropic.py", "anthropic==2.9.0"),
    Client("try_ollama.py", "ollama==0.6.3"),
    Client("try_huggingface_hub.py", "huggingface_hub==2.4.0"),
    Client(
        "try_langchain.py",
        "langchain==1.4.7 langchain-openai==1.7.3 langchain-anthropic==1.7.7 langchain-ollama==1.1.0",
    ),
    Client("try_litellm.py", "litellm==1.106.2"),
    Client("try_pydantic_ai.py", "pydantic-ai-slim[openai,anthropic]==2.66.0"),
    Client("try_openai_agents.py", "openai-agents==0.24.0"),
    Client("try_instructor.py", "instructor[anthropic]==1.17.0"),
    Client("try_llama_index.py", "llama-index-llms-openai-like==0.8.1"),
    Client("try_dspy.py", "dspy==3.4.1 numpy"),
    Client("try_smolagents.py", "smolagents[openai]==1.26.0"),
    Client("try_autogen.py", "autogen-ext[openai]==0.7.5 autogen-agentchat==0.7.5"),
    Client("try_outlines.py", "outlines==1.3.3 openai"),
    Client("try_guidance.py", "guidance==0.3.1 openai"),
    Client("try_llm.sh", "llm==0.36"),
    Client("try_aider.sh", "aider-chat==0.86.2"),
)


def install(client: Client) -> None:
    """Install a client's packages, once; skips where they cannot be had."""
    stamp = client.home / ".installed"
    if stamp.exists():
        return
    shutil.rmtree(client.home, ignore_errors=True)
    client.home.mkdir(parents=True)
    if client.is_node:
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        (client.home / "package.json").write_text('{"private": true, "type": "module"}')
        command = ["npm", "install", "--no-audit", "--no-fund", *client.packages.split()]
    else:
        subprocess.run([sys.executable, "-m", "venv", client.home], check=True)
        command = [str(client.home / "bin" / "pip"), "install", "-q", *client.packages.split()]
    done = subprocess.run(
        command, cwd=client.home, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        pytest.skip(f"{client.packages} could not be installed: {done.stderr.strip()[-300:]}")
    stamp.touch()


@pytest.fixture(scope="module")
def puppet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Asked]]]:
    with serve_puppet(tmp_path_factory.mktemp("puppet") / "qwen3") as served:
        yield served


@pytest.fixture(scope="module")
def plain_url() -> Iterator[str]:
    config = EngineConfig.from_knobs(model=str(fetched_model()), **KNOBS | {"num_blocks": 1024})
    server = ServerConfig(in_process=True, access_log=False, served_model_name="my-model")
    with serve(create_app(config, server)) as url:
        yield url


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client(client: Client, puppet: tuple[str, list[Asked]], plain_url: str, tmp_path: Path) -> None:
    install(client)
    url, asked = puppet
    num_before = len(asked)
    script = SCRIPTS / client.script
    if script.suffix == ".mjs":  # Node looks for packages next to the script
        script = Path(shutil.copy(script, client.home))
    runner: dict[str, list[str]] = {
        ".py": [str(client.home / "bin" / "python")],
        ".mjs": ["node"],
        ".sh": ["bash", "-euo", "pipefail"],
    }
    bins = f"{client.home / 'node_modules' / '.bin'}:{client.home / 'bin'}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NODE"))}
    own = {"INFER_URL": url, "INFER_PLAIN_URL": plain_url, "HOME": str(tmp_path), "PATH": bins}
    own["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
    done = subprocess.run(
        [*runner[script.suffix], str(script)],
        cwd=tmp_path,
        env=kept | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    new = asked[num_before:]
    refused = [f"{one.path} {one.status} {one.answer[:300]}" for one in new if one.status >= 400]
    assert done.returncode == 0, "\n".join([done.stdout[-3000:], *refused])
    assert new, "the client asked nothing of the server"
