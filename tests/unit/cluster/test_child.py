"""A replica's process, as the one that has started it sees it."""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import pytest

from infer.cluster.child import ReplicaLaunch, ReplicaProcess
from infer.config.server import ServerConfig

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
