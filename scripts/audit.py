"""Look up the pinned dependencies in the advisories of the package index.

    python scripts/audit.py

pip-audit, in an environment of its own, asks the index about each line of constraints.txt. An index that is a
mirror often has packages without their advisories: those lines are named, and count as not audited, which is
not the same as clean.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
COMMAND = ("--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off")


def report(dependencies: list[dict[str, Any]]) -> tuple[str, int]:
    """Return what to say of the answers of pip-audit, and the exit code: 0 if all are audited and clean."""
    skipped = [each for each in dependencies if "skip_reason" in each]
    weak = [(each, weakness) for each in dependencies for weakness in each.get("vulns", ())]
    lines = [
        f"{each['name']} {each['version']}: {weakness['id']}, mended in "
        f"{', '.join(weakness['fix_versions']) or 'no version yet'}"
        for each, weakness in weak
    ]
    num_audited = len(dependencies) - len(skipped)
    lines.append(
        f"{num_audited} of {len(dependencies)} pinned packages audited, {len(weak)} known weaknesses"
    )
    if skipped:
        names = ", ".join(each["name"] for each in skipped)
        lines.append(f"not audited, because this index has no advisories for them: {names}")
        lines.append("a mirror may lack all of them; run this where pypi.org itself answers")
    return "\n".join(lines), int(bool(weak or skipped))


def main() -> int:
    """Make the environment, ask, report."""
    with tempfile.TemporaryDirectory() as home:
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        python = Path(home) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "pip-audit"], check=True)
        command = [str(python), "-m", "pip_audit", *COMMAND, "--requirement", str(CONSTRAINTS)]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"pip-audit failed:\n{done.stderr.strip()}", file=sys.stderr)
        return 2
    text, code = report(dependencies)
    print(text)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
