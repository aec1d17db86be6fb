"""`make audit`: what is said of an index that knows all, some or none of the packages."""

from __future__ import annotations

import pytest

from scripts.audit import report

CLEAN = {"name": "six", "version": "1.17.0", "vulns": []}
WEAK = {"name": "old", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}
HOPELESS = {"name": "bad", "version": "3", "vulns": [{"id": "CVE-2", "fix_versions": []}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ([CLEAN], 0, "1 of 1 pinned packages audited, 0 known weaknesses"),
        (
            [CLEAN, WEAK],
            1,
            "old 1.0: CVE-1, mended in 1.1, 2.0\n2 of 2 pinned packages audited, 1 known weak",
        ),
        ([HOPELESS], 1, "bad 3: CVE-2, mended in no version yet"),
        (
            [CLEAN, UNKNOWN],
            1,
            "1 of 2 pinned packages audited, 0 known weaknesses\nnot audited, because this",
        ),
        ([UNKNOWN], 1, "for them: torch\na mirror may lack all of them"),
    ],
)
def test_only_what_was_looked_up_counts_as_clean(
    answers: list[dict[str, object]], code: int, said: str
) -> None:
    text, found = report(answers)
    assert found == code and said in text
