from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from infer.config.knobs import parse_bytes, parse_knob
from infer.config.settings import MAX_SEQUENCES, EngineConfig, LoadConfig, ServerConfig, knob_table
from infer.config.yaml_file import read_config_file
from infer.errors import ConfigError, RequestError
from infer.sampling.params import SamplingParams
from infer.scheduling.scheduler import BACKLOG_TOKENS


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


def test_the_help_of_mixed_prefill_tokens_has_the_scheduler_s_number() -> None:
    assert f"more than {BACKLOG_TOKENS} wait" in knob_table()["mixed_prefill_tokens"].help


def test_no_alias_hides_a_knob() -> None:
    names = [name for row in knob_table().values() for name in (row.name, *row.aliases)]
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [("max_model_len", "max_seq_len"), ("max_num_seqs", "max_batch_size"), ("max_modle_len", "max_seq_len")],
)
def test_who_knows_a_knob_by_another_name_is_told_this_one(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown knob '{given}'; did you mean '{meant}'"):
        EngineConfig.from_knobs(**{given: 128})


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
        ({"dtype": None}, "dtype must be str, got None"),
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
    knobs = read_config_file(path, knob_table(with_server=True))
    with pytest.raises(ConfigError, match="max_body_size needs a unit, such as 4MiB or 4GiB, got '4'"):
        ServerConfig(**knobs)


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
        ("- dtype", "must be a mapping of knob to value, got list"),
        ("dtype: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config_file(write(tmp_path, text), knob_table())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read config file .*No such file"):
        read_config_file(tmp_path / "absent.yaml", knob_table())


def test_none_is_only_for_optional_knobs() -> None:
    table = knob_table()
    assert parse_knob(table["max_seq_len"], None) is None
    with pytest.raises(ConfigError, match="dtype must be str, got None"):
        parse_knob(table["dtype"], None)


def test_a_number_of_threads_that_crashes_the_library_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads must be at most 1024"):
        EngineConfig.from_knobs(num_threads=100_000)
