"""What can compute an operation on which device: the values of the knobs `*_backend`, in one table.

    attention_backend           of prompts, and of rows that decode unless the next knob says otherwise
    decode_attention_backend    of rows that decode: sequences that compute one token in a step
    mlp_backend                 the feed-forward half of a block

`torch_ref` is the readable reference of each: plain PyTorch, nothing fused. `infer bench backends` runs the
references beside what `auto` takes. Settings, refusals, `infer doctor` and the docs read this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.config.resolve import Machine
    from infer.config.settings import EngineConfig

AUTO, REFERENCE = "auto", "torch_ref"
OTHER_SPELLINGS = {"naive": REFERENCE}


class Backend(NamedTuple):
    """One way to compute one or several operations."""

    name: str
    devices: tuple[str, ...]  # "cpu", "gpu"
    operations: tuple[str, ...]  # the knobs, without `_backend`
    about: str


_BOTH, _ATTENTION = ("cpu", "gpu"), ("attention", "decode_attention")

BACKENDS = (
    Backend("c", ("cpu",), _ATTENTION, "the kernel in C, which reads the paged cache in float32"),
    Backend("triton", ("gpu",), _ATTENTION, "the kernels in Triton"),
    Backend("cuda", ("gpu",), _ATTENTION, "CUDA C++ for rows that decode, Triton for prompts"),
    Backend("flash", ("gpu",), ("attention",), "PyTorch's FlashAttention for prompts, Triton for the rest"),
    Backend("kernels", _BOTH, ("mlp",), "the kernels of the weights' form, fused where they can be"),
    Backend("sdpa", _BOTH, _ATTENTION, "PyTorch's fused attention"),
    Backend(REFERENCE, _BOTH, (*_ATTENTION, "mlp"), "the readable reference in PyTorch"),
)
OPERATIONS = ("attention", "decode_attention", "mlp")
PLAIN = ("sdpa", REFERENCE)  # of attention: PyTorch's own, on every device


class Chosen(NamedTuple):
    """What computes each operation, in the order of `OPERATIONS`."""

    attention: str  # on a GPU may be `auto`: cuDNN and Triton; `invariant` with deterministic
    decode_attention: str  # on a GPU may be `auto`: CUDA C++ and Triton, as the number of rows has it
    mlp: str


def choices(operation: str) -> tuple[str, ...]:
    """Return every value that the knob of an operation takes, wherever it can be had."""
    names = [row.name for row in BACKENDS if operation in row.operations]
    return (AUTO, *names, *(other for other, name in OTHER_SPELLINGS.items() if name in names))


def available(operation: str, device: str) -> list[str]:
    """Return what can compute an operation on a "cpu" or a "gpu"."""
    return [row.name for row in BACKENDS if operation in row.operations and device in row.devices]


def check_backends(config: EngineConfig, machine: Machine) -> None:
    """Refuse by name what this kind of device does not have, whatever the model."""
    kind, other = ("gpu", "a CPU") if machine.has_gpu_kernels else ("cpu", "a GPU")
    for operation, value in _asked(config)._asdict().items():
        names = available(operation, kind)
        if value not in (AUTO, *names):
            raise ConfigError(
                f"{operation}_backend={value} needs {other}, and the model is on {machine.device}; "
                f"use {_or([AUTO, *names])}"
            )
    attention, decode, _ = _asked(config)
    if kind == "gpu" and decode not in (AUTO, REFERENCE) and (decode in PLAIN) != (attention in PLAIN):
        others = available("decode_attention", kind)
        with_it = [name for name in others if name == REFERENCE or (name in PLAIN) == (attention in PLAIN)]
        raise ConfigError(
            f"decode_attention_backend={decode} cannot be had with attention_backend={attention} on a GPU; "
            f"use {_or([AUTO, *with_it])}"
        )


def choose(config: EngineConfig, machine: Machine) -> Chosen:
    """Return what computes each operation for a model on this machine; what cannot be had is refused."""
    check_backends(config, machine)
    attention, decode, mlp = _asked(config)
    mlp = "kernels" if mlp == AUTO else mlp
    if machine.has_gpu_kernels:
        halves = {"cuda": ("triton", "cuda"), "flash": ("flash", "triton")}
        attention, usual = halves.get(attention, (attention, attention))
        return Chosen(attention, usual if decode == AUTO else decode, mlp)
    if "c" in (attention, decode) and not machine.has_c_attention:
        raise ConfigError(
            f"{'attention' if attention == 'c' else 'decode_attention'}_backend=c needs the attention kernel "
            "in C, which is not built here or cannot read this model's dtype or heads (`infer doctor` says "
            f"what is missing); use {_or([AUTO, *PLAIN])}"
        )
    if attention == AUTO:
        attention = "c" if machine.has_c_attention else "sdpa"
    return Chosen(attention, attention if decode == AUTO else decode, mlp)


def _asked(config: EngineConfig) -> Chosen:
    cache = config.cache
    return Chosen(cache.attention_backend, cache.decode_attention_backend, config.run.mlp_backend)


def _or(names: list[str] | tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
