"""A knob that the log calls without effect has none, for every two knobs; the others are taken.

Every two knobs that `infer serve` lists are accepted, or refused with advice.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from infer.config.knobs import KnobRow
from infer.config.machine_rules import Machine, ModelFacts
from infer.config.resolve import resolve, resolve_scheduler
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig, knob_table
from infer.config.unused import rules, unused_knobs
from infer.errors import ConfigError
from infer.scheduling.plan import StepPlan
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.thinned import thinned

VALUES: dict[str, tuple[Any, ...]] = {
    "kv_cache_backend": ("contiguous", "naive"),
    "swap_blocks": (12,),
    "batching_mode": ("static",),
    "scheduler_policy": ("prefill_first", "decode_round_robin", "priority", "deadline"),
    "max_batch_size": (16,),
    "max_num_batched_tokens": (4,),
    "use_chunked_prefill": (False,),
    "prefill_chunk_size": (3,),
    "prefill_tokens_while_decoding": (2,),
    "max_prefill_chunks_per_step": (1,),
    "use_prefix_caching": (False,),
    "preemption": ("recompute", "swap"),
    "max_wait_steps": (3,),
    "max_decode_gap": (1,),
}
SETTINGS = [(name, value) for name, values in VALUES.items() for value in values]
PAIRS = [dict(pair) for pair in itertools.combinations(SETTINGS, 2) if pair[0][0] != pair[1][0]]
SMALL_STEPS = {"max_batch_size": 6, "max_num_batched_tokens": 64}


def unused(knobs: dict[str, Any]) -> dict[str, str]:
    config = EngineConfig.from_knobs(**(SMALL_STEPS | knobs))
    scheduler = resolve_scheduler(config, 60)
    decided = {name: getattr(scheduler, name) for name in ("max_batch_size", "max_num_batched_tokens")}
    return unused_knobs(config, decided)


@functools.cache  # pairs of knobs share a half
def plans(**knobs: Any) -> list[StepPlan]:
    """The plans of a load with long and short prompts, forks, priorities and too little cache."""
    settings = SMALL_STEPS | knobs
    world = OracleWorld(num_host_blocks=settings.pop("swap_blocks", 0), num_blocks=20, **settings)
    for number in range(10):
        fields = {"priority": number % 3, "deadline": 100.0 - number}
        world.add(str(number), prompt_of(4 + 17 * (number % 2), number), request=fields, n=1 + number % 3)
        world.step()
    world.run()
    assert world.verify() == 10
    return world.plans


@pytest.mark.parametrize(
    "knobs", thinned(PAIRS, keep=3), ids=lambda knobs: "-".join(f"{k}={v}" for k, v in knobs.items())
)
def test_a_knob_said_to_have_no_effect_has_none(knobs: dict[str, Any]) -> None:
    try:
        found = unused(knobs)
    except ConfigError as error:
        assert ";" in str(error), "a refusal says what to do"
        return
    for name in found:
        default = {} if knob_table()[name].default is None else {name: knob_table()[name].default}
        assert plans(**knobs) == plans(**{k: v for k, v in knobs.items() if k != name} | default), found


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"prefill_chunk_size": 64, "use_chunked_prefill": False}, "prefill_chunk_size"),
        ({"swap_blocks": 8, "preemption": "recompute", "use_prefix_caching": False}, "swap_blocks"),
        ({"swap_space": "1GiB", "preemption": "recompute", "kv_cache_backend": "contiguous"}, "swap_space"),
        ({"swap_blocks": 8, "kv_cache_backend": "naive"}, "swap_blocks"),
        ({"max_decode_gap": 2}, "max_decode_gap"),
        ({"prefill_tokens_while_decoding": 9, "batching_mode": "static"}, "prefill_tokens_while_decoding"),
        ({"scheduler_policy": "decode_round_robin"}, "scheduler_policy"),
        *(
            ({"speculative_decoding": False, name: value}, name)
            for name, value in {
                "speculative_method": "ngram",
                "num_speculative_tokens": 4,
                "draft_model": "small",
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 3,
                "suffix_max_answers": 4,
                "adaptive_speculation": False,
                "synthetic_acceptance": 0.7,
            }.items()
        ),
        ({"speculative_method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"speculative_method": "suffix", "prompt_lookup_min": 4}, "prompt_lookup_min"),
        ({"draft_model": "small", "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"draft_model": "small", "suffix_max_answers": 4}, "suffix_max_answers"),
        ({"speculative_method": "ngram", "suffix_max_answers": 4}, "suffix_max_answers"),
    ],
)
def test_what_has_no_effect_is_named(knobs: dict[str, Any], name: str) -> None:
    assert list(unused(knobs)) == [name]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"prefill_chunk_size": 64},
        {"swap_blocks": 8},
        {"swap_blocks": 8, "preemption": "recompute"},
        {"max_decode_gap": 2, "scheduler_policy": "prefill_first"},
        {"max_decode_gap": 2, "max_num_batched_tokens": 4},
        {"max_decode_gap": 8},  # the default
        {"scheduler_policy": "decode_round_robin", "max_num_batched_tokens": 4},
        {"speculative_decoding": True, "adaptive_speculation": False, "prompt_lookup_min": 3},
        {"speculative_method": "suffix", "suffix_max_answers": 4},
        {"speculative_decoding": True, "suffix_max_answers": 4},
        {"suffix_max_answers": 4},
        {"prompt_lookup_max": 4},
        {"prompt_lookup_min": 3},
        {"num_speculative_tokens": 4, "synthetic_acceptance": 0.7},
        {"num_speculative_tokens": 0},  # it turns the drafts off
    ],
)
def test_what_has_an_effect_is_not_named(knobs: dict[str, Any]) -> None:
    assert unused(knobs) == {}


def test_the_table_names_knobs() -> None:
    assert {rule.name for rule in rules(EngineConfig(), SMALL_STEPS)} <= set(knob_table())


@pytest.mark.parametrize("size", [{"num_blocks": 8}, {"kv_cache_memory": "1MiB"}])
def test_two_sizes_of_one_cache_are_refused(size: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="and kv_cache_share both size the KV cache; give one of them"):
        EngineConfig.from_knobs(kv_cache_share=0.5, **size)


ALL_KNOBS = knob_table(with_server=True)
MACHINES = (
    Machine(device="cpu", has_c_attention=True),
    Machine(device="cuda:0", gpu_memory=80 << 30, has_gpu_kernels=True),
)
MODEL = ModelFacts(max_seq_len=4096, num_layer_weights=10**9, weights="int8")
EXAMPLES: dict[str, Any] = {  # of knobs whose values are not any text or number
    "model_alias": ("a=b",),
    "metrics_prefix": "vllm",
    "otlp_traces_endpoint": "http://127.0.0.1:4318",
    "lora_modules": ("a=b",),
    "speculative_config": '{"method": "ngram"}',
    "device": "auto",
    "block_allocator": "lru",  # the only one that is not the user's own code
    "block_size": 32,
    "kv_cache_share": 0.5,
    "device_memory": "0.5",
    "synthetic_acceptance": 0.5,
}


def example(row: KnobRow) -> Any:
    """Another value than a knob's default."""
    if row.name in EXAMPLES:
        return EXAMPLES[row.name]
    if row.choices:
        return next(each for each in reversed(row.choices) if each != row.default and ":" not in each)
    if row.kind is bool:
        return not row.default
    if row.is_size:
        return "2GiB"
    if row.is_many:
        return ("x",)
    return "x" if row.kind is str else row.kind((row.default or 1) + 1)


def overruled(machine: Machine = MACHINES[0], **knobs: Any) -> list[str]:
    """The knobs that the start line or a warning mentions, of a server that accepts these."""
    of_server = {name: value for name, value in knobs.items() if ALL_KNOBS[name].section == "server"}
    ServerConfig(**of_server)
    config = EngineConfig.from_knobs(**{k: v for k, v in knobs.items() if k not in of_server})
    found = resolve(config, machine, MODEL)
    return [*found.overruled, *found.unused]


# Every pair of knobs that is refused, written by hand; a change to what goes together changes these tables.
_DRAFTS = {"draft_model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
_DRAFTS |= {"speculative_config", "speculative_decoding", "suffix_max_answers"}
LACKING: dict[str, set[str]] = {  # refused alone, and the knobs that one of is enough
    "nnodes": {"tensor_parallel_size", "pipeline_parallel_size"},
    "node_rank": set(),  # the example needs three nodes
    "preemption": {"swap_blocks", "swap_space"},
    "speculative_method": {"draft_model"},
    "adaptive_speculation": _DRAFTS,
    "synthetic_acceptance": _DRAFTS,
    "max_loras": {"enable_lora", "lora_modules"},
    "max_lora_rank": {"enable_lora", "lora_modules"},
    **dict.fromkeys(("max_loaded_models", "loaded_memory", "idle_unload", "model_memory"), {"on_demand"}),
    "cache_isolation": {"api_key"},
    "tls_cert": {"tls_key"},
    "tls_key": {"tls_cert"},
    "ray_address": {"cluster"},
    "max_replicas": {"cluster"},
    "target_queue_time": set(),  # max_replicas, which needs a cluster itself
    "scale_down_after": set(),
    "share_device": {"replicas"},
    **dict.fromkeys(("record_text", "record_bytes", "overwrite"), {"record"}),
}
LACKING_ON: dict[str, dict[str, set[str]]] = {
    "cpu": {"use_cuda_graphs": set(), "use_overlap": {"pipeline_parallel_size"}},
    "cuda:0": {"record_cpu_step": set(), "cpu_products": set()},
}
CLASHING: dict[str, set[str]] = {
    "pipeline_parallel_size": {"lora_modules", "enable_lora"},
    "deterministic": {
        *("lora_modules", "enable_lora", "mlp_backend", "attention_backend", "decode_attention_backend"),
    },
    "kv_cache_backend": {
        *("kv_cache_dtype", "batching_mode", "max_num_batched_tokens", "itl_target_ms"),
        *_DRAFTS,
    },
    "kv_cache_memory": {"num_blocks", "kv_cache_share"},
    "kv_cache_share": {"num_blocks"},
    "swap_blocks": {"swap_space"},
    "itl_target_ms": {"batching_mode", "use_chunked_prefill"},
    "max_num_batched_tokens": {"use_chunked_prefill"},
    "draft_model": {"speculative_config"},
    "suffix_max_answers": {"prompt_lookup_max", "prompt_lookup_min"},
    "use_cuda_graphs": {"attention_backend", "decode_attention_backend", "mlp_backend"},
    "use_overlap": {"attention_backend"},
    "allowed_host": {"uds", "api_key", "host"},
    "cluster": {"admin_key", "api_processes", "in_process", "response_store", "record"},
    "in_process": {"api_processes", "restart_engine", "record"},
}


def is_refused(first: str, second: str, machine: Machine) -> bool:
    """True if two knobs cannot be given together, by the tables above."""
    lacking = LACKING | LACKING_ON[machine.device]
    return (
        any(one in lacking and other not in lacking[one] for one, other in ((first, second), (second, first)))
        or second in CLASHING.get(first, ())
        or first in CLASHING.get(second, ())
    )


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.device)
def test_two_knobs_are_accepted_or_refused_with_advice(machine: Machine) -> None:
    surprises = dict[tuple[str, str], str]()
    for first, second in itertools.combinations_with_replacement(ALL_KNOBS, 2):
        knobs = {name: example(ALL_KNOBS[name]) for name in (first, second)}
        try:
            overruled(machine, **knobs)
            reason = ""
        except ConfigError as error:
            reason = str(error)
            assert ";" in reason or "must be" in reason, (knobs, "a refusal says what to do")
        if bool(reason) != is_refused(first, second, machine):
            surprises[first, second] = reason or "accepted"
    assert surprises == {}


@pytest.mark.parametrize(
    ("knobs", "refused"),
    [
        ({"idle_unload": 5.0}, "idle_unload has no effect without on_demand"),
        ({"record_bytes": "2GiB"}, "record_bytes has no effect without record"),
        ({"max_replicas": 3, "replicas": 2}, "max_replicas has no effect without cluster"),
        (
            {"cluster": "ray", "target_queue_time": 2.0},
            "target_queue_time has no effect without max_replicas",
        ),
        ({"scale_down_after": 9.0}, "scale_down_after has no effect without max_replicas"),
        ({"share_device": True}, "share_device has no effect without replicas"),
        ({"uds": "s", "allowed_host": ("a.example",)}, "allowed_host has no effect with uds; leave out"),
        ({"host": "0.0.0.0", "allowed_host": ("a.example",)}, "allowed_host has no effect with host=0.0.0.0"),
        ({"api_key": ("k",), "allowed_host": ("a.example",)}, "allowed_host has no effect with api_key"),
        ({"in_process": True, "restart_engine": False}, "restart_engine has no effect with in_process"),
    ],
    ids=str,
)
def test_what_has_no_effect_on_a_server_is_refused(knobs: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        ServerConfig(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"uds": "s", "host": "0.0.0.0", "port": 80},  # an image's address, replaced by one of its user
        {"in_process": True, "api_processes": 1},  # the number that there is anyway
        {"host": "localhost", "allowed_host": ("a.example",)},
    ],
    ids=str,
)
def test_what_does_no_harm_on_a_server_is_accepted(knobs: dict[str, Any]) -> None:
    made = ServerConfig(**knobs)
    assert {name: getattr(made, name) for name in knobs} == knobs


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"master_addr": "10.0.0.1"}, "master_addr"),
        ({"master_port": 29502}, "master_port"),
        ({"record_cpu_step": True, "attention_backend": "sdpa"}, "record_cpu_step"),
        ({"use_overlap": True, "pipeline_parallel_size": 2, "kv_cache_backend": "naive"}, "use_overlap"),
    ],
    ids=str,
)
def test_what_has_no_effect_on_a_run_is_named(knobs: dict[str, Any], named: str) -> None:
    assert named in overruled(**knobs)
    assert named not in overruled()
