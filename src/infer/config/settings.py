"""Every knob of the engine, each defined exactly once, and the rules about them (`settings_faults`).

A *knob* (`knobs.py`) is one field of a frozen section: its default, its help line, its command-line flag
(`cli/flags.py`), its YAML key and its row in docs/knobs.md all come from the field below. There are
no environment variables that change behaviour.

    EngineConfig
    ├── load      LoadConfig      the model, its source and its number format
    ├── cache     CacheConfig     the cache of keys and values
    ├── scheduler SchedulerConfig the choice of sequences that run in a step
    ├── run       RunConfig       the execution of steps
    ├── speculation SpeculationConfig the proposer of drafts that a step verifies together (speculation.py)
    └── adapters  AdapterConfig   LoRA adapters that are loaded, and room for others (adapters.py)
    ServerConfig                  the server's address, its clients, and the limits of its work (server.py)

Knob names are unique across the sections, so they are written flat: `LLM("dir", dtype="float32")`,
`--dtype float32`, or `dtype: float32` in a file given to `--config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from infer.config.adapters import MAX_ADAPTERS, AdapterConfig
from infer.config.backends import OTHER_SPELLINGS, Chosen, choices
from infer.config.defaults import CPU_SHARE, GPU_SHARE, SERVER_MAX_QUEUE
from infer.config.knobs import (
    KnobRow,
    check_knobs,
    given_names,
    host_size,
    knob,
    knob_rows,
    own_names,
    parse_bytes,
    parse_knob,
    parse_memory,
    refuse,
    spell_as_given,
)
from infer.config.own_code import names_code
from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.server import ServerConfig
from infer.config.speculation import DRAFTED, LOOKUPS, SpeculationConfig
from infer.errors import ConfigError

_CPU_STEPS, _GPU_STEPS = CPU.steps.usual, GENERIC.steps  # numbers that the help texts quote
MAX_THREADS = 1024  # far more makes the thread library crash
MAX_RANKS = 64  # processes that share a model
FAST_PRODUCTS_GAIN = "up to 1.6 times as fast for prompts and batches, hardly faster for one sequence"
FAST_PRODUCTS_COST = "about +0.7 % (int4) to +0.8 % (int8) perplexity on the default model"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The model, its source and its number format."""

    model: str | None = knob(
        None, "model directory, GGUF file or hub id (org/name); default: SmolLM2-135M-Instruct, fetched once"
    )
    revision: str | None = knob(None, "branch, tag or commit of a hub id; pins every file")
    tokenizer: str | None = knob(None, "directory or tokenizer.json to use instead of the model's own")
    chat_template: str | None = knob(
        None,
        "Jinja file to use as the chat template; 'checkpoint': the template shipped with the model; "
        "'family': the family's template, also for a model shipped without one; or a name from "
        "docs/features/chat-templates.md",
    )
    tool_call_parser: str = knob(
        "auto",
        "notation of the model's tool calls (docs/features/tools.md); auto: as in its chat template",
    )
    reasoning_parser: str = knob(
        "auto",
        "tags of the model's reasoning (docs/features/reasoning.md); auto: as in its chat template; none: "
        "reasoning is part of the answer",
    )
    dtype: str = knob(
        "auto",
        "number format of weights and activations; auto: the checkpoint's, unless the device is slow with it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = knob(
        "auto",
        "form in which weights are kept: none (unpacked, in the dtype), int8, int4, on a GPU also fp8, on a "
        "CPU also int4+int8, fp32, bf16; the name of a quantized format (gptq, awq, compressed-tensors, fp8, "
        "bitsandbytes, squeezellm, gguf) means auto, and that the file must have it; auto: on a GPU as in "
        "the file, on a CPU int4 where it has 4 bits and int8 elsewhere, but fp32 for files in float32",
        formerly=("cpu_weights",),
    )
    model_impl: str = knob(
        "auto",
        "code that computes the model: infer or transformers; auto: infer, and transformers for a family "
        "that infer does not implement, if the package is installed",
        choices=("auto", "infer", "transformers"),
    )
    device: str = knob("auto", "device that the model runs on: auto, cpu, cuda or cuda:N")
    max_seq_len: int | None = knob(
        None,
        "most tokens of a prompt and its output together; default: the model's context",
        aliases=("max_model_len", "ctx_size"),
    )
    num_threads: int | None = knob(
        None, "CPU threads; default: one per physical core", most=MAX_THREADS, aliases=("threads",)
    )
    tensor_parallel_size: int = knob(
        1,
        "processes that share the weights and the KV cache, each computing its part of every step, with a "
        "GPU for each or with parts of a CPU (docs/features/tensor-parallelism.md)",
        most=MAX_RANKS,
        aliases=("tp", "tp_size"),
    )
    pipeline_parallel_size: int = knob(
        1,
        "stages of layers that follow each other, each computed by a process (or by tensor_parallel_size of "
        "them), which has the weights and the KV cache of these layers "
        "(docs/features/pipeline-parallelism.md)",
        aliases=("pp", "pp_size"),
    )
    nnodes: int = knob(
        1,
        "machines that the ranks of tensor_parallel_size and pipeline_parallel_size run on, the same number "
        "on each, with GPUs of one kind or on CPUs (docs/features/nodes.md)",
    )
    node_rank: int = knob(
        0, "with nnodes: the number of this machine; 0 runs the server, the others only compute", least=0
    )
    master_addr: str = knob("127.0.0.1", "with nnodes: the address at which node 0 waits for the others")
    master_port: int = knob(29501, "with nnodes: the TCP port at master_addr", most=65535)

    def __post_init__(self) -> None:
        check_knobs(self)
        if isinstance(self.quantization, str):
            object.__setattr__(self, "quantization", self.quantization.lower())
        device, _, index = self.device.partition(":")
        if device not in ("auto", "cpu", "cuda") or (index and not (device == "cuda" and index.isdigit())):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    @property
    def names_gpu(self) -> bool:
        """True if `device` is one GPU, such as cuda:1, which all ranks and replicas share."""
        return ":" in self.device

    @property
    def num_ranks(self) -> int:
        """The number of processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local_ranks(self) -> int:
        """The number of processes on one machine."""
        return self.num_ranks // self.nnodes

    @property
    def ranks_of_nodes(self) -> list[range]:
        """The numbers of the ranks on each machine."""
        each = self.num_local_ranks
        return [range(node * each, (node + 1) * each) for node in range(self.nnodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache of keys and values between steps."""

    kv_cache_backend: str = knob(
        "paged",
        "paged: many small blocks; contiguous: one block of max_seq_len tokens per sequence; "
        "naive: keep nothing and recompute every token (the teaching baseline)",
        choices=("paged", "contiguous", "naive"),
    )
    kv_cache_dtype: str = knob(
        "auto",
        "number format of keys and values (docs/features/kv-cache-dtype.md); none: the dtype; int8 or fp8: "
        "8 bits with a scale for each token and head; fp8 uses the checkpoint's own scales if it has any, "
        "fp8_per_token_head never; auto: fp8 if the checkpoint has scales, else the dtype",
        choices=("auto", "none", "fp8", "int8", "fp8_per_token_head"),
        same_as={"fp8_e4m3": "fp8", "int8_per_token_head": "int8"},
    )
    block_size: int = knob(16, "tokens per KV-cache block", aliases=("page_size",))
    num_blocks: int | None = knob(
        None,
        "KV-cache blocks; default: what kv_cache_memory holds",
        aliases=("num_gpu_blocks", "num_gpu_blocks_override"),
    )
    kv_cache_memory: str | None = knob(
        None,
        "memory for the KV cache, such as 512MiB or 4GiB; default: a part of the free memory",
        is_size=True,
    )
    kv_cache_share: float | None = knob(
        None,
        "share of the memory left after weights and steps that the KV cache takes, if neither num_blocks nor "
        f"kv_cache_memory is given; default: {CPU_SHARE}, on a GPU all of it",
        most=1,
    )
    device_memory: str | None = knob(
        None,
        "device memory for weights, CUDA graphs, workspaces and KV cache together: a size such as 12GiB, or "
        "a share of the device's memory such as 0.9; default: the weights and the free memory, on a GPU "
        f"{GPU_SHARE} of the free memory",
        aliases=("gpu_memory_utilization", "mem_fraction_static"),
        is_size=True,
    )
    swap_blocks: int = knob(
        0,
        "blocks in host memory, for preempted sequences and evicted prefixes; 0: none",
        least=0,
        formerly=("num_host_blocks",),
    )
    swap_space: str | None = knob(
        None,
        "swap_blocks as a size for each rank, such as 16GiB; a number alone is GiB; 0: none",
        aliases=("kv_offloading_size", "hicache_size"),
        is_size=True,
    )
    use_prefix_caching: bool = knob(
        True,
        "reuse the cache of prompts that start alike (paged cache only)",
        aliases=("prefix_caching", "enable_prefix_caching"),
        opposites=("disable_radix_cache",),
    )
    block_allocator: str = knob(
        "lru",
        "block allocator, which decides which cached block is evicted first; lru: the least recently used",
        choices=("lru",),
        takes_code=True,
    )
    attention_backend: str = knob(
        "auto",
        "implementation of attention (docs/features/backends.md); auto: the fastest on the device; torch_ref "
        "or naive: the readable reference",
        choices=choices("attention"),
        same_as=OTHER_SPELLINGS,
    )
    decode_attention_backend: str = knob(
        "auto",
        "implementation of attention for decoding rows; default: as attention_backend",
        choices=choices("decode_attention"),
        same_as=OTHER_SPELLINGS,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.swap_space is not None:
            if self.swap_blocks:  # checked here: a swap_space of 0 is None from the next line on
                raise ConfigError("swap_blocks and swap_space both size the host memory; give one of them")
            object.__setattr__(self, "swap_space", host_size(self.swap_space, "swap_space"))
        if self.device_memory is not None:
            parse_memory(self.device_memory, 1, "device_memory")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")

    @property
    def has_host_memory(self) -> bool:
        """True if blocks may go to host memory."""
        return self.swap_blocks > 0 or self.swap_space is not None

    @property
    def keeps_cache(self) -> bool:
        """True if keys and values are kept after a step."""
        return self.kv_cache_backend != "naive"

    @property
    def caches_prefixes(self) -> bool:
        """True if prompts that start alike share blocks, which only the paged cache can do."""
        return self.use_prefix_caching and self.kv_cache_backend == "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The choice of sequences that run in a step."""

    batching_mode: str = knob(
        "continuous",
        "continuous: sequences join and leave at every step; static: a batch runs until its last one ends",
        choices=("continuous", "static"),
    )
    scheduler_policy: str = knob(
        "fcfs",
        "order in which sequences are served (docs/features/scheduling.md)",
        choices=("fcfs", "prefill_first", "decode_round_robin", "priority", "deadline"),
        aliases=("scheduling_policy", "schedule_policy"),
        takes_code=True,
    )
    max_batch_size: int | None = knob(
        None,
        f"sequences that may run at once; default: {_CPU_STEPS.batch_size}, on a GPU "
        f"{_GPU_STEPS.usual.batch_size} ({_GPU_STEPS.tight.batch_size} for a large model with up to "
        f"{_GPU_STEPS.tight_bytes >> 30} GiB)",
        aliases=("max_num_seqs", "max_running_requests"),
    )
    max_num_batched_tokens: int | None = knob(
        None,
        f"most tokens of a step, of all sequences; default: {_CPU_STEPS.batched_tokens}, on a "
        f"GPU {_GPU_STEPS.usual.batched_tokens} (with {_GPU_STEPS.large_bytes >> 30} GiB "
        f"{_GPU_STEPS.large.batched_tokens}, for a large model with up to {_GPU_STEPS.tight_bytes >> 30} GiB "
        f"{_GPU_STEPS.tight.batched_tokens}), or more if max_batch_size or prompts that are not chunked "
        "need it",
    )
    use_chunked_prefill: bool = knob(
        True,
        "split long prompts into chunks, so that other sequences go on decoding",
        aliases=("chunked_prefill", "enable_chunked_prefill"),
    )
    prefill_chunk_size: int | None = knob(
        None,
        f"most tokens of one prompt in a step; default: {_CPU_STEPS.chunk_size}, on a GPU no limit",
        aliases=("chunked_prefill_size", "long_prefill_token_threshold"),
    )
    prefill_tokens_while_decoding: int | None = knob(
        None,
        "most prompt tokens of a step in which other sequences decode, unless more than "
        f"{GENERIC.scheduling.backlog_tokens} wait after the first prompt (continuous batching, policies "
        f"that put decoding first); default: {_GPU_STEPS.usual.mixed_tokens}, on a GPU "
        f"{_GPU_STEPS.small_mixed_tokens} for models with at most "
        f"{_GPU_STEPS.small_weights / 1e9:g} billion active weights, whose steps are short",
        formerly=("mixed_prefill_tokens",),
    )
    itl_target_ms: float | None = knob(
        None,
        "target for the milliseconds between two tokens of a sequence: a step takes no more prompt tokens "
        "than were measured to fit when the engine started, nor more than prefill_tokens_while_decoding; "
        "default: none, waiting prompts are computed at full speed",
    )
    max_prefill_chunks_per_step: int | None = knob(
        None, "most chunks of prompts in a step, in addition to the limits in tokens; default: no limit"
    )
    preemption: str = knob(
        "auto",
        "when the cache is full: recompute drops a sequence's blocks, swap copies them to host memory, auto "
        "takes the cheaper way",
        choices=("auto", "recompute", "swap"),
    )
    max_wait_steps: int = knob(1000, "steps after which a waiting sequence goes first, whatever the policy")
    max_decode_gap: int = knob(
        8,
        "most steps in a row that leave a decoding sequence out, for prompts (prefill_first) or because a "
        "step has too few tokens; sequences then take turns, and this may be exceeded",
    )
    max_queue: int | None = knob(
        None,
        "most sequences that wait for an engine, without the ones that its free places will take; more "
        f"are refused; default: {SERVER_MAX_QUEUE} in a server, no limit in the library",
        aliases=("max_queued_requests",),
        formerly=("max_waiting",),
    )
    seed: int = knob(0, "seed of requests without one", least=1 - 2**63)

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The execution of steps."""

    use_cuda_graphs: bool | None = knob(
        None,
        "replay decode steps as CUDA graphs instead of launching each kernel; default: on a GPU",
        aliases=("cuda_graphs",),
        opposites=("enforce_eager", "disable_cuda_graph"),
    )
    use_overlap: bool | None = knob(
        None,
        "plan and launch the next step while the GPU computes this one; default: on a GPU, and with "
        "pipeline_parallel_size",
        aliases=("overlap", "async_scheduling"),
        opposites=("disable_overlap_schedule",),
    )
    record_cpu_step: bool | None = knob(
        None,
        "run a decode step as one recorded list of C kernels instead of calling them from Python; "
        "default: on a CPU",
        formerly=("use_cpu_program", "cpu_program"),
    )
    mlp_backend: str = knob(
        "auto",
        "implementation of the feed-forward half of a layer: kernels (auto), or the readable reference",
        choices=choices("mlp"),
        same_as=OTHER_SPELLINGS,
    )
    cpu_products: str = knob(
        "exact",
        "rounding of activations for int8 and int4 weights on a CPU: exact: to 15 bits; fast: to 8 bits as "
        f"in llama.cpp, {FAST_PRODUCTS_GAIN}, {FAST_PRODUCTS_COST} (docs/features/cpu.md)",
        choices=("exact", "fast"),
    )
    deterministic: bool = knob(
        False, "make logits independent of batch, chunking and caching, to the last bit; slower"
    )

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All sections together: what `engine/build.py` turns into a running engine."""

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        refuse(settings_faults(self))

    @classmethod
    def from_knobs(cls, **knobs: Any) -> EngineConfig:
        """Return the config of flat knobs; an unknown name is an error that names the closest knob."""
        table = knob_table()
        named = own_names(knobs, table, elsewhere=knob_table(with_server=True))
        sections: dict[str, Any] = {}
        try:
            for section, section_type in engine_sections().items():
                chosen = {k: parse_knob(table[k], v) for k, v in named.items() if table[k].section == section}
                sections[section] = section_type(**chosen)
            return cls(**sections)
        except ConfigError as error:
            raise ConfigError(spell_as_given(str(error), given_names(knobs, table))) from None

    def knobs(self) -> dict[str, Any]:
        """Return every knob with its value, flat: the inverse of `from_knobs`."""
        return {name: getattr(getattr(self, row.section), name) for name, row in knob_table().items()}

    @property
    def asked_backends(self) -> Chosen:
        """The backend of each operation as it was asked for, possibly auto."""
        return Chosen(self.cache.attention_backend, self.cache.decode_attention_backend, self.run.mlp_backend)

    def own_code(self) -> list[str]:
        """The knobs that name the user's own code (own_code.py)."""
        table, knobs = knob_table(), self.knobs()
        return [name for name, row in table.items() if row.takes_code and names_code(knobs[name])]


def engine_sections() -> dict[str, type]:
    """Return the type of each section of `EngineConfig` by its name."""
    sections: dict[str, type] = {}
    for section in fields(EngineConfig):
        assert isinstance(section.default_factory, type)
        sections[section.name] = section.default_factory
    return sections


def knob_table(*, with_server: bool = False) -> dict[str, KnobRow]:
    """Return every knob by name, in the order of the sections; the server's only on request."""
    table: dict[str, KnobRow] = {}
    sections = engine_sections() | ({"server": ServerConfig} if with_server else {})
    for section, section_type in sections.items():
        for row in knob_rows(section, section_type):
            assert row.name not in table, f"knob {row.name} exists twice"
            table[row.name] = row
    return table


def settings_faults(config: EngineConfig) -> Iterator[str]:
    """Yield the error of every rule about knobs that exclude or need each other, read from the top.

    A value that is wrong by itself was refused before, by its section. What cannot work on a machine or for a
    model is refused later (machine_rules.py); a knob that only has no effect is a warning (unused.py).
    """
    yield from _rank_faults(config.load)
    yield from _cache_faults(config.cache, config.scheduler)
    yield from _draft_faults(config)
    yield from _adapter_faults(config)


def _rank_faults(load: LoadConfig) -> Iterator[str]:
    if load.num_ranks > MAX_RANKS:
        yield (
            f"tensor_parallel_size * pipeline_parallel_size must be at most {MAX_RANKS}, got "
            f"{load.tensor_parallel_size} * {load.pipeline_parallel_size}"
        )
    if load.num_ranks % load.nnodes:
        yield (
            f"nnodes={load.nnodes} must divide tensor_parallel_size * pipeline_parallel_size, which is "
            f"{load.num_ranks}; raise one of the two, such as --pipeline-parallel-size {load.nnodes}"
        )
    if load.node_rank >= load.nnodes:
        yield f"node_rank must be from 0 to {load.nnodes - 1} with nnodes={load.nnodes}, got {load.node_rank}"


def _cache_faults(cache: CacheConfig, scheduler: SchedulerConfig) -> Iterator[str]:
    if cache.kv_cache_dtype != "auto" and not cache.keeps_cache:
        yield (
            f"kv_cache_dtype={cache.kv_cache_dtype} needs a cache, and kv_cache_backend=naive keeps none; "
            "leave one of the two out"
        )
    sizes = ("num_blocks", "kv_cache_memory", "kv_cache_share")
    given = [name for name in sizes if getattr(cache, name) is not None]
    if len(given) > 1:
        yield f"{given[0]} and {given[1]} both size the KV cache; give one of them"
    is_static = scheduler.batching_mode == "static"
    if is_static and not cache.keeps_cache:
        yield (
            "kv_cache_backend=naive keeps nothing between steps, so a static batch has no decode steps; "
            "use batching_mode=continuous, or kv_cache_backend=contiguous for the classic static batch"
        )
    if scheduler.preemption == "swap" and not cache.has_host_memory:
        yield (
            "preemption=swap needs host memory to swap to, but swap_blocks is 0; "
            "set swap_blocks or swap_space, or use preemption=recompute"
        )
    is_chunked = scheduler.use_chunked_prefill and cache.keeps_cache
    prompts_wait = not is_static and scheduler.scheduler_policy != "prefill_first"
    if scheduler.itl_target_ms is not None and not (is_chunked and prompts_wait):
        yield (
            "itl_target_ms needs prompts that come in chunks and wait for sequences that decode; use "
            "continuous batching, chunked prefill, a cache, and a policy other than prefill_first"
        )


def _draft_faults(config: EngineConfig) -> Iterator[str]:
    drafts, load, cache, run = config.speculation, config.load, config.cache, config.run
    method, has_files = drafts.speculative_method, drafts.draft_model is not None
    if drafts.prompt_lookup_min > drafts.prompt_lookup_max:
        yield (
            f"prompt_lookup_min is {drafts.prompt_lookup_min} and prompt_lookup_max is "
            f"{drafts.prompt_lookup_max}; the shortest match must not be longer than the longest"
        )
    if method in DRAFTED and not has_files:
        yield f"speculative_method={method} needs the files of a drafter; name them with draft_model"
    if (method in LOOKUPS or names_code(method)) and has_files:
        looks_up = f"speculative_method={method} looks drafts up and needs no draft_model"
        yield f"{looks_up}; leave one of the two out"
    if drafts.is_on and method == "auto" and not has_files and len(set(drafts.methods_asked)) > 1:
        yield (
            "suffix_max_answers is for the method suffix, prompt_lookup_max and prompt_lookup_min are "
            "for ngram; choose one with speculative_method, or leave the knobs of the other out"
        )
    is_off = drafts.speculative_decoding is None and not drafts.is_on
    for name, dashes in (("adaptive_speculation", "--no-"), ("synthetic_acceptance", "--")):
        if is_off and drafts.is_given(name):
            flag = dashes + name.replace("_", "-")
            yield (
                f"{name}={getattr(drafts, name)} ({flag}) needs drafts, and speculative decoding is off; "
                f"turn it on with speculative_decoding, or leave {name} out"
            )
    if drafts.is_on and not cache.keeps_cache:
        yield (
            "kv_cache_backend=naive computes every token of a sequence in each step, so drafts can save "
            "none; leave speculative decoding out, or use kv_cache_backend=paged"
        )
    excluded = {
        "tensor_parallel_size": load.tensor_parallel_size > 1,
        "pipeline_parallel_size": load.pipeline_parallel_size > 1,
        "deterministic": run.deterministic,  # an accepted branch was summed in another order
    }
    for name, is_asked in excluded.items():
        if is_asked and drafts.is_on and drafts.method == "tree":
            yield (
                f"speculative_method=tree cannot be used with {name}; leave one of the two out, or use "
                "speculative_method=draft_model"
            )


def _adapter_faults(config: EngineConfig) -> Iterator[str]:
    adapters, load, run = config.adapters, config.load, config.run
    num_modules, most = len(adapters.lora_modules), adapters.max_loras
    if adapters.enable_lora is False and num_modules:
        yield "enable_lora is off, but lora_modules names adapters; leave one of the two out"
    if not adapters.is_on and (most is not None or adapters.max_lora_rank is not None):
        yield "max_loras and max_lora_rank need enable_lora or lora_modules; add one of them"
    if most is not None and not num_modules <= most <= MAX_ADAPTERS:
        least = f"{max(num_modules, 1)}, the adapters of lora_modules"
        yield f"max_loras must be from {least}, to {MAX_ADAPTERS}, got {most}"
    excluded = {"deterministic": run.deterministic, "pipeline_parallel_size": load.pipeline_parallel_size > 1}
    for name, is_asked in excluded.items():
        if is_asked and adapters.is_on:
            yield f"LoRA adapters with {name} are not built yet; leave one of the two out"
