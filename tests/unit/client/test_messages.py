"""What is sent is what arrives: every message, every value it can hold, every exception."""

from __future__ import annotations

import inspect
import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer import errors
from infer.cache.prefix_tree import Branch
from infer.client.messages import (
    Abort,
    Add,
    Answer,
    Command,
    Explain,
    Failure,
    Launch,
    LiveReport,
    Message,
    NodeLaunch,
    Ping,
    Ready,
    ResetPrefixCache,
    SetAdapter,
    StepReport,
    Stop,
    Unsubscribe,
    Watch,
    decode_command,
    decode_message,
    encode,
    to_error,
    to_failure,
)
from infer.client.spawn import read_orders
from infer.config.settings import EngineConfig
from infer.constraints.description import Reasoning, Structured
from infer.engine.live import LiveRequest, LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory, StoryEvent
from infer.errors import ContextOverflow, EngineError, InferError, RequestError
from infer.sampling.params import MAX_INT, RowLogprobs, SamplingParams
from infer.scheduling.request import DraftCounts, Request, StepOutput

WORDS = st.text(min_size=1, max_size=20)
TEXT = st.text(max_size=20)  # hypothesis makes no lone surrogates
IDS = st.integers(0, MAX_INT)
COUNTS = st.integers(0, 2**64 - 1)
FLOATS = st.floats(allow_nan=False)  # NaN is not equal to itself; -inf is a logprob


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


def tuples_of(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100) | st.integers(0, 100),
    top_p=st.floats(0.001, 1.0),
    top_k=st.integers(-1, MAX_INT),
    min_p=st.floats(0, 1),
    num_speculative_tokens=some(st.integers(0, 16)),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100) | st.integers(-100, 100), max_size=4),
    seed=some(st.integers(-MAX_INT, MAX_INT)),
    max_tokens=some(st.integers(10, MAX_INT)),
    min_tokens=st.integers(0, 10),
    stop=tuples_of(st.text(min_size=1, max_size=9)),
    stop_token_ids=tuples_of(IDS),
    ignore_eos=st.booleans(),
    logprobs=some(st.integers(0, 20)),
    prompt_logprobs=some(st.integers(0, 20)),
    n=st.integers(1, 8),
    best_of=some(st.integers(8, 128)),
) | st.builds(
    SamplingParams, temperature=st.just(0.0), n=st.integers(1, 4), best_of=some(st.integers(4, 8)),
    use_beam_search=st.just(True),
) | st.builds(
    SamplingParams,
    structured=some(st.builds(
        Structured, kind=st.just("choice"), text=st.lists(WORDS, min_size=1, max_size=4).map(json.dumps),
        triggers=tuples_of(WORDS), param=WORDS,
    )),
    reasoning=some(st.builds(Reasoning, end_id=st.just(3), max_tokens=some(IDS), forced=st.just((1, 3)))),
)  # fmt: skip
REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    prompt=tuples_of(st.integers(-MAX_INT, 2**64 - 1)),
    params=PARAMS,
    priority=st.integers(-MAX_INT, MAX_INT),
    deadline=some(FLOATS),
    cache_salt=TEXT,
    adapter=TEXT,
    pooling=some(TEXT),
)
ROWS = st.builds(RowLogprobs, token_id=IDS, logprob=FLOATS, rank=IDS, top=tuples_of(st.tuples(IDS, FLOATS)))
OUTPUTS = st.builds(
    StepOutput,
    request_id=TEXT,
    index=st.integers(0, 127),
    token_ids=tuples_of(IDS),
    logprobs=tuples_of(ROWS),
    finish_reason=some(st.sampled_from(["stop", "length", "abort", "error"])),
    stop_reason=some(IDS),
    cumulative_logprob=FLOATS,
    num_cached=IDS,
    prompt_logprobs=some(tuples_of(some(ROWS))),
    error=some(TEXT),
    param=some(TEXT),
    drafts=some(st.builds(DraftCounts, num_drafts=COUNTS, by_length=tuples_of(COUNTS), saved_s=FLOATS)),
    embedding=tuples_of(FLOATS),
)
STATS = st.builds(
    EngineStats,
    **dict.fromkeys(EngineStats.__dataclass_fields__, COUNTS)
    | {"step_sizes": tuples_of(COUNTS), "grammar_times": tuples_of(COUNTS), "grammar_s": FLOATS}
    | {"accepted_by_position": tuples_of(COUNTS), "draft_saved_s": FLOATS, "token_s": FLOATS, "row_s": FLOATS}
    | {"rank_step_s": FLOATS, "rank_wait_s": tuples_of(FLOATS)}
    | dict.fromkeys(("dtype", "weights", "kv_cache_dtype", "products", "gpu"), TEXT),
)
FAILURES = st.builds(Failure, kind=TEXT, message=TEXT, param=some(TEXT))
STORIES = st.builds(
    EngineStory,
    request_id=TEXT,
    held_s=tuples_of(FLOATS),
    error=some(TEXT),
    events=st.lists(st.builds(StoryEvent, COUNTS, COUNTS, FLOATS, COUNTS, COUNTS), max_size=3),
)
ANSWERS = st.builds(Answer, ticket=COUNTS, result=some(IDS), failure=some(FAILURES), story=some(STORIES))
RUNS = st.lists(COUNTS, max_size=6)
SNAPSHOTS = st.builds(
    LiveSnapshot,
    **dict.fromkeys(LiveSnapshot.__struct_fields__, COUNTS)
    | dict.fromkeys(("made_at", "interval_s"), FLOATS)
    | dict.fromkeys(("cells", "host_cells"), RUNS)
    | {"counts": st.tuples(COUNTS, COUNTS, COUNTS, COUNTS), "host_bytes": st.tuples(COUNTS, COUNTS, COUNTS)}
    | {"requests": st.lists(st.builds(LiveRequest, TEXT, TEXT, TEXT, *[COUNTS] * 7), max_size=3)}
    | {"branches": st.lists(st.builds(Branch, *[COUNTS] * 5), max_size=3), "steps": st.binary(max_size=99)},
)
COMMANDS = st.one_of(
    st.builds(Add, ticket=COUNTS, request=REQUESTS),
    st.builds(Unsubscribe, ticket=COUNTS, request_id=TEXT),
    st.builds(Abort, request_id=TEXT, index=some(st.integers(0, 127))),
    st.builds(ResetPrefixCache, ticket=COUNTS),
    st.builds(SetAdapter, ticket=COUNTS, name=TEXT, path=some(TEXT)),
    st.builds(Explain, ticket=COUNTS, request_id=TEXT),
    st.builds(Watch, ticket=COUNTS),
    st.builds(Ping),
    st.builds(Stop),
)
MESSAGES = st.one_of(
    st.builds(Ready, stats=STATS),
    FAILURES,
    st.builds(
        StepReport,
        num_commands=COUNTS,
        stats=STATS,
        tickets=st.lists(COUNTS, max_size=4),
        outputs=st.lists(OUTPUTS, max_size=4),
        answers=st.lists(ANSWERS, max_size=3),
        prefixes=st.dictionaries(st.integers(0, 2**64 - 1), st.booleans(), max_size=3),
    ),
    st.builds(LiveReport, ticket=COUNTS, snapshot=SNAPSHOTS),
)


@given(COMMANDS)
def test_every_command_arrives_as_it_was_sent(command: Command) -> None:
    arrived = decode_command(encode(command))
    assert arrived == command
    assert repr(arrived).replace(".0", "") == repr(command).replace(".0", "")  # tuples stay tuples


@given(MESSAGES)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    arrived = decode_message(encode(message))
    assert arrived == message
    assert repr(arrived) == repr(message)


def test_what_cannot_be_a_logprob_still_arrives() -> None:
    rows = tuple(RowLogprobs(1, value, 1, ((2, value),)) for value in (math.nan, math.inf, -math.inf))
    output = StepOutput(request_id="r", index=0, token_ids=(1,), logprobs=rows)
    arrived = decode_message(encode(StepReport(1, EngineStats(), [1], [output])))
    assert isinstance(arrived, StepReport)
    assert repr(arrived.outputs[0]) == repr(output)


def test_the_other_end_checks_sampling_parameters_again() -> None:
    good = encode(Add(1, Request(request_id="r", prompt=(1,), params=SamplingParams(temperature=0.5))))
    bad = good.replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(-0.5))
    assert bad != good
    with pytest.raises(RequestError, match="temperature must be a number"):
        decode_command(bad)


@pytest.mark.parametrize(
    "request_",
    [
        Request(request_id="r", prompt=(2**64,)),
        Request(request_id="r", prompt=(1,), priority=-(2**70)),
        Request(request_id="\ud800", prompt=(1,)),
        Request(request_id="r", prompt=(object(),)),  # type: ignore[arg-type]
        Request(request_id="r", prompt=(1,), params=SamplingParams(stop=("\udfff",))),
    ],
)
def test_what_no_wire_can_hold_is_the_clients_mistake(request_: Request) -> None:
    with pytest.raises(RequestError, match="64 bits and valid Unicode text"):
        encode(Add(1, request_))


def test_bytes_of_another_kind_are_refused() -> None:
    for data in (b"", b"\x80\x04N.", encode(Stop()) + b"x", encode(Ready(EngineStats()))):
        with pytest.raises(msgspec.DecodeError):
            decode_command(data)


def test_every_exception_of_ours_keeps_its_class_words_and_field() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, InferError)]
    assert len(kinds) > 10
    for kind in kinds:
        error: InferError = ContextOverflow(10, 5, 12) if kind is ContextOverflow else kind("words")
        if isinstance(error, RequestError):
            error.param = "field"
        arrived = decode_message(encode(to_failure(error)))
        assert isinstance(arrived, Failure)
        again = to_error(arrived)
        assert type(again) is kind
        assert str(again) == str(error)
        if isinstance(again, RequestError):
            assert again.param == "field"


def test_an_exception_that_is_not_ours_tells_its_type_and_no_more() -> None:
    failure = to_failure(FileNotFoundError(2, "no such file", "/secret/place"))
    assert type(to_error(failure)) is EngineError
    assert "FileNotFoundError" in failure.message
    assert "secret" not in failure.message


def test_a_subclass_from_elsewhere_arrives_as_the_class_we_know() -> None:
    class Special(RequestError):
        pass

    again = to_error(to_failure(Special("words", param="p")))
    assert type(again) is RequestError
    assert (str(again), again.param) == ("words", "p")


def test_the_launch_line_gives_the_config_back() -> None:
    config = EngineConfig.from_knobs(model="dir with \n newline", num_blocks=7, use_prefix_caching=False)
    line = msgspec.json.encode(Launch(endpoints=["ipc:///x"], config=config, log_level="info"))
    assert b"\n" not in line
    assert read_orders(line, Launch).config == config


def test_orders_that_cannot_be_read_are_an_error_that_names_the_field_and_no_secret() -> None:
    launch = NodeLaunch(config=EngineConfig(), log_level="info", token="a secret")
    line = msgspec.json.encode(launch)
    assert read_orders(line, NodeLaunch) == launch
    for old, new, problem in (
        (
            b'"block_size":16',
            b'"block_size":"x"',
            r"Expected `int`, got `str` - at `\$.config.cache.block_size`",
        ),
        (b'"log_level"', b'"level"', "unknown field `level`"),
        (b'"token":"a secret"', b'"token":null', r"Expected `str`, got `null` - at `\$.token`"),
        (b"}", b"", "truncated"),
    ):
        with pytest.raises(
            EngineError, match=rf"bytes of orders are not a NodeLaunch: .*{problem}"
        ) as caught:
            read_orders(line.replace(old, new), NodeLaunch)
        assert "secret" not in str(caught.value)
