"""The form of every matrix of a model: decided once, from headers alone, before a weight is read.

    headers ──► Held ──► Rule ─────────┐
    (headers.py)         (quantization.py) ├──► {module: Kept}  ──► the model, its bytes, its start line
    the network, without memory ───────┘

A `Kept` has the scheme of a matrix, the form of its codes, and the tensors that fill it. All other parts read
the plan: loading builds the model from it, the memory plan counts the bytes of its `skeleton` (the same model
without memory), the code cache stores its rounded matrices, and the start line is its `describe`. The plan of
one rank has the rank's slices of all tensors (slices.py), and names the tensors that cannot be cut.

The rules for choosing a form are in `forms.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import nn

from infer.errors import ConfigError
from infer.kernels.linear.coded import FORMS, CodedForm
from infer.kernels.runtime.dispatch import device_kind
from infer.layers.embedding import Embedding
from infer.layers.linear import Projected, without_weights
from infer.layers.moe import ALWAYS_DENSE
from infer.layers.stages import Elsewhere, keep_stage, stage_layers
from infer.loader.formats.checkpoint import FLOATS, StoredTensor
from infer.loader.formats.gguf_quants import ROUNDED
from infer.loader.formats.quantized import describe, published_as, short_bytes
from infer.loader.formats.stored_module import Settings
from infer.loader.forms import (
    cpu_bits,
    form_of,
    is_mxfp4,
    joined_form,
    multiplies_mxfp4,
    orders_of,
    part_bits,
    rounded_form,
    stored_form,
)
from infer.loader.headers import ModelHeaders, WeightSource
from infer.loader.quantization import DENSE, PACKED, Held, Rule, choose_rule, home_of
from infer.loader.slices import ALONE, Cutter, Rank, Slice, own_vocabulary, rank_config, rank_counts
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.quant.coded import StoredCodes
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.memory import WeightMemory
from infer.quant.projection import Projection, Scheme, WeightSpec
from infer.quant.registry import FILE_SCHEMES, SCHEMES

META = torch.device("meta")
_ROUNDING_COSTS = {  # measured on a CPU (docs/features/cpu.md)
    "int8": ", about +0.3% perplexity on the default model",
    "int4": ", about +25% perplexity on the default model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The form of one module's weights in memory, and the tensors that fill it."""

    scheme: Scheme = SCHEMES[DENSE]
    sources: tuple[WeightSource, ...] = ()  # the matrix, or each part and expert of it, and the bias
    slices: tuple[Slice, ...] = ()  # the rank's slice of each source; (): all of it
    spec: WeightSpec | None = None  # the rank's matrix, with its form; None: not a linear layer

    @property
    def is_dense(self) -> bool:
        """True if its weights are plain numbers."""
        return self.scheme.name == DENSE

    @property
    def weights(self) -> list[StoredTensor]:
        """The tensors of its matrices."""
        return [source.tensor for source in self.sources if source.leaf == "weight"]

    @property
    def is_rounded(self) -> bool:
        """True if its codes are made during loading, by rounding plain numbers."""
        return not self.is_dense and all(tensor.type_name in FLOATS for tensor in self.weights)

    def make(
        self, device: torch.device, dtype: torch.dtype, memory: WeightMemory | None = None
    ) -> Projection:
        """Return an empty projection for the weights."""
        assert self.spec is not None, self
        spec = replace(self.spec, device=device, dtype=dtype, memory=memory)
        return self.scheme.make(spec) if spec.form is None else GPUWeights(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The plan for every tensor of a checkpoint on a device."""

    headers: ModelHeaders
    rule: Rule
    device: torch.device
    modules: Mapping[str, Kept]
    skeleton: Model  # the network with its projections, without memory
    rank: Rank = ALONE
    uncut: Mapping[str, str] = field(default_factory=dict)  # tensors that this rank cannot slice -> reason

    @property
    def has_codes(self) -> bool:
        """True if any matrix may be kept as codes."""
        if not self.rule.keeps_codes or self.rule.home == "cpu":
            return not self.rule.is_dense
        tensors, settings = self.headers.tensors.values(), self.headers.quantization
        return any(map(form_of, tensors)) or bool(settings and not tensors)

    @property
    def is_packed(self) -> bool:
        """True if the matrices are kept as packed integers for the C kernels."""
        return self.rule.home == "cpu" and self.rule.label in PACKED

    @property
    def config(self) -> ModelConfig:
        """The network that is built; on a rank, with the rank's heads and its share of rows."""
        return self.skeleton.config

    @property
    def slices(self) -> dict[str, Slice]:
        """The rank's slice of each tensor, by name; empty if it has all of the model."""
        kept = self.modules.values()
        pairs = (zip(each.sources, each.slices, strict=True) for each in kept if each.slices)
        return {source.name: cut for each in pairs for source, cut in each}

    def build(self, context_len: int) -> Model:
        """Return the unfilled model on its device, with rotary tables for `context_len` positions."""
        config, name = self.headers.config, self.headers.source.name
        # the number of learned positions is fixed by the checkpoint
        built = config if config.learned_positions else replace(config, context_len=context_len)
        with refused_if_full(name, self.rule.dtype, self.device):
            model = _network(replace(self.headers, config=built), self.rule.dtype, self.device, self.rank)
            self.give_projections(model, self.device)
        return model

    def check_cuts(self) -> None:
        """Refuse a number of ranks over which the weights cannot be split, with the first reason."""
        if self.uncut:
            name, why = next(iter(self.uncut.items()))
            others = f" and {len(self.uncut) - 1} more" if len(self.uncut) > 1 else ""
            sizes = [str(size) for size in rank_counts(self.headers.config) if size != self.rank.world_size]
            raise ConfigError(
                f"tensor_parallel_size={self.rank.world_size} cannot be used with {self.headers.source.name}"
                f": {why} ({name}{others}); its heads and sizes can be shared by {', '.join(sizes)}"
            )

    def give_projections(self, model: Model, device: torch.device) -> None:
        """Give every linear layer and every stack of experts an empty projection of its scheme.

        A tied embedding looks up its rows in the head, unless the head is dense: then it has its own table.
        If matrices are packed, tables with a row for each token are stored in 16 bits.
        """
        memory = WeightMemory() if device_kind(device) == "cpu" else None
        is_tied = model.config.tie_embeddings
        for name, kept in self.modules.items():
            layer = model.get_submodule(name)
            if not isinstance(layer, Projected) or (layer is model.head and is_tied and kept.is_dense):
                continue
            layer.use(kept.make(device, self.rule.dtype, memory))
        if isinstance(model.embedding, Elsewhere):
            return
        weight = model.embedding.weight
        if is_tied and not self.modules["head"].is_dense:
            model.embedding.table = model.head.stored
            shell = torch.empty(weight.shape, device="meta")  # a shell without memory
            model.embedding.weight = nn.Parameter(shell, requires_grad=False)
        for name, module in model.named_modules() if self.is_packed else ():
            if (
                not isinstance(module, Embedding)
                or module.table is not None
                or len(module.weight) != len(weight)
            ):
                continue
            tables = (tensor.dtype for tensor in self.modules.get(name, Kept()).weights)
            half = torch.bfloat16 if torch.bfloat16 in (self.headers.stored, *tables) else torch.float16
            table = torch.empty_like(module.weight, dtype=half)
            module.weight = nn.Parameter(table, requires_grad=False)

    def describe(self) -> str:
        """Describe the form of the weights on the device, for the start line; "": they stay plain numbers."""
        kept = kept_schemes(self.skeleton, self.rule.dtype)
        if self.rule.home == "cpu" and self.headers.tensors:
            return self._describe_packed(kept) if self.is_packed else ""
        if len(kept) == 1:
            return ""
        if self.rule.scheme is not None:
            return f"rounded to {_spell_sizes(kept)}{self.rule.scheme.cost and ', ' + self.rule.scheme.cost}"
        return self._describe_codes(kept)

    def _describe_codes(self, kept: Mapping[str, int]) -> str:
        """Describe weights on a GPU: `kept as int4 3.9GiB + bfloat16 1.2GiB`.

        It also names matrices that are unpacked because no form fits them, GGUF matrices whose short groups
        are rounded (`Q6_K 0.6GiB rounded to int8`), and unused scales of activations: each token has its own.
        """
        has_input_scales = False
        unpacked, rounded = list[StoredTensor](), list[StoredTensor]()
        for name, module in self.modules.items():
            layer = self.skeleton.get_submodule(name)
            is_embedding = name == "head" and self.headers.config.tie_embeddings and module.is_dense
            if not isinstance(layer, Projected) or is_embedding:
                continue
            for weight in module.weights:
                has_input_scales |= "input_scale" in weight.axes
                if weight.dtype is None and module.is_dense:
                    unpacked.append(weight)
                elif weight.type_name in ROUNDED:
                    rounded.append(weight)
        text = _spell_sizes(kept) + (f", {describe(rounded)} rounded to int8" if rounded else "")
        text += f", unpacked {describe(unpacked)}" if unpacked else ""
        return f"kept as {text}" + (", input scales not used" if has_input_scales else "")

    def _describe_packed(self, kept: Mapping[str, int]) -> str:
        """Describe packed weights: `Q4_1 86.0MiB, kept as int4 ...` if int4 keeps all codes of the layers.

        Plain numbers: `BF16 256.5MiB, rounded to ...` and the cost. `Q6_K ..., in int8 ...` if it depends on
        the block format (cpu.md). A file with codes and plain numbers gets both.
        """
        label, made, tensors = self.rule.label, Counter[str](), self.headers.tensors
        stored = [tensor for tensor in tensors.values() if len(tensor.shape) >= 2]
        found = "" if published_as(tensors) else f"{describe(stored)}, "
        if all(tensor.type_name in FLOATS for tensor in stored):
            return f"{found}rounded to {_spell_sizes(kept)}{_ROUNDING_COSTS.get(label, '')}"
        for name, module in self.modules.items():
            layer = self.skeleton.get_submodule(name)
            if module.is_rounded and isinstance(layer, Projected):
                made[module.scheme.name] += layer.stored.num_bytes()
        from_file = {name: size - made[name] for name, size in kept.items() if size > made[name]}
        is_kept = label == "int4" and _held(self.headers).bits <= {4}
        text = f"{found}{'kept as' if is_kept else 'in'} {_spell_sizes(from_file)}"
        return f"{text}, rounded to {_spell_sizes(made)}" if made else text


def plan_weights(
    headers: ModelHeaders,
    *,
    quantization: str,
    dtype: str,
    device: torch.device,
    home: str | None = None,
    rank: Rank = ALONE,
) -> WeightPlan:
    """Decide the form of every tensor; `quantization` as in quantization.py, `dtype` as in dtype.py.

    `home` "cuda" gives weights a GPU's forms on any device; on a CPU the reference code then multiplies them.
    The plan is for one `rank`: its slices, and the layers of its stage.
    """
    assert 0 <= rank.number < rank.world_size and 0 <= rank.stage < rank.num_stages, rank
    if headers.family.load is not None:
        quantization = _check_foreign(headers, quantization, rank)
    _check_stages(headers, rank.num_stages)
    rule = choose_rule(quantization, dtype, device, _held(headers, home or home_of(device)), home)
    whole = rank._replace(number=0, world_size=1)
    skeleton = _network(headers, rule.dtype, META, whole)  # whole layers; the rank has a part of each
    cutter = Cutter(headers.config, rank)
    modules = _choose_forms(headers, skeleton, rule, cutter)
    if rank.world_size > 1 and not cutter.uncut:
        skeleton = _network(headers, rule.dtype, META, rank)
    plan = WeightPlan(
        headers=headers, rule=rule, device=device, modules=modules, skeleton=skeleton,
        rank=rank, uncut=cutter.uncut,
    )  # fmt: skip
    plan.give_projections(skeleton, META)
    return plan


def _check_stages(headers: ModelHeaders, num_stages: int) -> None:
    """Refuse a number of pipeline stages over which the model cannot be split."""
    if num_stages > headers.config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} cannot be used with {headers.source.name}, which has "
            f"{headers.config.num_layers} layers; ask for no more stages than layers"
        )
    if num_stages > 1 and headers.config.layer_specs:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} cannot be used with {headers.source.name}: its layers read "
            "keys of other layers, and embeddings of their own; leave it out"
        )


def _choose_forms(headers: ModelHeaders, skeleton: Model, rule: Rule, cutter: Cutter) -> dict[str, Kept]:
    """Return the form of every module that has weights; a tied embedding has the form of the head."""
    by_module: dict[str, list[WeightSource]] = {}
    for source in headers.sources:
        if source.module:
            by_module.setdefault(source.module, []).append(source)
    settings, modules = Settings(headers.quantization), dict[str, Kept]()
    for name, module in skeleton.named_modules():
        sources = tuple(by_module.get(name, ()))
        if isinstance(module, Elsewhere):
            continue
        if not isinstance(module, Projected):
            if sources or module is skeleton.embedding:
                modules[name] = Kept(sources=sources, slices=cutter.cut(name, sources)[1])
            continue
        is_tied = module is skeleton.head and headers.config.tie_embeddings
        sources = modules["embedding"].sources if is_tied else sources
        spec, slices = cutter.cut(name, sources, module.spec)
        kept = dense = Kept(sources=sources, slices=slices, spec=spec)
        if not module.always_dense:
            kept = _keep(dense, rule, settings, is_head=module is skeleton.head)
        # a scheme that cannot look up rows cannot serve the embedding
        if is_tied and type(kept.make(META, rule.dtype)).lookup is Projection.lookup:
            kept = dense
        modules[name] = kept
        if is_tied:
            modules["embedding"] = kept
    return modules


def _check_foreign(headers: ModelHeaders, quantization: str, rank: Rank) -> str:
    """Refuse settings that need our own layers; return the form of weights that transformers loads."""
    asked = {"quantization": quantization} if quantization not in ("auto", DENSE) else {}
    asked |= {name: str(size) for name, size in rank.settings.items()}
    for name, value in asked.items():
        raise ConfigError(
            f"{name}={value} needs a model that infer implements, and {headers.source.name} runs with the "
            f"code of transformers; leave {name} out"
        )
    return DENSE


def _keep(dense: Kept, rule: Rule, settings: Settings, *, is_head: bool) -> Kept:
    """Return a matrix with its form chosen, given the tensors that fill it."""
    tensors, spec = dense.weights, dense.spec
    assert spec is not None, dense
    if rule.is_dense:
        return dense
    orders = orders_of(tensors) or {"desc_act" if settings.raw.get("desc_act") else ""}
    has_order = len(orders) == 1 and orders != {""} and not is_head
    is_cut = has_order and any(tensor.codes and tensor.codes.size != spec.size for tensor in tensors)
    if rule.home == "cpu":
        return _keep_on_cpu(dense, rule, settings, is_head=is_head, has_order=has_order, is_cut=is_cut)
    forms = [form_of(tensor) for tensor in tensors if len(tensor.shape) >= 2]
    if not tensors and settings.raw and not is_head:
        codes = settings.codes(spec.size)
        if _is_mxfp4_stack(spec, settings):
            codes = StoredCodes("mxfp4", spec.size, 32)
        forms = [codes and stored_form(codes)]
    form = joined_form(forms, spec.size, spec.row_counts)
    if orders != {""} and (not has_order or is_cut or spec.num_experts is not None):
        form = None  # rows need x in different orders; heads and experts support no order
    outliers = sum(tensor.codes.num_outliers for tensor in tensors if tensor.codes)
    if outliers and (is_head or spec.num_experts is not None):
        form = None
    stored = form
    if rule.scheme is not None:
        asked = "int8" if is_head else rule.scheme.name  # fp8 errs more, and directly in the logits
        if asked not in FORMS:
            return replace(dense, scheme=rule.scheme)
        form = form if form is not None and form.codes == asked else rounded_form(asked, spec.size)
    if form is None:
        return dense
    is_int8 = form == CodedForm("int8") and all(form_of(tensor) == form for tensor in tensors)
    kept = replace(
        spec,
        form=form,
        int8_tokens=is_int8 and settings.has_int8_tokens,
        has_order=has_order and form is stored,
        num_outliers=outliers if form is stored else 0,
    )
    return replace(dense, scheme=FILE_SCHEMES.get(form.codes) or SCHEMES[form.codes], spec=kept)


def _keep_on_cpu(
    dense: Kept, rule: Rule, settings: Settings, *, is_head: bool, has_order: bool, is_cut: bool
) -> Kept:
    """Return a matrix in a form that the C kernels read."""
    tensors, spec = dense.weights, dense.spec
    assert spec is not None, dense
    bits = cpu_bits(tensors)
    if is_head and rule.label in PACKED:  # its errors go straight into the logits
        is_kept = bits == 6 and rule.label != "int8"
        return replace(dense, scheme=FILE_SCHEMES["int6"] if is_kept else SCHEMES["int8"])
    is_announced = not tensors and _is_mxfp4_stack(spec, settings) and multiplies_mxfp4()
    if rule.scheme is None and (is_announced or is_mxfp4(tensors)):
        return replace(dense, scheme=FILE_SCHEMES["mxfp4"])
    if is_cut:  # a rank's columns are not whole groups
        return replace(dense, scheme=SCHEMES["int8"])
    if rule.scheme is None and bits == 8 and (runs := _runs(dense, spec)):
        return replace(dense, scheme=FILE_SCHEMES["runs"], spec=replace(spec, runs=runs))
    scheme = rule.scheme or (SCHEMES | FILE_SCHEMES)[f"int{bits}"]
    return replace(dense, scheme=scheme, spec=replace(spec, has_order=has_order))


def _held(headers: ModelHeaders, home: str = "cpu") -> Held:
    """Return a summary of the stored matrices, from headers or else the config; bits only for a CPU."""
    if not headers.tensors and headers.quantization:
        said = Settings(headers.quantization)
        bits = {4, 8} if said.method == "mxfp4" else {4 if 0 < said.bits <= 4 else 8}
        return Held(headers.stored, formats=frozenset({said.method}), bits=frozenset(bits))
    matrices = stored_matrices(headers)
    of_experts = {
        source.module for source in headers.sources if source.target and source.target.expert is not None
    }
    tensors = [tensor for matrix in matrices.values() for tensor in matrix]
    asked = matrices if home == "cpu" else {}
    return Held(
        headers.stored,
        frozenset(name for tensor in tensors for name in tensor.formats),
        frozenset(tensor.type_name for tensor in tensors),
        frozenset(bits for name, held in asked.items() for bits in part_bits(held, name in of_experts)),
    )


def stored_matrices(headers: ModelHeaders) -> dict[str, list[StoredTensor]]:
    """Return the matrices of the layers by module, each as the tensors of its parts and experts."""
    found: dict[str, list[StoredTensor]] = {}
    for source in headers.sources:
        if source.leaf == "weight" and source.module.startswith("layers."):
            found.setdefault(source.module, []).append(source.tensor)
    return {
        module: tensors
        for module, tensors in found.items()
        if not module.endswith(ALWAYS_DENSE) and any(len(tensor.shape) >= 2 for tensor in tensors)
    }


def _runs(kept: Kept, spec: WeightSpec) -> tuple[tuple[int, int], ...]:
    """Return (rows, bits) of a fused matrix's parts, equal neighbours joined; (): all have 8 bits."""
    by_part = {
        source.target.part: source.tensor
        for source in kept.sources
        if source.leaf == "weight" and source.target is not None
    }
    if spec.num_experts is not None or by_part.keys() != spec.parts.keys():
        return ()
    if orders_of(list(by_part.values())) != {""}:
        return ()
    bits = [(rows, cpu_bits([by_part[part]])) for part, rows in spec.parts.items()]
    found = [(sum(rows for rows, _ in run), kind) for kind, run in groupby(bits, key=itemgetter(1))]
    return () if {kind for _, kind in found} == {8} else tuple(found)


def _is_mxfp4_stack(spec: WeightSpec, settings: Settings) -> bool:
    """Return True if a config announces MXFP4 for a matrix: only experts have it."""
    return settings.method == "mxfp4" and spec.num_experts is not None


# -- a network, and the size of its weights -----------------------------------------------------------


def _network(headers: ModelHeaders, dtype: torch.dtype, device: torch.device, rank: Rank = ALONE) -> Model:
    """Build the network of a rank, uninitialised and without its matrices."""
    config = rank_config(headers.config, rank)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, without_weights():
            model = headers.family.build(replace(config, vocab_size=len(own_vocabulary(config, rank))))
            model.config = config
            if rank.num_stages > 1:
                layers = stage_layers(config.num_layers, rank.num_stages)[rank.stage]
                is_last, is_tied = rank.stage == rank.num_stages - 1, config.tie_embeddings
                keep_stage(model, layers, is_first=rank.stage == 0, is_last=is_last, is_tied=is_tied)
            return model
    finally:
        torch.set_default_dtype(before)


@contextmanager
def refused_if_full(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Turn a failed allocation of weights into a `ConfigError`."""
    try:
        yield
    except RuntimeError as error:  # PyTorch has no narrower error for a CPU that is out of memory
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            raise ConfigError(
                f"{name} in {dtype} does not fit into the memory of {device}: {error}"
            ) from None
        raise


def kept_bytes(model: Model) -> int:
    """The bytes of all weights of a model in memory; shared weights count once."""
    return sum(kept_schemes(model, torch.float32).values())


def kept_schemes(model: Model, dtype: torch.dtype) -> dict[str, int]:
    """The bytes of all weights by scheme, largest first; dense weights by their dtype."""
    dense = str(dtype).removeprefix("torch.")
    found = {dense: sum(parameter.numel() * parameter.element_size() for parameter in _others(model))}
    for layer in _layers(model):
        for scheme, num_bytes in layer.stored.bytes_by_scheme().items():
            name = dense if scheme == DENSE else scheme
            found[name] = found.get(name, 0) + num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def bytes_per_weight(model: Model, dtype: torch.dtype) -> float:
    """The average bytes per weight of matrices that are not dense; if there are none, the size of `dtype`."""
    packed = [layer for layer in _layers(model) if layer.stored.scheme != DENSE]
    numbers = sum(layer.spec.num_weights for layer in packed)
    kept = sum(layer.stored.num_bytes() for layer in packed)
    return kept / numbers if numbers else float(dtype.itemsize)


def num_weights(model: Model) -> int:
    """The number of weights of a model, in any form; shared weights count once."""
    return sum(layer.spec.num_weights for layer in _layers(model)) + sum(
        parameter.numel() for parameter in _others(model)
    )


def _spell_sizes(sizes: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {short_bytes(size)}" for name, size in sizes.items())


def _layers(model: Model) -> list[Projected]:
    return [layer for layer in model.modules() if isinstance(layer, Projected)]


def _others(model: Model) -> Iterable[nn.Parameter]:
    """Return the parameters that belong to no projection; a tied embedding belongs to the head's."""
    projected = {id(tensor) for layer in _layers(model) for tensor in layer.stored.tensors.values()}
    if isinstance(model.embedding, Embedding) and model.embedding.table is not None:
        projected.add(id(model.embedding.weight))
    return [parameter for parameter in model.parameters() if id(parameter) not in projected]
