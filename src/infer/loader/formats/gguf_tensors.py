"""The tensors of a GGUF file with the names and the layout of a Hugging Face checkpoint.

The two formats use different names, and the converter that writes GGUF files also changes some tensors.
Both are translated back here, so that weight maps need only one set of names:

    llama, mistral3, granite, smollm3
             rows of q and k are reordered, because GGUF rotates neighbouring channels where other formats
             rotate channel i with i + H/2:      (head, 2, H/2)  is stored as  (head, H/2, 2)
    gemma2, gemma3   norm weights are stored with 1 added
    qwen3next, qwen35, qwen35moe   gguf_hybrid.py
    qwen2moe the gate of the shared expert, a matrix of one row, is stored as a vector
    gpt2     matrices are stored [out, in], unlike Hugging Face's [in, out]

The rows of a matrix are reordered while they are still packed. Matrices are unpacked only when they are
copied into place, a few rows at a time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from infer.errors import CheckpointError
from infer.loader.formats.axes import ROWS, WHOLE, Axes, plain_axes
from infer.loader.formats.checkpoint import StoredTensor, forget_pages, slices_of
from infer.loader.formats.gguf import BLOCK, GGUFFile, GGUFTensor
from infer.loader.formats.gguf_config import HYBRID, LONGROPE_FACTORS, ROPE_FACTORS, Keys, has_grouped_rows
from infer.loader.formats.gguf_hybrid import HYBRID_NAMES, hybrid_changes, rows_by_part
from infer.loader.formats.gguf_quants import SUPPORTED, coded_rows, dequantize, stored_codes
from infer.quant.coded import CodedRows, StoredCodes

# fmt: off
_DENSE = {
    "token_embd":              "model.embed_tokens",
    "blk.{}.attn_norm":        "model.layers.{}.input_layernorm",
    "blk.{}.attn_q":           "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k":           "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v":           "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output":      "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm":         "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate":         "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up":           "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down":         "model.layers.{}.mlp.down_proj",
    "output_norm":             "model.norm",
    "output":                  "lm_head",
}
_LLAMA = _DENSE | {  # also the architecture in Mixtral's files
    "blk.{}.ffn_gate_inp":     "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps":    "model.layers.{}.mlp.experts.gate_proj",
    "blk.{}.ffn_up_exps":      "model.layers.{}.mlp.experts.up_proj",
    "blk.{}.ffn_down_exps":    "model.layers.{}.mlp.experts.down_proj",
}
_QWEN2_MOE = _LLAMA | {
    "blk.{}.ffn_gate_shexp":   "model.layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp":     "model.layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp":   "model.layers.{}.mlp.shared_expert.down_proj",
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
}
_GPT_OSS = _LLAMA | {
    "blk.{}.attn_sinks":       "model.layers.{}.self_attn.sinks",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate_inp":     "model.layers.{}.mlp.router",
}
_QWEN3 = _DENSE | {
    "blk.{}.attn_q_norm":      "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm":      "model.layers.{}.self_attn.k_norm",
}
_GEMMA3 = _QWEN3 | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm":         "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm":    "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA4 = _GEMMA3 | {
    "per_layer_token_embd":    "model.embed_tokens_per_layer",
    "per_layer_model_proj":    "model.per_layer_model_projection",
    "per_layer_proj_norm":     "model.per_layer_projection_norm",
    "blk.{}.layer_output_scale": "model.layers.{}.layer_scalar",
    "blk.{}.inp_gate":         "model.layers.{}.per_layer_input_gate",
    "blk.{}.proj":             "model.layers.{}.per_layer_projection",
    "blk.{}.post_norm":        "model.layers.{}.post_per_layer_input_norm",
    "blk.{}.post_ffw_norm_1":  "model.layers.{}.post_feedforward_layernorm_1",
    "blk.{}.pre_ffw_norm_2":   "model.layers.{}.pre_feedforward_layernorm_2",
    "blk.{}.post_ffw_norm_2":  "model.layers.{}.post_feedforward_layernorm_2",
    "blk.{}.ffn_gate_inp":     "model.layers.{}.router.proj",
    "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",  # a leaf; other keys are modules
    "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale",
    "blk.{}.ffn_gate_up_exps": "model.layers.{}.experts.gate_up_proj",
    "blk.{}.ffn_gate_exps":    "model.layers.{}.experts.gate_proj",
    "blk.{}.ffn_up_exps":      "model.layers.{}.experts.up_proj",
    "blk.{}.ffn_down_exps":    "model.layers.{}.experts.down_proj",
}
_POST_NORM = _QWEN3 | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm":    "model.layers.{}.post_feedforward_layernorm",
}
_PHI3 = _DENSE | {
    "blk.{}.attn_qkv":         "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up":           "model.layers.{}.mlp.gate_up_proj",
}
_GLM4 = _DENSE | {
    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blk.{}.post_ffw_norm":    "model.layers.{}.post_mlp_layernorm",
    "blk.{}.ffn_up":           "model.layers.{}.mlp.gate_up_proj",
}
_GPT2 = {
    "token_embd":              "transformer.wte",
    "position_embd":           "transformer.wpe",
    "blk.{}.attn_norm":        "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv":         "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output":      "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm":         "transformer.h.{}.ln_2",
    "blk.{}.ffn_up":           "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down":         "transformer.h.{}.mlp.c_proj",
    "output_norm":             "transformer.ln_f",
    "output":                  "lm_head",
}
# fmt: on
NAMES: dict[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _DENSE,
    "qwen2moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3moe": _LLAMA | _QWEN3,
    "gemma2": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "granite": _DENSE,
    "smollm3": _DENSE,
    "olmo2": _POST_NORM,
    "olmoe": _LLAMA | _QWEN3,
    "exaone4": _POST_NORM,
    "phi3": _PHI3,
    "glm4": _GLM4,
    "cohere2": _DENSE,
    "mistral3": _DENSE,
    **dict.fromkeys(HYBRID, _QWEN2_MOE | _QWEN3 | HYBRID_NAMES),
    "gpt-oss": _GPT_OSS,
    "gpt2": _GPT2,
}
PERMUTED = ("llama", "mistral3", "granite", "smollm3")  # architectures whose queries and keys are reordered


@dataclass(frozen=True, slots=True)
class PackedTensor(StoredTensor):
    """One tensor of a GGUF file, and the converter's changes that must be undone."""

    file: GGUFFile
    stored: GGUFTensor
    order: tuple[int, ...] = ()  # the row in the file of each row; (): as stored
    columns: tuple[int, ...] = ()  # likewise for the columns of a matrix
    offset: float = 0.0  # number that was added to every weight
    is_rate: bool = False  # True: stored as minus the exponential of each number
    transposed: bool = False  # True: stored as the transpose of what the name means
    index: int | None = None  # number of this matrix in a stack [n, rows, columns]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape as the Hugging Face name means it."""
        shape = self.stored.shape if self.index is None else self.stored.shape[1:]
        shape = (len(self.order), *shape[1:]) if self.order else shape
        return shape[::-1] if self.transposed else shape

    @property
    def num_bytes(self) -> int:
        """The tensor's size on disk."""
        return self.stored.num_bytes if self.index is None else self.stored.num_bytes // self.stored.shape[0]

    @property
    def type_name(self) -> str:
        """The type of its blocks."""
        return self.stored.kind.name

    @property
    def is_readable(self) -> bool:
        """True if the block format is supported."""
        return self.type_name in SUPPORTED

    @property
    def codes(self) -> StoredCodes | None:
        """The description of its blocks' codes."""
        return None if self.offset else stored_codes(self.stored.kind, self.stored.shape[-1])

    @property
    def formats(self) -> tuple[str, ...]:
        """The name "gguf", for all block types."""
        return ("gguf",)

    @property
    def axes(self) -> Axes:
        """The axes: rows, and blocks of columns. Rows are reordered within heads, so cut whole heads only."""
        if self.stored.name.endswith("_exps.bias"):  # biases of all experts, or of one
            return {"weight": (WHOLE, ROWS)[-len(self.shape) :]}
        *others, last = plain_axes(len(self.shape))
        step = BLOCK[self.stored.kind][0]
        return {"weight": (*others, last._replace(step=step, unit="block"))}

    def copy_to(self, out: torch.Tensor) -> None:
        """Unpack into `out`, undoing the converter's changes."""
        if out.dim() > 1:
            StoredTensor.copy_to(self, out.view(-1, out.shape[-1]))
            return
        weights = dequantize(self._packed_rows().to(out.device), self.stored.kind)[0]
        weights = weights[list(self.order)] if self.order else weights
        weights = (-weights).log() if self.is_rate else weights
        out.copy_(weights - self.offset if self.offset else weights)

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows of a matrix: codes, or float32 if the file has plain numbers."""
        assert not self.transposed and not self.offset, self.stored.name
        packed = self.packed_rows()
        for part in slices_of(len(packed), num_rows):
            yield part, self.coded(packed[part].to(device))
        self._forget()

    def packed_rows(self) -> torch.Tensor:
        """Return the rows of a matrix as bytes, in the row order that the name means."""
        packed = self._packed_rows()
        return packed[list(self.order)] if self.order else packed

    def coded(self, packed: torch.Tensor) -> CodedRows | torch.Tensor:
        """Return rows of whole blocks as codes, or as float32 if blocks are plain numbers."""
        rows = coded_rows(packed, self.stored.kind)
        if not self.columns:
            return rows
        order = torch.tensor(self.columns, device=packed.device)
        return rows[:, order] if isinstance(rows, torch.Tensor) else _with_columns(rows, order, self.stored)

    @property
    def num_blocks(self) -> int:
        """The number of blocks in a row."""
        return self.stored.shape[-1] // BLOCK[self.stored.kind][0]

    def transpose(self) -> StoredTensor | None:
        """Return the matrix as it is stored, if the name means its transpose."""
        return replace(self, transposed=False) if self.transposed else None

    def matrix(self, index: int) -> StoredTensor:
        """Return one matrix of a stack."""
        return replace(self, index=index)

    def _forget(self) -> None:
        """Release the pages that were read: they need not stay in memory next to the copy."""
        start = self.stored.offset + (self.index or 0) * self.num_bytes
        forget_pages(self.file.mapped, start, start + self.num_bytes)

    def _packed_rows(self) -> torch.Tensor:
        packed = torch.from_numpy(self.file.packed_rows(self.stored.name))
        if self.index is None:
            return packed
        return packed.view(self.stored.shape[0], -1, packed.shape[1])[self.index]


def _with_columns(rows: CodedRows, order: torch.Tensor, stored: GGUFTensor) -> CodedRows:
    """Return codes with their columns in another order, which must keep groups whole."""
    size = rows.groups
    assert isinstance(size, int) and isinstance(rows.zeros, int), stored.name
    groups = order.view(-1, size)[:, 0] // size if len(order) % size == 0 else order[:0]
    if not torch.equal(groups.repeat_interleave(size) * size + order % size, order):
        raise CheckpointError(
            f"{stored.name!r} has groups of {size} columns in {stored.kind.name}, which its heads cannot "
            "share"
        )
    minima = None if rows.minima is None else rows.minima[:, groups]
    return rows._replace(codes=rows.codes[:, order], scales=rows.scales[:, groups], minima=minima)


@functools.cache  # layers share it
def _pairs_apart(num_rows: int, num_heads: int) -> tuple[int, ...]:
    """Return the order that turns (head, H/2, 2) into (head, 2, H/2)."""
    by_pair = torch.arange(num_rows).view(num_heads, -1, 2)
    return tuple(by_pair.transpose(1, 2).flatten().tolist())


def gguf_checkpoint(file: GGUFFile) -> dict[str, StoredTensor]:
    """Return every tensor of the file by its Hugging Face name, in the order of the file."""
    keys = Keys(file)
    names, num_layers = NAMES[keys.architecture], keys.num_layers()
    tensors: dict[str, StoredTensor] = {}
    for stored in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if stored.name in (ROPE_FACTORS, *LONGROPE_FACTORS.values()):  # read with the config
            continue
        layer = re.findall(r"^blk\.(\d+)\.", stored.name)
        if keys.architecture in HYBRID and layer and int(layer[0]) >= num_layers:
            continue  # a layer that predicts further tokens
        key, leaf = re.sub(r"^blk\.(\d+)\.", "blk.{}.", stored.name), "weight"
        if key not in names:
            key, _, leaf = key.rpartition(".")
        if key not in names:
            raise CheckpointError(
                f"{file.path}: tensor {stored.name!r} is not part of a {keys.architecture} model"
            )
        name = f"{names[key].format(*layer)}.{leaf}"
        if key == "blk.{}.ssm_ba" and not has_grouped_rows(file):
            for part, rows in rows_by_part(keys, stored).items():
                tensors[name.replace("in_proj_ba", f"in_proj_{part}")] = PackedTensor(
                    file, stored, order=rows
                )
        else:
            tensors[name.replace(".sinks.weight", ".sinks")] = _undone(keys, stored, key)
    return tensors


def _undone(keys: Keys, stored: GGUFTensor, key: str) -> PackedTensor:
    file, architecture = keys.file, keys.architecture
    if architecture in PERMUTED and key in ("blk.{}.attn_q", "blk.{}.attn_k"):
        heads = keys.size("attention.head_count")
        if key == "blk.{}.attn_k":
            heads = keys.size("attention.head_count_kv", default=heads)
        if stored.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{file.path}: {stored.name!r} has {stored.shape[0]} rows, which {heads} heads cannot share"
            )
        return PackedTensor(file, stored, order=_pairs_apart(stored.shape[0], heads))
    if architecture in ("gemma2", "gemma3") and key.endswith("norm"):
        return PackedTensor(file, stored, offset=1.0)
    if key.endswith("_inp_shexp") and len(stored.shape) == 1:  # a matrix of one row, stored as a vector
        stored = replace(stored, shape=(1, *stored.shape))
    if architecture in HYBRID:
        changes = hybrid_changes(keys, stored, key)
        if key == "blk.{}.ssm_conv1d":
            stored = replace(stored, shape=(stored.shape[0], 1, *stored.shape[1:]))
        return PackedTensor(file, stored, **changes)
    is_matrix = len(stored.shape) == 2 and key.startswith("blk.")
    return PackedTensor(file, stored, transposed=architecture == "gpt2" and is_matrix)
