"""Any decoder that the installed `transformers` can run: its code runs the network, ours everything else.

    tokens_T ──► base model of transformers ──► hidden_TD        all sequences as one row, [1, T]
                     │ each attention module
                     └──► our attention function ──► step.attend        paged cache, batching, prefix cache
    hidden_SD ──► tail of its own forward: head, scales, soft caps ──► logits_SV

Attention is the only link: we register a function under a name, each attention module passes it the queries,
keys and values of the step's tokens, and it returns attention's output. There is no cache of transformers.

What a model needs from attention is not guessed from its config: the network is built without memory and run
once on two tokens (`probe`). Each layer shows its heads and its scale. The window follows from the mask
function that transformers would use: it is asked which positions it lets through. A model that needs anything
else is refused, with the reason, before a weight is read: another mask, heads that differ between layers, an
argument that our attention does not have, a layer with a state.

Logits come from the model's own forward, with its base model replaced by one that returns the hidden states
computed before. So a scale or a soft cap after the head is never forgotten.

Only code of the installed package runs. A checkpoint's own Python is never run.

Shapes:  T tokens of all sequences laid end to end, S rows that sample, D hidden size, N query heads, G kv
heads, H head size, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from infer.errors import CheckpointError, ConfigError
from infer.kernels.elementwise.heads import write_slots
from infer.layers.attention import AttentionLayer, StepContext
from infer.layers.embedding import Embedding
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.raw_config import MAX_LAYERS, MAX_SIZE

log = logging.getLogger(__name__)

IMPL = "transformers"
INSTALL = "pip install 'infer[transformers]'"
STEP, PROBE = "infer", "infer_probe"  # names of our attention functions in transformers
FAR = 1 << 40  # a distance beyond any window
HARMLESS = frozenset(  # arguments of attention that do not change its result
    {"dropout", "sliding_window", "position_ids", "cache_position", "use_cache", "is_causal", "layer_idx",
     "output_attentions", "output_hidden_states", "return_dict", "position_embeddings"}
)  # fmt: skip
MIXED = 0.1  # relative difference of hidden states that is too large for rounding
LAYER_TYPES = ("full_attention", "sliding_attention")
SWITCHING_ROPE = ("dynamic", "longrope")  # kinds that rotate all sequences by the longest one of a batch


class Layer(NamedTuple):
    """The attention parameters of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None = None
    has_sinks: bool = False


class Seen(NamedTuple):
    """Takes the place of a mask while a network is probed; holds how far back the mask lets tokens see.

    Some networks make masks that none of their layers uses, so `why` refuses a layer, not the mask.
    """

    window: int | None
    why: str = ""  # reason why a layer with this mask cannot run; "": it can

    def __getattr__(self, name: str) -> object:
        """Refuse a network that reads its mask."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError("it computes with the attention mask, but the engine does not build one")


class ForwardPass:
    """The current step, for the attention modules of a network; in a probe, the layers found so far."""

    def __init__(self) -> None:
        self.step: StepContext | None = None
        self.layers: dict[int, Layer] = {}
        self.num_calls = 0


class Made:
    """The result of a base model: hidden states, and None for everything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return self.last_hidden_state if place == 0 else None


class Tail(nn.Module):
    """Takes the place of a base model; returns hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_SD = torch.empty(0)

    @property
    def decoder(self) -> Tail:
        """The decoder that some forwards look for inside their base model."""
        return self

    def forward(self, *_: object, **__: object) -> Made:
        """Return the hidden states, as a batch of one sequence."""
        return Made(self.hidden_SD[None])


class NoHead(nn.Module):
    """Takes the place of our head, which this kind of model does not have."""

    @property
    def stored(self) -> NoHead:
        """The object that keeps the weights, of which there are none."""
        return self

    def scratch_bytes(self, num_rows: int) -> int:
        """The bytes needed to unpack the weights: none."""
        return 0


class TransformersModel(Model):
    """A causal language model of transformers as a `Model`; it has none of our own layers."""

    def __init__(self, config: ModelConfig, network: Any, forward: ForwardPass) -> None:
        """Split a network, whose attention modules have `forward`, into its base model and the rest."""
        nn.Module.__init__(self)
        self.config, self._forward = config, forward
        self.base, self.rest = network.base_model, network
        self._tail = Tail()
        setattr(network, network.base_model_prefix, self._tail)
        self.layers = nn.ModuleList()  # empty: it has none of our layers
        self.embedding = Embedding(0, config.hidden_size)
        self.head: Any = NoHead()

    def forward(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states after the final norm, for all tokens [T, D] or for some of them [S, D]."""
        self._forward.step, self._forward.num_calls = step, 0
        try:
            made = self.base(input_ids=tokens_T[None], position_ids=step.positions[None], use_cache=False)
        finally:
            self._forward.step = None
        assert self._forward.num_calls == self.config.num_layers, "a layer did not attend, or did so twice"
        hidden_TD: torch.Tensor = made[0][0]
        return hidden_TD if step.logit_indices is None else hidden_TD.index_select(0, step.logit_indices)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V], as the model's own forward makes them from these hidden states."""
        self._tail.hidden_SD = hidden_SD
        ids = torch.zeros((1, hidden_SD.shape[0]), dtype=torch.int64, device=hidden_SD.device)
        try:
            logits: torch.Tensor = self.rest(input_ids=ids, use_cache=False).logits
        finally:
            self._tail.hidden_SD = hidden_SD[:0]
        return logits[0]


class ForeignModel(NamedTuple):
    """A checkpoint that transformers' code runs: its config, and functions that build and load it."""

    config: ModelConfig
    build: Callable[[ModelConfig], Model]
    load: Callable[[ModelConfig, torch.dtype, torch.device], Model]


def open_foreign(path: Path, raw: Mapping[str, Any], why: str) -> ForeignModel:
    """Prepare a checkpoint for transformers' code or refuse it; `why`: why our code does not run it."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{why}; the code of transformers may run this model, but the package is missing: {INSTALL}"
        ) from None
    try:
        hf_config, cls = _check_config(transformers, path, raw)
        network = _build_meta(transformers, hf_config)
        config = probe(network, hf_config, raw)
        check_tail(_build(network, config))
    except ConfigError as error:
        version = transformers.__version__
        raise ConfigError(f"{why}; the code of transformers {version} cannot run it here: {error}") from None
    return ForeignModel(
        config, partial(_build, network), partial(_load, transformers, path, hf_config, cls.__name__)
    )


def _check_config(transformers: Any, path: Path, raw: Mapping[str, Any]) -> tuple[Any, type[Any]]:
    """Return the config and the class of a checkpoint; refuse it if its config shows that it cannot run."""
    if raw.get("quantization_config"):
        raise ConfigError("its weights are quantized; use the checkpoint in plain numbers")
    try:
        hf_config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # anything that its classes raise for a foreign file
        raise ConfigError(f"{_first_line(error)}") from None
    if (path if path.is_dir() else path.parent).joinpath("adapter_config.json").exists():
        raise ConfigError(
            "its directory has an adapter_config.json as well; move the adapter to another directory"
        )
    hf_config._experts_implementation = None  # a name in the file may stand for code that is downloaded
    name = f"model_type {hf_config.model_type}"
    nested = [key for key in ("vision_config", "audio_config") if getattr(hf_config, key, None) is not None]
    if not nested and not hasattr(hf_config, "num_hidden_layers") and hasattr(hf_config, "text_config"):
        raise ConfigError(f"{name} has a text decoder among other parts; only text decoders are supported")
    if nested or getattr(hf_config, "is_encoder_decoder", False):
        what = "an encoder and a decoder" if not nested else "a part for images or sound"
        raise ConfigError(f"{name} has {what}; only text decoders are supported")
    other = set(getattr(hf_config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if other:
        raise ConfigError(
            f"{name} has layers of the kind {', '.join(sorted(other))}; only full and sliding are supported"
        )
    ropes = _rope_types(getattr(hf_config, "rope_parameters", None))
    if switching := ropes.intersection(SWITCHING_ROPE):
        raise ConfigError(
            f"its rotary positions ({', '.join(switching)}) depend on the longest sequence of a batch"
        )
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if cls is None:
        raise ConfigError(f"it has no causal language model for {name}")
    if getattr(cls, "_is_stateful", False):
        raise ConfigError(f"{cls.__name__} keeps a state besides keys and values")
    if not cls.is_backend_compatible():
        raise ConfigError(
            f"{cls.__name__} computes attention by itself and cannot call another function for it"
        )
    sizes = {key: getattr(hf_config, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    for key, value in sizes.items():
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{key} is {value!r}, and must be an integer in 1..{most}")
    return hf_config, cls


def _rope_types(parameters: object) -> set[str]:
    """The kinds of rotary positions in a config, which may differ by the type of a layer."""
    if not isinstance(parameters, Mapping):
        return set()
    nested = [kind for each in parameters.values() for kind in _rope_types(each)]
    return {str(parameters.get("rope_type", "default")), *nested}


def _build_meta(transformers: Any, hf_config: Any) -> Any:
    """Build the network without memory, with the attention function that probes."""
    _register(transformers)
    shapes = importlib.import_module("torch._meta_registrations")
    assert callable(shapes.activate_meta)  # the question imports it, which client/imports.py puts off
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=PROBE, trust_remote_code=False, dtype=torch.bfloat16
            ).eval()
    except Exception as error:
        raise ConfigError(f"building it fails: {_first_line(error)}") from None


def probe(network: Any, hf_config: Any, raw: Mapping[str, Any]) -> ModelConfig:
    """Find the attention parameters of a network by running it without memory on two tokens."""
    forward = ForwardPass()
    _share(network, forward)
    base = network.base_model
    if base is network or "position_ids" not in inspect.signature(base.forward).parameters:
        raise ConfigError("it has no base model whose forward takes position_ids")
    try:
        with torch.no_grad(), torch.device("meta"):
            ids, mask = torch.zeros((1, 2), dtype=torch.int64), torch.ones((1, 2), dtype=torch.int64)
            base(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"running it without weights fails: {_first_line(error)}") from None
    layers = [forward.layers.get(number) for number in range(hf_config.num_hidden_layers)]
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers) or forward.num_calls != len(layers):
        raise ConfigError(f"{len(found)} of its {len(layers)} layers call attention; each must, exactly once")
    if len({(layer[:3], layer.softcap, layer.has_sinks) for layer in found}) > 1:
        raise ConfigError("its layers differ in the number or size of heads, in soft caps or in sinks")
    context_len = getattr(hf_config, "max_position_embeddings", None)
    if type(context_len) is not int or context_len < 1:
        raise ConfigError(f"max_position_embeddings is {context_len!r}, and must be a number of tokens")
    first, hidden_size = found[0], int(hf_config.hidden_size)
    mlp_size = getattr(hf_config, "intermediate_size", None) or getattr(hf_config, "ffn_dim", None)
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=str(hf_config.model_type),
        impl=IMPL,
        vocab_size=int(hf_config.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=mlp_size if isinstance(mlp_size, int) else 4 * hidden_size,
        num_layers=len(found),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        context_len=context_len,
        norm_eps=0.0,  # the network has its own norms
        activation="",  # the network has its own MLP
        tie_embeddings=False,
        query_scale=first.scale,
        attention_softcap=first.softcap,
        attention_sinks=first.has_sinks,
        layer_windows=tuple(layer.window for layer in found),
        eos_ids=tuple(i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int),
    )


def check_tail(model: Model) -> None:
    """Refuse a model whose forward does not make logits from the hidden states alone."""
    try:
        with torch.no_grad():
            shape = model.logits(torch.empty((2, model.config.hidden_size), device="meta")).shape
    except Exception as error:
        raise ConfigError(f"its forward needs more than hidden states: {_first_line(error)}") from None
    if tuple(shape) != (2, model.config.vocab_size):
        raise ConfigError(f"its logits have the shape {tuple(shape)}, and not {(2, model.config.vocab_size)}")


def _build(network: Any, config: ModelConfig) -> Model:
    """Make a model without memory, to plan the memory."""
    return TransformersModel(config, deepcopy(network).to(torch.get_default_dtype()), ForwardPass())


def _load(
    transformers: Any, path: Path, hf_config: Any, name: str, config: ModelConfig, dtype: torch.dtype,
    device: torch.device,
) -> Model:  # fmt: skip
    """Let transformers load the model and its weights, from safetensors files only."""
    transformers.utils.logging.disable_progress_bar()
    try:
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=hf_config, dtype=dtype, attn_implementation=STEP, local_files_only=True,
            trust_remote_code=False, use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {path.name}: {_first_line(error)}") from None
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = ", ".join(sorted(map(str, report[kind]))[:5])
            raise CheckpointError(f"the weights of {path.name} do not fit {name}: {kind}: {names}")
    log.info("the model's code is transformers' class=%s version=%s", name, transformers.__version__)
    forward = ForwardPass()
    forward.layers = dict(enumerate(_layers_of(config)))
    _share(network, forward)
    model = TransformersModel(config, network.eval().requires_grad_(False).to(device), forward)
    check_tokens_apart(model, device)
    return model


class BlindStep(StepContext):
    """A step in which tokens do not see each other: attention returns the queries."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """The queries."""
        return q_TNH


@torch.inference_mode()
def check_tokens_apart(model: TransformersModel, device: torch.device) -> None:
    """Refuse a network in which tokens affect each other outside attention: it would mix sequences.

    Three tokens run together, without attention, must give the same states as each token alone. A convolution
    or a recurrence changes all but the first. One changed token is accepted: rounding may change its experts.
    """
    tokens_T, positions = torch.arange(1, 4, device=device), torch.tensor([5, 0, 9], device=device)
    tokens_T, positions = tokens_T % model.config.vocab_size, positions % model.config.context_len
    together = model(tokens_T, BlindStep(positions)).float()
    alone = [model(tokens_T[i : i + 1], BlindStep(positions[i : i + 1]))[0].float() for i in range(3)]
    apart = torch.stack(alone)
    if int(((together - apart).norm(dim=-1) > MIXED * apart.norm(dim=-1)).sum()) > 1:
        raise ConfigError("its tokens affect each other outside attention, which would mix sequences")


def _layers_of(config: ModelConfig) -> list[Layer]:
    heads = config.num_heads, config.num_kv_heads, config.head_dim, config.scale
    return [Layer(*heads, config.window(number)) for number in range(config.num_layers)]


# -- our attention functions ------------------------------------------------------------------------------


def _register(transformers: Any) -> None:
    transformers.AttentionInterface.register(STEP, _attend)
    transformers.AttentionInterface.register(PROBE, _record)
    transformers.AttentionMaskInterface.register(PROBE, _read_mask)


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: object, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend in the current step: q [1, N, T, H], k and v [1, G, T, H], the result [1, T, N, H].

    If values are narrower than keys (latent attention), they are padded with zeros: the cache has one size.
    """
    forward: ForwardPass = module.infer_forward
    assert attention_mask is None and forward.step is not None, "attention outside of a step, or with a mask"
    _refuse_unknown(others)
    layer = forward.layers[module.layer_idx]
    forward.num_calls += 1
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    width = v.shape[-1]
    v = functional.pad(v, (0, k.shape[-1] - width))
    q_TNH, k_TGH, v_TGH = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
    if (cache := forward.step.slots(module.layer_idx)) is not None:
        write_slots(k_TGH, v_TGH, cache)
    sinks_N = None if s_aux is None else s_aux.detach().float()
    asked = AttentionLayer(module.layer_idx, scale, layer.window, softcap, sinks_N)
    return forward.step.attend(asked, q_TNH, k_TGH, v_TGH)[None, ..., :width].contiguous(), None


def _record(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: object, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Record the attention parameters of a layer."""
    forward: ForwardPass = module.infer_forward
    forward.num_calls += 1
    _refuse_unknown(others)
    number = getattr(module, "layer_idx", None)
    if type(number) is not int or number in forward.layers:
        raise ConfigError(f"{type(module).__name__} does not say which layer it is")
    if not isinstance(attention_mask, Seen):
        raise ConfigError(f"{type(module).__name__} has its own mask of scores")
    if attention_mask.why:
        raise ConfigError(attention_mask.why)
    if k.shape[:-1] != v.shape[:-1] or not q.shape[-1] == k.shape[-1] >= v.shape[-1]:
        raise ConfigError(f"{type(module).__name__} has queries, keys and values whose sizes do not match")
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if s_aux is not None and s_aux.shape != q.shape[1:2]:
        raise ConfigError(f"{type(module).__name__} has sinks of the shape {list(s_aux.shape)}")
    forward.layers[number] = Layer(
        q.shape[1], k.shape[1], q.shape[3], scale, attention_mask.window, softcap or None, s_aux is not None
    )
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])), None


def _refuse_unknown(given: Mapping[str, object]) -> None:
    """Refuse arguments that would change the result of attention."""
    unknown = [name for name, value in given.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise ConfigError(f"its attention takes {', '.join(sorted(unknown))}, which are not supported")


def _read_mask(*_: object, mask_function: Callable[..., Any], **__: object) -> Seen:
    """Find the window of a mask by asking which positions it lets through."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(number, device="cpu") for number in (0, 0, query, key))))

    if sees(FAR, FAR + 1) or not sees(FAR, FAR):
        return Seen(None, "its attention is not causal")
    if sees(FAR, 0):
        return Seen(None)
    near, far = 0, FAR  # distances that are seen, and not seen
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if sees(FAR, FAR - middle) else (near, middle)
    for query in (FAR + 1, FAR + far // 2, FAR + far - 1):  # a window moves with the query, a chunk does not
        if not sees(query, query - near) or sees(query, query - far):
            return Seen(None, "its attention sees chunks of the text, which is not supported")
    return Seen(far)


def _share(network: nn.Module, forward: ForwardPass) -> None:
    """Store the `ForwardPass` in every module: the module is all that attention functions are given."""
    for module in network.modules():
        module.__dict__["infer_forward"] = forward


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
