"""Which known name an unknown one is taken for, and which is not taken for any."""

from __future__ import annotations

import pytest

from infer.config.settings import knob_table
from infer.errors import ContextOverflow, QueueFull, closest, json_type, nearest, show_value
from infer.sampling.params import SamplingParams

NAMES = [*knob_table(with_server=True), *SamplingParams.__dataclass_fields__]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("dtpye", "dtype"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("max_batchsize", "max_batch_size"),
        ("max_new_tokens", "max_tokens"),
        ("stops", "stop"),
        ("n_threads", "num_threads"),
        ("logprob", "logprobs"),
        ("prefix_caching", "use_prefix_caching"),
        ("temp", "temperature"),  # the only one that begins so
        ("presence", "presence_penalty"),
        ("Num_Blocks", "num_blocks"),
    ],
)
def test_a_slip_is_understood(given: str, meant: str) -> None:
    assert nearest(given, NAMES) == meant


@pytest.mark.parametrize(
    "given",
    [
        "wandb_rank",
        "host_memory",  # not kv_cache_memory
        "length_penalty",  # not presence_penalty
        "num_beams",  # not num_threads
        "max_length",
        "stop_sequences",
        "do_sample",
        "gore",  # not port
        "workers",  # not tokenizer
        "nope",  # not stop
        "tp",
        "num",  # many begin so
        "",
    ],
)
def test_what_is_far_from_every_name_is_taken_for_none(given: str) -> None:
    assert nearest(given, NAMES) is None
    assert closest(given, NAMES) == ""


def test_all_names_are_listed_only_where_none_is_near() -> None:
    known = ["tiny", "large"]
    assert closest("tinny", known, listed="served") == "; did you mean 'tiny'?"
    assert closest("gpt", known, aliases={"huge": "large"}, listed="served") == "; served: tiny, large"


def test_a_name_from_elsewhere_is_answered_with_the_one_here() -> None:
    assert closest("max_modle_len", NAMES, aliases={"max_model_len": "max_seq_len"}) == (
        "; did you mean 'max_seq_len'?"
    )


@pytest.mark.parametrize(
    ("num_tokens", "spelled"), [(1, "prompt has 1 token and"), (2, "prompt has 2 tokens and")]
)
def test_one_token_is_not_called_tokens(num_tokens: int, spelled: str) -> None:
    assert str(ContextOverflow(num_tokens, 99, 64)).startswith(spelled)


def test_a_full_queue_counts_one_as_one() -> None:
    assert str(QueueFull.of(1, 1)).startswith("1 sequence is waiting and max_queue is 1; try again later")


@pytest.mark.parametrize(
    ("value", "shown", "kind"),
    [
        (None, "null", "null"),
        (True, "true", "true or false"),
        (1.5, "1.5", "a number"),
        ("it's", '"it\'s"', "a string"),
        ([{"name": "f", "x": None}, "é"], '[{"name": "f", "x": null}, "é"]', "a list"),
        ({"a": {"b": {"c": 1}}}, '{"a": {"b": {...}}}', "an object"),
        ("x" * 10**6, f"'{'x' * 56}...", "a string"),
    ],
)
def test_values_are_shown_in_the_words_of_json(value: object, shown: str, kind: str) -> None:
    assert (show_value(value), json_type(value)) == (shown, kind)
