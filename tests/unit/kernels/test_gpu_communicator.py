"""Ranks on GPUs that cannot work together are refused in time; nothing here needs a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infer.errors import ConfigError, DeviceLost
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.runtime.gpu_communicator import _wait_for_all, check_alike


def test_gpus_of_different_kinds_are_refused_by_name() -> None:
    check_alike(["NVIDIA L4", "NVIDIA L4"])
    with pytest.raises(ConfigError, match="rank 0 has NVIDIA L4, rank 1 has NVIDIA A10"):
        check_alike(["NVIDIA L4", "NVIDIA A10"])


@pytest.mark.parametrize(("is_aborted", "wait_s"), [(True, 60.0), (False, 0.0)])
def test_ranks_that_do_not_come_together_are_not_waited_for(is_aborted: bool, wait_s: float) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    shared: Any = SimpleNamespace(is_aborted=is_aborted)
    with pytest.raises(DeviceLost, match="did not come together for NCCL"):
        _wait_for_all(cast(SharedCommunicator, shared), wait_s, thread)
    over.set()
    thread.join()
