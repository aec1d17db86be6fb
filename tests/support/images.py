"""A Dockerfile as data: its stages and steps, and which files of the repository a build can see."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(slots=True)
class Stage:
    """What follows one FROM: the words after each instruction, in their order."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        """The texts of every step with this instruction."""
        return [text for step, text in self.steps if step == name]

    def one(self, name: str) -> str:
        """The text of the only step with this instruction."""
        [text] = self.all(name)
        return text

    def environment(self) -> dict[str, str]:
        """The variables that ENV sets."""
        words = [word for text in self.all("ENV") for word in shlex.split(text)]
        return dict(word.split("=", 1) for word in words)

    def copies(self) -> list[tuple[list[str], str]]:
        """The sources and the target of each COPY from the repository."""
        lines = [shlex.split(text) for text in self.all("COPY") if not text.startswith("--from=")]
        return [(words[:-1], words[-1]) for words in lines]


def read_dockerfile(name: str) -> list[Stage]:
    """Parse a Dockerfile of deploy/; comments and continued lines as Docker reads them."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stages.append(Stage(rest))
        else:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


def exec_form(text: str) -> list[str]:
    """The words of an instruction in exec form; a shell would not pass SIGTERM on."""
    words = json.loads(text)
    assert isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words


def health_command(stage: Stage) -> list[str]:
    """The words of the command that HEALTHCHECK runs."""
    return exec_form(stage.one("HEALTHCHECK").partition("CMD ")[2])


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file reach the builder: its last matching line decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        bare = pattern.removeprefix("!")
        parents = [path, *map(str, Path(path).parents)]
        tails = [bare.removeprefix("**/")] if bare.startswith("**/") else []
        if any(
            fnmatch.fnmatch(each, bare) or any(fnmatch.fnmatch(Path(each).name, tail) for tail in tails)
            for each in parents
            if each != "."
        ):
            sent = pattern.startswith("!")
    return sent
