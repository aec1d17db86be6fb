"""Place several engines of one model on one machine: each gets its own GPU, or its share of the CPU.

    replica          0       1       2       3
    4 GPUs           cuda:0  cuda:1  cuda:2  cuda:3          among the GPUs that CUDA_VISIBLE_DEVICES names
    2 GPUs, shared   cuda:0  cuda:1  cuda:0  cuda:1          each with half of `device_memory`
    8 cores          0, 1    2, 3    4, 5    6, 7            two threads each, which stay on their cores

More replicas than GPUs are rejected unless `share_device` allows it: two engines on one GPU take turns, and
serve no more than one engine with the memory of both. Each engine's process picks its own device when it
starts, because only that process imports PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infer.client.messages import Replica
from infer.config.defaults import GPU_SHARE
from infer.config.knobs import parse_bytes
from infer.config.settings import EngineConfig
from infer.errors import ConfigError


def is_on_gpu(config: EngineConfig) -> bool:
    """Return True if a model will run on a GPU, as far as this is known without importing torch."""
    has_gpu = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    return config.load.device.startswith("cuda") or (config.load.device == "auto" and has_gpu)


def take_place(config: EngineConfig, replica: Replica) -> EngineConfig:
    """Return the config with the device, memory and threads of one replica, and bind this process to them.

    A single engine has the whole machine, and is bound only to a GPU that its config names, such as cuda:1.
    """
    if replica.count == 1 and not config.load.names_gpu:
        return config
    import torch  # imported here: a single engine, or one without a model, does not need it

    from infer.loader.load import choose_device

    device = choose_device(config.load.device)
    if device.index is not None:  # a GPU
        gpus = [device.index] if config.load.names_gpu else list(range(torch.cuda.device_count()))
        config = on_gpu(config, replica, gpus)
        torch.cuda.set_device(config.load.device)
        return config
    if config.load.num_threads is not None:
        return config
    cpus = own_cpus(replica, physical_cores())
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # affinity of this thread and the threads that it starts
    return share_threads(config, replica.count)


def share_threads(config: EngineConfig, count: int) -> EngineConfig:
    """Return the config of one of `count` engines that share this machine's CPU."""
    if count == 1 or config.load.num_threads is not None:
        return config
    import torch  # imported here: see above

    num_threads = max(torch.get_num_threads() // count, 1)
    return replace(config, load=replace(config.load, num_threads=num_threads))


def on_gpu(config: EngineConfig, replica: Replica, gpus: Sequence[int]) -> EngineConfig:
    """Return the config of a replica; replicas are assigned to these GPUs round-robin."""
    if replica.count > len(gpus) and not replica.shares_device:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
        have = f"device={config.load.device} is one" if config.load.names_gpu else f"there are {len(gpus)}"
        raise ConfigError(
            f"replicas={replica.count} need a GPU each, but {have}{where}; set replicas={len(gpus)} or less, "
            "or share_device to let replicas share GPUs and divide device_memory"
        )
    if replica.count > 1 < (load := config.load).num_ranks:
        raise ConfigError(
            f"replicas={replica.count} with tensor_parallel_size={load.tensor_parallel_size} and "
            f"pipeline_parallel_size={load.pipeline_parallel_size} is not supported on GPUs; start a server "
            "for each group, with GPUs of its own in CUDA_VISIBLE_DEVICES"
        )
    turn = replica.number % len(gpus)
    num_sharing = len(range(turn, replica.count, len(gpus)))
    cache = config.cache
    if num_sharing > 1:
        cache = replace(cache, device_memory=divide_memory(cache.device_memory, num_sharing))
    return replace(config, load=replace(config.load, device=f"cuda:{gpus[turn]}"), cache=cache)


def divide_memory(asked: str | None, count: int) -> str:
    """Return `device_memory` for each of `count` engines that share it: a size or a fraction."""
    asked = str(GPU_SHARE) if asked is None else asked  # share of the whole GPU: others need theirs
    try:
        return f"{float(asked) / count:.6f}" if float(asked) <= 1 else f"{int(float(asked)) // count}B"
    except ValueError:  # it has a unit
        return f"{parse_bytes(asked, 'device_memory') // count}B"


def own_cpus(replica: Replica, cores: Sequence[Sequence[int]]) -> set[int]:
    """Return the processors of a replica's cores; none if there are more replicas than cores."""
    if replica.count > len(cores):
        return set()
    first, last = (len(cores) * number // replica.count for number in (replica.number, replica.number + 1))
    return {cpu for core in cores[first:last] for cpu in core}


def physical_cores(root: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """Return the processors that this process may use, grouped by core."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        try:
            siblings = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return list(cores.values())
