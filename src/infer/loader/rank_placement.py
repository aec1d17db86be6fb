"""Places the ranks of a model: the node and the GPU of each, and the part of the model that it computes.

    2 parts of 2 stages, on 2 nodes    rank     0       1       2       3
    LoadConfig.ranks_of_nodes          node     0       0       1       1
    Rank.of (slices.py)                stage    1       1       0       0         rank 0 has the last layers
                                       part     0       1       0       1
    rank_device                        GPU      cuda:0  cuda:1  cuda:0  cuda:1    unless `device` names one

Replicas are placed by client/placement.py on one machine, and by cluster/placing.py on several.
"""

from __future__ import annotations

import torch

from infer.config.settings import LoadConfig
from infer.errors import ConfigError
from infer.kernels.runtime.dispatch import is_amd
from infer.loader.load import choose_device
from infer.loader.slices import Rank


def rank_of(load: LoadConfig, number: int) -> Rank:
    """Return the part of the model that a rank computes, by its number among all ranks."""
    return Rank.of(number, load.tensor_parallel_size, load.pipeline_parallel_size)


def rank_device(load: LoadConfig, number: int) -> str:
    """Return the device of a rank, as it would be written in a setting."""
    device, rank, nnodes, num_here = load.device, rank_of(load, number), load.nnodes, load.num_local_ranks
    if rank.is_alone or choose_device(device).index is None:
        return device
    asked = " and ".join(f"{name}={size}" for name, size in rank.settings.items())
    if is_amd():
        raise ConfigError(f"{asked} needs GPUs of NVIDIA; leave it out, or use device=cpu")
    if load.names_gpu:
        if num_here > 1 < nnodes:
            raise ConfigError(
                f"{asked} with nnodes={nnodes} puts {num_here} ranks on each machine, and NCCL, which joins "
                f"them, needs a GPU for each; device={device} is one: leave it out"
            )
        return device
    if (num_gpus := torch.cuda.device_count()) < num_here:
        where = f"{num_here} on each of {nnodes} machines" if nnodes > 1 else f"{num_here} in all"
        share = ", let all ranks share one GPU with device=cuda:0" if nnodes == 1 else ""
        raise ConfigError(
            f"{asked} needs as many GPUs, {where}, and this machine has {num_gpus}; ask for fewer{share}, or "
            "use device=cpu"
        )
    return f"cuda:{number % num_here}"


def node_device(load: LoadConfig) -> torch.device:
    """Return the device of this machine's first rank."""
    return choose_device(rank_device(load, load.ranks_of_nodes[load.node_rank][0]))


def rank_threads(load: LoadConfig, num_threads: int) -> int:
    """Return the CPU threads of each rank of a machine that has `num_threads` for all of them."""
    return max(1, num_threads // load.num_local_ranks)
