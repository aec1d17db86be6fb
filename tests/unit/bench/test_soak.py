"""The verdict of a soak: errors, memory that grows, latency beyond a limit; and which processes are read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from infer.bench.metrics import RequestTrace, Slo
from infer.bench.soak import Soak, drift_of, judge, server_pids
from infer.bench.sse_client import Endpoint
from infer.cache.host_bytes import resident_bytes

GIB = float(2**30)


def answers(*ttfts: float, errors: int = 0) -> list[RequestTrace]:
    good = [RequestTrace(session=0, turn=0, asked=0.0, chunks=[ttft, ttft + 1]) for ttft in ttfts]
    return good + [RequestTrace(session=0, turn=0, asked=0.0, error="HTTP 503") for _ in range(errors)]


def test_a_server_without_faults_passes() -> None:
    soak = Soak(seconds=300.0, traces=answers(0.1, 0.2), host_bytes=[GIB] * 40, gpu_bytes=[2 * GIB] * 40)
    assert judge(soak, Slo(ttft=0.5)) == []


@pytest.mark.parametrize(
    ("soak", "slo", "fault"),
    [
        (Soak(seconds=300.0, traces=answers(0.1, errors=1)), Slo(), "1 of 2 requests failed"),
        (Soak(), Slo(), "0 of 0 requests failed"),
        (
            Soak(seconds=300.0, traces=answers(0.1, 3.0)),
            Slo(ttft=0.5),
            "TTFT p99 was 2.97 s, the limit is 0.5 s",
        ),
        (
            Soak(seconds=300.0, traces=answers(0.1), host_bytes=[GIB + step * 2**22 for step in range(40)]),
            Slo(),
            "host memory grew by 80 MiB (7%)",
        ),
        (
            Soak(seconds=300.0, traces=answers(0.1), gpu_bytes=[GIB] * 30 + [2 * GIB] * 10),
            Slo(),
            "GPU memory grew by 1024 MiB (100%)",
        ),
        (
            Soak(seconds=300.0, traces=answers(0.1), gpu_bytes=[GIB] * 30 + [2 * GIB] * 10, is_shared=True),
            Slo(),
            "GPU (all processes) memory grew by 1024 MiB (100%)",
        ),
    ],
)
def test_each_fault_is_named(soak: Soak, slo: Slo, fault: str) -> None:
    [found] = judge(soak, slo)
    assert found == fault


def test_growth_of_a_short_soak_is_not_judged() -> None:
    assert judge(Soak(traces=answers(0.1), host_bytes=[GIB] * 30 + [2 * GIB] * 10, seconds=20.0), Slo()) == []


def test_what_warms_up_in_the_first_quarter_is_no_leak() -> None:
    readings = [GIB / 10 * step for step in range(10)] + [GIB] * 30
    assert drift_of(readings) == (0.0, 0.0)
    assert drift_of(readings[:3]) is None


def test_a_little_growth_is_no_leak() -> None:
    many = [100 * GIB + step * 2**27 for step in range(40)]  # 2.5 GiB of 100
    few = [2**20 * (1.0 + step) for step in range(40)]  # 20 MiB, which is twice as much as before
    assert judge(Soak(seconds=300.0, traces=answers(0.1), host_bytes=many, gpu_bytes=few), Slo()) == []


def test_the_processes_of_a_server_are_found_by_its_address(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(path)
        unix.listen()
        for url in (f"http://127.0.0.1:{tcp.getsockname()[1]}", f"unix://{path}"):
            assert os.getpid() in server_pids(Endpoint(url=url))
    assert os.getpid() not in server_pids(Endpoint(url=f"unix://{path}x"))
    assert resident_bytes(os.getpid()) > 2**20 and resident_bytes(2**30) == 0
