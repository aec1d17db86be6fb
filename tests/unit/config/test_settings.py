from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from infer.cli.flags import knobs_from
from infer.cli.main import build_parser, main
from infer.config import foreign, knobs
from infer.config.defaults import MAX_SEQUENCES
from infer.config.foreign import FOREIGN
from infer.config.knobs import parse_bytes, parse_knob, read_config_file
from infer.config.profiles.generic import GENERIC
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig, LoadConfig, knob_table
from infer.errors import ConfigError, RequestError
from infer.sampling.params import SamplingParams


def write(folder: Path, text: str) -> Path:
    path = folder / "knobs.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_field_of_every_section_is_a_knob_with_help() -> None:
    config = EngineConfig()
    sections = {section.name: getattr(config, section.name) for section in fields(EngineConfig)}
    expected = [(f.name, name) for name, section in sections.items() for f in fields(section)]
    table = knob_table()
    assert [(row.name, row.section) for row in table.values()] == expected
    assert all(len(row.help) > 10 and not row.help.endswith(".") for row in table.values())


def test_the_help_of_prefill_tokens_while_decoding_has_the_scheduler_s_number() -> None:
    backlog = GENERIC.scheduling.backlog_tokens
    assert f"more than {backlog} wait" in knob_table()["prefill_tokens_while_decoding"].help


def test_no_alias_hides_a_knob() -> None:
    names = [name for row in knob_table().values() for name in (row.name, *row.spellings)]
    names = [name.replace("-", "_") for name in names]
    assert len(names) == len(set(names))


def test_flat_knobs_find_their_sections() -> None:
    config = EngineConfig.from_knobs(dtype="float32", max_seq_len=128, kv_cache_backend="naive")
    assert config.load.dtype == "float32"
    assert config.load.max_seq_len == 128
    assert config.cache.kv_cache_backend == "naive"
    assert config.load.device == LoadConfig().device


def test_knobs_is_the_inverse_of_from_knobs() -> None:
    config = EngineConfig.from_knobs(device="cuda:1", num_threads=3)
    assert EngineConfig.from_knobs(**config.knobs()) == config


def test_a_path_is_as_good_as_its_text() -> None:
    config = EngineConfig.from_knobs(model=Path("a/b"), tokenizer=Path("c"), chat_template=Path("d.jinja"))
    assert (config.load.model, config.load.tokenizer, config.load.chat_template) == ("a/b", "c", "d.jinja")


def test_an_unknown_knob_names_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="unknown knob 'dtyp'; did you mean 'dtype'"):
        EngineConfig.from_knobs(dtyp="float32")


def test_a_slip_of_another_spelling_names_the_knob() -> None:
    with pytest.raises(ConfigError, match="unknown knob 'max_modle_len'; did you mean 'max_seq_len'"):
        EngineConfig.from_knobs(max_modle_len=128)


SPELLINGS = [
    ("max_model_len", 128, "max_seq_len", 128),
    ("max_num_seqs", 7, "max_batch_size", 7),
    ("num_gpu_blocks", 7, "num_blocks", 7),
    ("gpu_memory_utilization", 0.5, "device_memory", "0.5"),
    ("chunked_prefill", False, "use_chunked_prefill", False),
    ("enable_chunked_prefill", False, "use_chunked_prefill", False),
    ("prefix_caching", False, "use_prefix_caching", False),
    ("disable_radix_cache", True, "use_prefix_caching", False),
    ("enforce_eager", True, "use_cuda_graphs", False),
    ("enforce_eager", False, "use_cuda_graphs", None),  # no demand: a CPU takes it too
    ("disable_radix_cache", False, "use_prefix_caching", True),
    ("use_cpu_program", False, "record_cpu_step", False),
    ("mixed_prefill_tokens", 9, "prefill_tokens_while_decoding", 9),
    ("max_waiting", 9, "max_queue", 9),
    ("num_host_blocks", 9, "swap_blocks", 9),
    ("spec_length", 4, "num_speculative_tokens", 4),
    ("draft", 4, "num_speculative_tokens", 4),
    ("draft_max", 4, "num_speculative_tokens", 4),
    ("speculative_num_steps", 4, "num_speculative_tokens", 4),
    ("speculative_draft_model_path", "org/name", "draft_model", "org/name"),
    ("speculative_model", "org/name", "draft_model", "org/name"),
    ("ngram_prompt_lookup_max", 5, "prompt_lookup_max", 5),
]


@pytest.mark.parametrize(("given", "value", "own", "meant"), SPELLINGS)
def test_another_spelling_sets_the_knob_as_keyword_in_a_file_and_as_flag(
    tmp_path: Path, given: str, value: object, own: str, meant: object
) -> None:
    expected = EngineConfig.from_knobs(**{own: meant})
    assert EngineConfig.from_knobs(**{given: value}) == expected
    path = write(tmp_path, f"{given.replace('_', '-')}: {str(value).lower()}\n")
    assert read_config_file(path, knob_table()) == {own: meant}
    flag = "--" + given.replace("_", "-")
    words = [flag, str(value)] if not isinstance(value, bool) else [flag if value else f"--no-{flag[2:]}"]
    assert knobs_from(build_parser().parse_args(["generate", "hi", *words])) == {own: meant}


def test_the_reference_of_attention_has_two_names() -> None:
    config = EngineConfig.from_knobs(attention_backend="torch_ref")
    assert config == EngineConfig.from_knobs(attention_backend="naive")


def test_the_own_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    knobs._say_own_name.cache_clear()
    caplog.set_level(logging.INFO, logger="infer")
    for _ in range(2):
        EngineConfig.from_knobs(max_model_len=128, max_waiting=3, tp=2, pp=2)  # these two are abbreviations
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "knob has another name here given=max_model_len own=max_seq_len"),
        ("WARNING", "knob was renamed; the next release refuses the old name old=max_waiting new=max_queue"),
    ]


def test_a_knob_given_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_modules is given twice, once as lora; give it once"):
        EngineConfig.from_knobs(lora=("a=X",), lora_modules=("b=Y",))
    with pytest.raises(ConfigError, match="max_seq_len is given twice, once as max_model_len; give it once"):
        EngineConfig.from_knobs(max_seq_len=1, max_model_len=1)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("enable_expert_parallel", False, True),
    ],
)
def test_a_setting_of_other_engines_is_refused_by_name(name: str, taken: object, refused: object) -> None:
    assert EngineConfig.from_knobs(**{name: taken}) == EngineConfig()
    message = f"{name} must be {taken}, got {refused!r}: .* use tensor_parallel_size"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_knobs(**{name: refused})
    words = ["--" + name.replace("_", "-"), *([] if refused is True else [str(refused)])]
    arguments = build_parser().parse_args(["generate", *words, "hi"])  # a flag does not swallow the prompt
    with pytest.raises(ConfigError, match=f"{name} must be {taken}, got '?{refused}'?: "):
        knobs_from(arguments)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"n_gpu_layers": 99}, "n_gpu_layers must be left out, got 99: .* use device=cpu or device=cuda"),
        ({"n_gpu_layers": 0}, "n_gpu_layers must be left out, got 0: .* use device=cpu or device=cuda"),
        ({"mmproj": "a.gguf"}, "mmproj must be left out, got .*: input of images is not built yet; leave it"),
        ({"parallel": 4}, "parallel must be left out, got 4: .* use max_batch_size"),
        ({"hicache_ratio": 2.0}, "use swap_space"),
        ({"speculative_num_draft_tokens": 4}, "use num_speculative_tokens, which is one less"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk must be 1, got 4: drafts are chains"),
        ({"draft_min": 2}, "draft_min must be 0, got 2: .* use adaptive_speculation"),
        ({"trust_remote_code": True}, "code from a checkpoint is never run; leave it out"),
    ],
)
def test_what_is_done_another_way_says_how(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_knobs(**knobs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-ngl", "99"], "n_gpu_layers must be left out, got '99': .* use device=cpu or device=cuda"),
        (["-np", "4"], "parallel must be left out, got '4': .* use max_batch_size"),
    ],
)
def test_a_short_flag_of_another_engine_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        knobs_from(build_parser().parse_args(["generate", *words, "hi"]))


@pytest.mark.parametrize("flag", ["-tp", "--tp", "--tp-size", "--tensor-parallel-size"])
def test_every_spelling_of_the_number_of_ranks_is_taken(flag: str) -> None:
    arguments = build_parser().parse_args(["generate", flag, "2", "hi"])
    assert EngineConfig.from_knobs(**knobs_from(arguments)).load.tensor_parallel_size == 2


def test_no_setting_of_another_engine_hides_a_knob() -> None:
    names = {name for row in knob_table(with_server=True).values() for name in (row.name, *row.spellings)}
    assert not names & FOREIGN.keys()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"dtype": "int3"}, "dtype must be one of auto, float32"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cpu:1"}, "got 'cpu:1'"),
        ({"device": "cuda:x"}, "got 'cuda:x'"),
        ({"max_seq_len": 0}, "max_seq_len must be a positive integer, got 0"),
        ({"num_threads": True}, "num_threads must be int, got True"),
        ({"max_seq_len": 1.5}, "got 1.5"),
        ({"use_prefix_caching": "no"}, "use_prefix_caching must be bool, got 'no'"),
        ({"seed": 2**80}, r"seed must be from -2\^63 \+ 1 to 2\^63 - 1, got a number of 81 bits"),
        ({"max_wait_steps": 10**5000}, "max_wait_steps must be from .* got a number of 16610 bits"),
        ({"kv_cache_memory": "0"}, "kv_cache_memory must be a size above 0, such as 512MiB or 4GiB, got '0'"),
        ({"kv_cache_memory": "0.4b"}, "kv_cache_memory must be a size above 0"),
        ({"kv_cache_memory": "9" * 400}, "kv_cache_memory must be a size above 0"),
        ({"seed": "1"}, "seed must be int, got '1'"),
        ({"kv_cache_memory": 512}, "kv_cache_memory needs a unit, such as 512MiB or 512GiB, got '512'"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory needs a unit, such as 1.5MiB or 1.5GiB"),
        ({"kv_cache_memory": -1}, "kv_cache_memory must be a size above 0"),
        ({"kv_cache_memory": True}, "kv_cache_memory must be str, got True"),
        ({"device": 5}, "device must be str, got 5"),
        ({"kv_cache_memory": "4"}, "kv_cache_memory needs a unit, such as 4MiB or 4GiB, got '4'"),
        ({"kv_cache_memory": " 1.5 "}, "needs a unit, such as 1.5MiB or 1.5GiB"),
        ({"block_size": None}, "block_size must be int, got None"),
        (
            {"gpu_memory_utilization": 2.0},
            r"^gpu_memory_utilization \(device_memory\) must be a size such as 12GiB",
        ),
        ({"max_num_seqs": "many"}, r"^max_num_seqs \(max_batch_size\) must be int, got 'many'"),
        ({"port": 80}, "^port is a knob of the server; give it to infer serve$"),
        ({"ssl_keyfile": "x"}, r"^ssl_keyfile \(tls_key\) is a knob of the server; give it to infer serve$"),
        ({"batch": 4}, "unknown knob 'batch'; did you mean 'batching_mode'"),
        (
            {"prefill_size_chunk": 4},
            "unknown knob 'prefill_size_chunk'; similar: [a-z_]+(, [a-z_]+){0,2}$",
        ),
        ({"zzz": 4}, "^unknown knob 'zzz'; docs/knobs.md lists all knobs$"),
    ],
)
def test_an_impossible_value_is_refused(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_knobs(**knobs)


@pytest.mark.parametrize(
    ("text", "size"), [("4B", 4), ("64 KiB", 65536), ("1048576", 2**20), ("1.5gb", 15 * 10**8)]
)
def test_a_size_has_a_unit_or_many_digits(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_size_without_a_unit_may_come_as_a_number(tmp_path: Path) -> None:
    assert EngineConfig.from_knobs(kv_cache_memory=2**30).cache.kv_cache_memory == str(2**30)
    path = tmp_path / "knobs.yaml"
    path.write_text("max_body_size: 4\n")
    given = read_config_file(path, knob_table(with_server=True))
    with pytest.raises(ConfigError, match="max_body_size needs a unit, such as 4MiB or 4GiB, got '4'"):
        ServerConfig(**given)


def test_a_server_gives_no_more_outputs_than_any_request_may_ask_for() -> None:
    most = ServerConfig(max_n=MAX_SEQUENCES).max_n
    assert SamplingParams(n=most).n == most
    with pytest.raises(RequestError, match=f"n must be an integer in \\[1, {most}\\], got {most + 1}"):
        SamplingParams(n=most + 1)
    with pytest.raises(ConfigError, match=f"max_n must be at most {most}, got {most + 1}"):
        ServerConfig(max_n=most + 1)


def test_a_body_of_no_size_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_body_size must be a size above 0, such as 512MiB or 4GiB, got '0'"
    ):
        ServerConfig(max_body_size="0")


def test_a_file_may_write_dashes_underscores_and_aliases(tmp_path: Path) -> None:
    path = write(tmp_path, "max-model-len: 64\nnum_threads: 2\nkv-cache-backend: naive\ntokenizer: null\n")
    expected = {"max_seq_len": 64, "num_threads": 2, "kv_cache_backend": "naive", "tokenizer": None}
    assert read_config_file(path, knob_table()) == expected


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_config_file(write(tmp_path, "# nothing yet\n"), knob_table()) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtyp: float32", "unknown knob 'dtyp'; did you mean 'dtype'"),
        ("max_seq_len: many", "max_seq_len must be int, got 'many'"),
        ("max_seq_len: true", "max_seq_len must be int, got True"),
        ("max_seq_len: 4\nmax-model-len: 5", "max_seq_len is given twice"),
        ("seed: 1\nmax_seq_len: 4\nseed: 2", "seed is given 2 times; give it once"),
        ("port: 9000", "port is a knob of the server; give it to infer serve"),
        ("- dtype", "must be a mapping of knob to value, got list"),
        ("dtype: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config_file(write(tmp_path, text), knob_table(), elsewhere=knob_table(with_server=True))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read config file .*No such file"):
        read_config_file(tmp_path / "absent.yaml", knob_table())


def test_none_is_only_for_optional_knobs() -> None:
    table = knob_table()
    assert parse_knob(table["max_seq_len"], None) is None
    with pytest.raises(ConfigError, match="block_size must be int, got None"):
        parse_knob(table["block_size"], None)


def test_none_leaves_open_what_has_a_value_for_it() -> None:
    assert EngineConfig.from_knobs(quantization=None, dtype=None, max_seq_len=None) == EngineConfig()


def test_an_error_names_the_flag_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--max-num-seqs", "0"]) == 2
    assert "--max-num-seqs (max_batch_size) must be a positive integer, got 0" in capsys.readouterr().err
    assert main(["generate", "hi", "--max-batch-size", "0"]) == 2
    assert "error: max_batch_size must be a positive integer, got 0" in capsys.readouterr().err


def test_a_flag_of_the_server_says_so_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--port", "80"])
    assert "unknown option --port; it is a knob of the server: infer serve" in capsys.readouterr().err


def test_a_number_of_threads_that_crashes_the_library_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads must be at most 1024"):
        EngineConfig.from_knobs(num_threads=100_000)


def test_a_value_of_quantization_is_checked_before_anything_is_loaded() -> None:
    """Forms and formats are named, a slip is recognized, and a scheme of `infer quantize` has its format."""
    parser = build_parser()
    for value, hint in (
        ("itn4", "did you mean int4?"),
        ("ct-w4a16", "leave quantization out, or use compressed-tensors"),
        ("fp8-block", "leave quantization out, or use fp8"),
        ("int3", "got 'int3'"),
        ("fp9", "got 'fp9'"),
        ("nonsense", "bitsandbytes, fp8, gguf; got 'nonsense'"),
    ):
        args = parser.parse_args(["generate", "--quantization", value])
        with pytest.raises(
            ConfigError, match="quantization must be a form, one of auto, none, int8"
        ) as error:
            knobs_from(args)
        assert str(error.value).endswith(hint), value
    args = parser.parse_args(["generate", "--quantization", "INT4"])
    assert EngineConfig.from_knobs(**knobs_from(args)).load.quantization == "int4"


def test_every_form_and_format_can_be_asked_for() -> None:
    from infer.loader.formats.quantized import FORMAT_NAMES
    from infer.quant.registry import SCHEMES

    assert {*FORMAT_NAMES, "gguf"} == set(foreign.FORMATS)
    assert set(SCHEMES) <= set(foreign.FORMS)
