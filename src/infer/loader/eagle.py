"""Read an EAGLE-3 head from its directory: config.json and one or several safetensors files.

Everything that does not fit is reported before a weight is read: tensors that are missing, unused or of the
wrong shape, and draft tokens outside the model's vocabulary. The head has the dtype and the device of its
model; if the model's matrices are packed for a CPU, the head's are rounded to 8 bits.

Two tensors are not weights. `d2t` maps the draft vocabulary to the model's, as *offsets*: draft token w is
token w + d2t[w] of the model. `t2d` has a flag for each token of the model, and must mark the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from infer.errors import CheckpointError
from infer.layers.linear import Projected
from infer.loader.formats.checkpoint import StoredTensor, open_checkpoint
from infer.loader.formats.hf_config import read_hf_config
from infer.loader.headers import find_sources
from infer.loader.load import LoadedModel
from infer.loader.placement import match_tensors
from infer.models.config import ModelConfig
from infer.models.eagle3 import WEIGHT_MAP, Eagle3, EagleConfig, read_config
from infer.quant.packed import Int8, Packed


def load_eagle(directory: Path, target: LoadedModel, *, num_drafts: int = 0) -> Eagle3:
    """Load a head for a model; its rotary tables reach `num_drafts` positions beyond the longest sequence."""
    config, tensors = read_eagle_headers(directory, target.config)
    token_ids_W = _read_token_ids(directory, config, tensors)
    block = replace(config.block, context_len=target.max_seq_len + num_drafts)
    packs = any(isinstance(each.stored, Packed) for each in _matrices(target.model))
    make = partial(_make, replace(config, block=block), target.dtype, packs=packs)
    match = partial(
        match_tensors,
        tensors=find_sources(tensors, WEIGHT_MAP),
        weight_map=WEIGHT_MAP,
        name=directory.name,
        is_tied=False,
    )
    match(make(torch.device("meta")))  # check first: a wrong config could allocate any amount of memory
    head = make(target.device)
    with torch.no_grad():
        for move in match(head):
            move.run(head)
        head.token_ids_W.copy_(token_ids_W)
    head.share(target.model)
    return head.eval()


def _make(config: EagleConfig, dtype: torch.dtype, device: torch.device, *, packs: bool) -> Eagle3:
    """Build a head without its weights; `packs`: its matrices are kept in 8 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            head = Eagle3(config)
    finally:
        torch.set_default_dtype(before)
    for matrix in _matrices(head) if packs else ():
        matrix.use(Int8(matrix.spec))
    return head


def _matrices(network: nn.Module) -> list[Projected]:
    return [module for module in network.modules() if isinstance(module, Projected)]


def head_bytes(config: EagleConfig, dtype: torch.dtype, *, packs: bool) -> int:
    """The bytes of a head's weights; `packs`: the model is packed for a CPU."""
    head = _make(config, dtype, torch.device("meta"), packs=packs)
    return sum(parameter.numel() * parameter.element_size() for parameter in head.parameters())


def read_eagle_headers(directory: Path, target: ModelConfig) -> tuple[EagleConfig, dict[str, StoredTensor]]:
    """Return the config of a head, checked against its model, and its tensors by name."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; a head has config.json and weights")
    if not any(directory.glob("*.safetensors")) and (found := sorted(directory.glob("*.bin"))):
        raise CheckpointError(
            f"{directory} has {found[0].name} and no *.safetensors; pickles are not opened: convert it "
            f"with scripts/unpickle.py {found[0]} {directory}"
        )
    tensors = open_checkpoint(directory)
    return read_config(read_hf_config(directory), tensors, target), tensors


def _read_token_ids(directory: Path, config: EagleConfig, tensors: dict[str, StoredTensor]) -> torch.Tensor:
    """Return the model's ids of all draft tokens; removes d2t and t2d, which give them, from `tensors`."""
    size, vocab_size = config.draft_vocab_size, config.block.vocab_size
    token_ids_W = torch.arange(size)
    offsets = _take(directory, tensors, "d2t", torch.int64, size)
    flags = _take(directory, tensors, "t2d", torch.bool, vocab_size)
    if offsets is not None:
        token_ids_W += offsets
    elif size != vocab_size:
        raise CheckpointError(
            f"{directory} has no d2t, which maps its {size} draft tokens to the model's {vocab_size}"
        )
    if int(token_ids_W.min()) < 0 or int(token_ids_W.max()) >= vocab_size:
        low, high = int(token_ids_W.min()), int(token_ids_W.max())
        raise CheckpointError(f"d2t of {directory} names tokens {low}..{high}, the model has {vocab_size}")
    if len(set(token_ids_W.tolist())) != size:
        raise CheckpointError(f"d2t of {directory} names some tokens twice; it must hold offsets, not ids")
    if flags is not None and not (int(flags.sum()) == size and bool(flags[token_ids_W].all())):
        raise CheckpointError(f"t2d and d2t of {directory} name different draft tokens")
    return token_ids_W


def _take(
    directory: Path, tensors: dict[str, StoredTensor], name: str, dtype: torch.dtype, size: int
) -> torch.Tensor | None:
    """Pop one of the two tensors that are not weights, and read it; None: it is absent."""
    stored = tensors.pop(name, None)
    if stored is None:
        return None
    if stored.shape != (size,) or stored.dtype is not dtype:
        raise CheckpointError(
            f"{name} of {directory} is {stored.type_name} {list(stored.shape)}, not {dtype} [{size}]"
        )
    values = torch.empty(size, dtype=dtype)
    stored.copy_to(values)
    return values
