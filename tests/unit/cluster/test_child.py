"""A replica's process, as the one that has started it sees it."""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import pytest

from infer.client.messages import NodeLaunch
from infer.cluster.child import ReplicaLaunch, ReplicaProcess
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError

PATIENCE_S = 60.0
NOTHING = ReplicaLaunch(models={}, server=ServerConfig(), log_level="info")


def test_a_process_that_prints_much_is_not_kept_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    process = ReplicaProcess(NOTHING, "tests.support.chatty_replica")
    assert process.wait_ready() == "http://127.0.0.1:1"
    ends: list[str] = []
    waiter = threading.Thread(target=lambda: ends.append(process.wait_end()), daemon=True)
    waiter.start()
    waiter.join(PATIENCE_S)
    assert ends and ends[0].startswith("its process ended with code 7"), ends
    assert "a line of a package" in capfd.readouterr().err


def test_a_log_that_is_closed_keeps_no_process_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    process = ReplicaProcess(NOTHING, "tests.support.chatty_replica")
    assert process.wait_ready() == "http://127.0.0.1:1"
    assert process.wait_end().startswith("its process ended with code 7")


def test_a_process_that_ends_before_it_serves_says_why() -> None:
    process = ReplicaProcess(msgspec.structs.replace(NOTHING, log_level="wrong"))
    with pytest.raises(RuntimeError, match=r"a replica could not start:\n(.*\n)*.*wrong"):
        process.wait_ready()


@pytest.mark.parametrize(
    ("orders", "module", "kind"),
    [
        (
            NodeLaunch(config=EngineConfig(), log_level="info", token="t"),
            "infer.cluster.child",
            "ReplicaLaunch",
        ),
        (NOTHING, "infer.client.rank_node", "NodeLaunch"),
    ],
)
def test_orders_of_another_version_are_refused_in_one_line(
    orders: ReplicaLaunch | NodeLaunch, module: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = ReplicaProcess(orders, module)
    said = (
        rf"^a replica could not start:\nerror: \d+ bytes of orders are not a {kind}: .*unknown field `\w+`$"
    )
    with pytest.raises(RuntimeError, match=said):
        process.wait_ready()
    assert process.wait_end().startswith("its process ended with code 1: error: ")
    assert "Traceback" not in capfd.readouterr().err


def test_a_path_that_orders_cannot_hold_is_refused() -> None:
    config = EngineConfig.from_knobs(model="/models/\udcff")  # how Python spells a byte that is not UTF-8
    launch = msgspec.structs.replace(NOTHING, models={"m": config})
    with pytest.raises(ConfigError, match=r"the name '/models/\\udcff' is not UTF-8, .*; rename the file"):
        ReplicaProcess(launch)
