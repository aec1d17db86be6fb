"""Policies, proposers and allocators of a user's own, named in a knob."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from infer.cache.block_allocator import BlockAllocator
from infer.cache.memory import CacheSize
from infer.cli.main import main as infer
from infer.config.own_code import load_code, names_code
from infer.config.settings import EngineConfig
from infer.config.speculation import SpeculationConfig
from infer.engine.build import make_pool
from infer.engine.speculation_build import _make_proposer
from infer.errors import ConfigError, EngineError
from infer.scheduling.policies import Policy, find_policy
from infer.speculative.careful import CarefulProposer
from infer.speculative.proposer import Wish

FILE = """
from infer.cache.block_allocator import BlockAllocator
from infer.scheduling.policies import Policy

def urgency(seq):
    return -seq.num_prompt

LATE = Policy(urgency=urgency, prompts_first=True)
number = 4

class Mine(BlockAllocator):
    pass

class Guesses:
    def propose(self, wishes):
        return [() for _ in wishes]

    def has_match(self, wish):
        return False

    def finish(self, wish):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "is_code"),
    [
        ("a.b:C", True),
        ("a:c", True),
        ("x/y-z.py:C", True),
        ("C:\\x\\y.py:C", True),
        ("fcfs", False),
        (":C", False),
        ("a.b:", False),
        ("a b:C", False),
        ("a:b:c d", False),
        (None, False),
    ],
)
def test_names_of_code_are_told_from_other_values(text: object, is_code: bool) -> None:
    assert names_code(text) is is_code


def test_module_and_file_are_loaded(file: Path) -> None:
    assert load_code("infer.scheduling.policies:Policy", "scheduler_policy") is Policy
    assert load_code(f"{file}:number", "scheduler_policy") == 4


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:X", "cannot be imported (ModuleNotFoundError"),
        ("none.py:X", "cannot be imported (FileNotFoundError"),
        ("{file}:nothing", "has no 'nothing'; it has"),
    ],
)
def test_code_that_cannot_be_had_is_refused(value: str, said: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_code(value.format(file=file), "scheduler_policy")
    assert said in str(error.value)
    assert str(error.value).startswith("scheduler_policy=")


def test_file_that_raises_is_refused_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_code(f"{path}:x", "scheduler_policy")
    path.write_text("x = 1\nfor _ in range(3): pass\n", encoding="utf-8")
    assert load_code(f"{path}:x", "scheduler_policy") == 1


def test_policy_is_an_object_or_a_function(file: Path) -> None:
    assert find_policy(f"{file}:LATE").prompts_first
    assert not find_policy(f"{file}:urgency").prompts_first
    for wrong in ("number", "Mine"):
        with pytest.raises(ConfigError, match="must be an infer.scheduling.policies.Policy"):
            find_policy(f"{file}:{wrong}")


def test_allocator_is_a_subclass(file: Path) -> None:
    size = CacheSize(num_blocks=4, block_size=16, bytes_per_token=1)
    pool = make_pool(EngineConfig.from_knobs(block_allocator=f"{file}:Mine"), size)
    assert type(pool._device).__name__ == "Mine"
    assert type(make_pool(EngineConfig(), size)._device) is BlockAllocator
    with pytest.raises(ConfigError, match="must be a subclass of"):
        make_pool(EngineConfig.from_knobs(block_allocator=f"{file}:Guesses"), size)


def test_proposer_is_a_class_with_three_methods(file: Path) -> None:
    settings = SpeculationConfig(speculative_method=f"{file}:Guesses")
    assert settings.is_on
    assert type(_make_proposer(settings)).__name__ == "CarefulProposer"
    with pytest.raises(ConfigError, match="propose, has_match, finish"):
        _make_proposer(SpeculationConfig(speculative_method=f"{file}:Mine"))
    with pytest.raises(ConfigError, match="looks drafts up and needs no draft_model"):
        EngineConfig.from_knobs(speculative_method=f"{file}:Guesses", draft_model="x")


def test_policy_that_returns_no_number_refuses_the_request(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text("def nothing(seq): return None\ndef nan(seq): return float('nan')\n", encoding="utf-8")
    for name in ("nothing", "nan"):
        with pytest.raises(EngineError, match="it must return a number"):
            find_policy(f"{path}:{name}").urgency(None)  # type: ignore[arg-type]  # it is not looked at


class Faulty:
    """A proposer that breaks every promise."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        if self.answer is None:
            raise RuntimeError("no idea")
        return self.answer  # type: ignore[return-value]  # whatever it is

    def has_match(self, wish: Wish) -> bool:
        raise RuntimeError("no idea")

    def finish(self, wish: Wish) -> None:
        raise RuntimeError("no idea")


@pytest.mark.parametrize("answer", [None, [], [[1], [2], [3]], [["a"], [1]], 7])
def test_faults_of_a_proposer_cost_drafts_and_are_said_once(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = CarefulProposer(Faulty(answer), "mine.py:Faulty")
    wish = Wish(1, array("I", [1, 2]), 1, "", 4)
    assert [list(drafts) for drafts in proposer.propose([wish, wish])] == [[], []]
    assert proposer.has_match(wish) is False
    proposer.finish(wish)
    assert len(caplog.records) == 1 and "mine.py:Faulty" in caplog.text


def test_drafts_of_a_proposer_are_passed_on() -> None:
    wish = Wish(1, array("I", [1, 2]), 1, "", 4)
    assert CarefulProposer(Faulty([(5, 6)]), "x").propose([wish]) == [[5, 6]]


def test_unknown_choice_says_that_code_may_be_named() -> None:
    with pytest.raises(ConfigError, match="or code of your own, as module:Name or file.py:Name"):
        EngineConfig.from_knobs(scheduler_policy="fastest")


def test_simulation_compares_a_policy_of_ones_own(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = f"fcfs,{file}:urgency"
    command = ["simulate", "--workload", "mixed", "--num-requests", "20", "--num-blocks", "256"]
    assert infer([*command, "--policy", policies]) == 0
    assert "mine.py:urgency" in capsys.readouterr().out


def test_own_code_is_listed_by_knob(file: Path) -> None:
    config = EngineConfig.from_knobs(scheduler_policy=f"{file}:urgency", block_allocator=f"{file}:Mine")
    assert set(config.own_code()) == {"scheduler_policy", "block_allocator"}
    assert EngineConfig().own_code() == []
