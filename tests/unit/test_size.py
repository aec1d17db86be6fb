"""The budgets of lines per package, and the sentence that the README makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import docs, size


def test_no_package_exceeds_its_budget() -> None:
    sizes = size.measure()
    assert not size.over_budget(sizes), "\n" + size.table(sizes)


def test_budgets_are_those_of_the_design() -> None:
    targets = {name: budget.target for name, budget in size.BUDGETS.items()}
    assert targets == {"core": 9_000, "kernels": 9_500, "server": 4_300, "src": 39_000}
    for name, budget in size.BUDGETS.items():
        assert budget.limit >= budget.target, name  # a limit below it: lower the target too


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, lines in {
        "engine/a.py": 3,
        "engine/b.cu": 4,
        "kernels/c.c": 5,
        "kernels/d.cuh": 6,
        "kernels/e.h": 7,
        "server/ui/page.html": 100,
        "errors.py": 2,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    return tmp_path


def test_python_c_and_cuda_are_counted(package: Path) -> None:
    assert size.measure(package) == {
        ".": size.Size(2, 1),
        "engine": size.Size(7, 2),
        "kernels": size.Size(18, 3),
        "core": size.Size(7, 2),
        "src": size.Size(27, 6),
    }


def test_a_budget_that_is_exceeded_is_named_in_the_table(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "BUDGETS", {"core": size.Budget(5, 4), "src": size.Budget(30, 20)})
    sizes = size.measure(package)
    assert size.over_budget(sizes) == ["core"]
    assert "2 over the limit   3 to go" in size.table(sizes) and "7 to go" in size.table(sizes)


def test_the_readme_says_what_was_counted(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = size.measure(package)
    monkeypatch.setattr(size, "measure", lambda: sizes)
    made = docs.readme("Small: <!-- size -->old\nwords<!-- /size --> Yes.")
    assert made == f"Small: <!-- size -->{size.claim(sizes)}<!-- /size --> Yes."
    assert "is 100 lines in 2 files" in made
    assert docs.readme(made) == made
