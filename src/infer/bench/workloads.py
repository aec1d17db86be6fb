"""Workloads as data: requests and their times. The same seed gives the same workload on every machine.

    Workload
    ├── arrival     closed: n clients, each sends its next request when it has its answer
    │               open:   requests arrive at their own times, whether or not the server keeps up
    └── sessions    each starts at a time, and has one turn or several
        └── turns   the text added to the prompt, and the number of tokens to generate

A single request is a session of one turn. In a longer session the prompt of a turn contains everything before
it, including the answers: that is how agents and chats grow, and what a prefix cache is for.

In a closed loop the server sets the pace, so latency stays flat and throughput shows its speed. In an open
loop a server that is too slow builds up a queue, and the time to the first token shows it. Neither replaces
the other, and a figure means nothing without the kind of its loop.

A prompt is token ids, exact in length on every model, or words in chats, since chats have no ids.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infer.errors import ConfigError, closest

DEFAULT_VOCAB = 10_000  # ids that nearly every vocabulary has
FIRST_ID = 10  # ids below it are special tokens in many vocabularies

# One token each in most vocabularies.
_COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my
now over such our man me even most made after also did many off before must well back through years much
"""
WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The arrival process of sessions."""

    kind: Literal["closed", "open"]
    concurrency: int = 0  # concurrent sessions; 0: all of them (closed), no limit (open)
    rate: float = 0.0  # open: sessions per second, as a Poisson process; 0: all at once

    def describe(self) -> str:
        """Return the arrival process in words."""
        if self.kind == "closed":
            return f"closed loop, {self.concurrency or 'all'} at once"
        limit = f", at most {self.concurrency} at once" if self.concurrency else ""
        return (
            f"open loop, {self.rate:g} per second (Poisson){limit}" if self.rate else "open loop, all at once"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The text that one turn adds to its session's prompt: token ids, or words of a chat."""

    max_tokens: int
    ids: Sequence[int] = ()
    text: str = ""

    @property
    def prompt_len(self) -> int:
        """The number of tokens, or for text the number of words, which is about the same."""
        return len(self.ids) or len(self.text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client's requests, each after the answer to the one before."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0  # seconds from the beginning; used in open loops only
    system: str = ""  # system prompt of a chat
    priority: int = 0  # smaller is more urgent; for engines, not for servers
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests of the clients, independent of the server."""

    name: str
    about: str
    arrival: Arrival
    sessions: tuple[Session, ...]
    is_chat: bool = False

    @classmethod
    def of(cls, name: str, turns: Iterable[Turn], *, concurrency: int = 0) -> Workload:
        """Return a request for each turn, all at once or in a closed loop of `concurrency` clients."""
        arrival = Arrival(kind="closed" if concurrency else "open", concurrency=concurrency)
        return cls(
            name=name, about="", arrival=arrival, sessions=tuple(Session(turns=(turn,)) for turn in turns)
        )

    def change(self, turn: Callable[[Turn], Turn], system: Callable[[str], str] = str) -> Workload:
        """Return the same workload with every turn and every system prompt changed."""
        sessions = (
            replace(session, system=system(session.system), turns=tuple(map(turn, session.turns)))
            for session in self.sessions
        )
        return replace(self, sessions=tuple(sessions))

    @property
    def num_requests(self) -> int:
        """The number of turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens that are requested."""
        return sum(turn.max_tokens for session in self.sessions for turn in session.turns)

    @property
    def longest(self) -> int:
        """The final length of the longest session, in tokens; approximate for a chat."""
        return max(
            len(session.system.split()) + sum(turn.prompt_len + turn.max_tokens for turn in session.turns)
            for session in self.sessions
        )


class _Draw:
    """Draws prompts and arrivals from one seed."""

    def __init__(self, name: str, seed: int, vocab_size: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self._vocab_size = vocab_size
        self._now = 0.0

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(FIRST_ID, self._vocab_size) for _ in range(count))

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    def request(self, prompt: tuple[int, ...], max_tokens: int, rate: float = 0.0) -> Session:
        """Return a session of one turn; with a rate, it starts a random time after the previous one."""
        if rate:
            self._now += self.rng.expovariate(rate)
        return Session(turns=(Turn(ids=prompt, max_tokens=max_tokens),), start_s=self._now)

    def chat(self, system: str, num_turns: int, low: int, high: int, max_tokens: int) -> Session:
        """Return a chat whose turns have `low` to `high` words each."""
        turns = tuple(
            Turn(text=self.words(self.rng.randint(low, high)), max_tokens=max_tokens)
            for _ in range(num_turns)
        )
        return Session(system=system, turns=turns)


def _closed(concurrency: int) -> Arrival:
    return Arrival(kind="closed", concurrency=concurrency)


def _poisson(rate: float) -> Arrival:
    return Arrival(kind="open", rate=rate)


AT_ONCE = Arrival(kind="open")
Load = tuple[str, Arrival, Iterable[Session]]  # description, arrival process, sessions


def _baseline(draw: _Draw, variant: str) -> Load:
    sessions = (draw.request(draw.ids(128), 48) for _ in range(10))
    return "10 requests, one after the other", _closed(1), sessions


def _continuous_batching(draw: _Draw, variant: str) -> Load:
    about = "32 requests of mixed lengths at 4 per second: what is done leaves, what comes joins"
    lengths, rng = (16, 24, 64, 96), draw.rng
    sessions = (draw.request(draw.ids(rng.randint(32, 192)), rng.choice(lengths), 4.0) for _ in range(32))
    return about, _poisson(4.0), sessions


def _paged_attention(draw: _Draw, variant: str) -> Load:
    rng = draw.rng
    sessions = (draw.request(draw.ids(rng.randint(16, 384)), rng.randint(16, 64)) for _ in range(48))
    return "48 requests at once: memory is the limit", AT_ONCE, sessions


def _chunked_prefill(draw: _Draw, variant: str) -> Load:
    about = "48 requests at 6 per second, 75 % with long prompts: do short answers stall behind them?"

    def request(is_long: bool) -> Session:
        length = draw.rng.randint(512, 1024) if is_long else draw.rng.randint(16, 64)
        return draw.request(draw.ids(length), 16 if is_long else 64, 6.0)

    return about, _poisson(6.0), (request(number % 4 != 3) for number in range(48))


def _prefix_caching(draw: _Draw, variant: str) -> Load:
    about = "48 requests at 8 per second that share their first 1024 tokens"
    shared, rng = draw.ids(1024), draw.rng
    sessions = (draw.request(shared + draw.ids(rng.randint(8, 48)), 24, 8.0) for _ in range(48))
    return about, _poisson(8.0), sessions


def _w1_single(draw: _Draw, variant: str) -> Load:
    return "one request, 256 in, 256 out", _closed(1), (draw.request(draw.ids(256), 256),)


def _w2_mixed(draw: _Draw, variant: str) -> Load:
    count, rng = int(variant), draw.rng
    about = f"{count} at once, prompts of 32 to 1024 tokens, outputs of 64 to 256"
    sessions = (draw.request(draw.ids(rng.randint(32, 1024)), rng.randint(64, 256)) for _ in range(count))
    return about, _closed(count), sessions


def _w3_shared_prefix(draw: _Draw, variant: str) -> Load:
    count, system = int(variant), draw.words(512)
    sessions = (draw.chat(system, 1, 16, 64, 64) for _ in range(count))
    return f"{count} chats at once with one system prompt", _closed(count), sessions


# preset: (sessions, turns, words of the system prompt, words of a turn, output tokens)
AGENTS = {"short": (2, 4, 256, 64, 32), "mid": (8, 8, 1024, 192, 96), "long": (16, 16, 2048, 512, 192)}
CHATS = {"short": (8, 2, 64, 24, 40), "mid": (32, 4, 256, 64, 128), "long": (64, 8, 512, 128, 256)}


def _agent_session(draw: _Draw, variant: str) -> Load:
    count, num_turns, system_len, turn_len, max_tokens = AGENTS[variant]
    about = f"{count} agents of {num_turns} turns: the whole history again with every turn"
    draw.words(system_len)  # drawn and discarded, so that later draws stay the same
    sessions = []
    for _ in range(count):
        session = draw.chat("", num_turns, turn_len // 2, turn_len, max_tokens)
        sessions.append(replace(session, system=draw.words(system_len)))
    return about, Arrival(kind="closed"), sessions


def _chat_serving(draw: _Draw, variant: str) -> Load:
    count, num_turns, system_len, turn_len, max_tokens = CHATS[variant]
    rate, now, sessions = 2.0, 0.0, []
    about = f"{count} chats of {num_turns} turns, {rate:g} new ones per second, one system prompt"
    system = draw.words(system_len)
    chats = [draw.chat(system, num_turns, turn_len // 2, turn_len, max_tokens) for _ in range(count)]
    for session in chats:
        now += draw.rng.expovariate(rate)
        sessions.append(replace(session, start_s=now))
    return about, _poisson(rate), sessions


RANDOM = "random"  # the workload that flags describe
PRESETS = ("short", "mid", "long")
COUNTS = ("16", "64")

# name: (function that draws it, variants); the first variant is the default
SERVING: dict[str, tuple[Callable[[_Draw, str], Load], tuple[str, ...]]] = {
    "baseline": (_baseline, ()),
    "continuous_batching": (_continuous_batching, ()),
    "paged_attention": (_paged_attention, ()),
    "chunked_prefill": (_chunked_prefill, ()),
    "prefix_caching": (_prefix_caching, ()),
    "w1_single": (_w1_single, ()),
    "w2_mixed": (_w2_mixed, COUNTS),
    "w3_shared_prefix": (_w3_shared_prefix, COUNTS),
    "agent_session": (_agent_session, PRESETS),
    "chat_serving": (_chat_serving, PRESETS),
}
CHAT = ("w3_shared_prefix", "agent_session", "chat_serving")  # words over the chat endpoint

# Offline throughput: request lists that other engines are timed on too: (description, requests, tokens in,
# tokens out, seed), with a draw from each range for every request. Reordering the draws changes the workload.
OFFLINE: dict[str, tuple[str, int, tuple[int, int], tuple[int, int], int]] = {
    "nano256": ("256 requests, 100 to 1024 tokens in and out", 256, (100, 1024), (100, 1024), 0),
    "b1_256_256": ("1 request, 256 in, 256 out", 1, (256, 256), (256, 256), 1),
    "b8_256_256": ("8 requests, 256 in, 256 out", 8, (256, 256), (256, 256), 1),
    "b32_256_256": ("32 requests, 256 in, 256 out", 32, (256, 256), (256, 256), 1),
    "b128_256_256": ("128 requests, 256 in, 256 out", 128, (256, 256), (256, 256), 1),
    "prefill_8x4096": ("8 prompts of 4096, one token out", 8, (4096, 4096), (1, 1), 1),
}


def _list(name: str) -> Load:
    about, count, inputs, outputs, seed = OFFLINE[name]
    rng = random.Random(seed)

    def between(low: int, high: int) -> int:
        return low if low == high else rng.randint(low, high)

    def request() -> Session:
        ids = tuple(rng.randint(0, DEFAULT_VOCAB) for _ in range(between(*inputs)))
        return Session(turns=(Turn(ids=ids, max_tokens=between(*outputs)),))

    return about, AT_ONCE, (request() for _ in range(count))


def make_workload(name: str, *, seed: int = 42, vocab_size: int = DEFAULT_VOCAB) -> Workload:
    """Return the workload called `name` or `name:variant`, such as `w2_mixed:64` or `chat_serving:mid`.

    Workloads of OFFLINE ignore the seed and the vocabulary: all engines are measured on the same requests.
    """
    base, colon, variant = name.partition(":")
    if base in OFFLINE and not colon:
        about, arrival, sessions = _list(base)
    elif base not in SERVING:
        known = [*SERVING, *OFFLINE]
        raise ConfigError(f"unknown workload {base!r}{closest(base, known, listed='known')}")
    elif vocab_size <= FIRST_ID:
        raise ConfigError(f"a vocabulary must have more than {FIRST_ID} tokens, got {vocab_size}")
    else:
        load, variants = SERVING[base]
        if colon and variant not in variants:
            allowed = ", ".join(f"{base}:{known}" for known in variants) or base
            raise ConfigError(f"workload {base} has no variant {variant!r}; give {allowed}")
        first = variants[0] if variants else ""
        about, arrival, sessions = load(_Draw(base, seed, vocab_size), variant or first)
    return Workload(name=name, about=about, arrival=arrival, sessions=tuple(sessions), is_chat=base in CHAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """The sizes of the workload RANDOM, with the defaults of `vllm bench serve`."""

    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    request_rate: float = math.inf  # requests per second, as a Poisson process; inf: all at once
    max_concurrency: int = 0  # 0: no limit


def random_workload(load: RandomLoad, *, seed: int = 42, vocab_size: int = DEFAULT_VOCAB) -> Workload:
    """Return requests of one size, whose prompts have nothing in common."""
    draw = _Draw(RANDOM, seed, vocab_size)
    rate = 0.0 if math.isinf(load.request_rate) else load.request_rate
    kind: Literal["closed", "open"] = "open" if rate or not load.max_concurrency else "closed"
    sizes = f"{load.input_len} in, {load.output_len} out"
    sessions = tuple(
        draw.request(draw.ids(load.input_len), load.output_len, rate) for _ in range(load.num_prompts)
    )
    return Workload(
        name=RANDOM,
        about=f"{load.num_prompts} random prompts, {sizes}",
        arrival=Arrival(kind=kind, rate=rate, concurrency=load.max_concurrency),
        sessions=sessions,
    )


def read_names(text: str, *, group: str) -> list[str]:
    """Return comma-separated names; `all` is every workload of the group, `peer` every one of OFFLINE."""
    if text in ("all", "peer"):
        return list(SERVING if text == "all" and group == "serving" else OFFLINE)
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


# -- the same workload for another model, or another repeat ----------------------------------------------


def fit(workload: Workload, *, context_len: int, vocab_size: int | None = None) -> Workload:
    """Return the workload for a model that is too small for it: shorter in proportion, ids in range."""
    scale = min(1.0, context_len / workload.longest)
    if workload.is_chat and scale < 1:
        scale *= 0.25  # a word may be several tokens of a small vocabulary, and a template adds its own
    folds = vocab_size is not None and any(
        max(turn.ids, default=0) >= vocab_size for session in workload.sessions for turn in session.turns
    )
    if scale == 1 and not folds:
        return workload

    def shrink(turn: Turn) -> Turn:
        ids = turn.ids[: max(1, int(len(turn.ids) * scale))] if turn.ids else ()
        if vocab_size is not None:
            ids = tuple(FIRST_ID + token_id % (vocab_size - FIRST_ID) for token_id in ids)
        words = turn.text.split()
        return Turn(
            ids=ids,
            text=" ".join(words[: max(1, int(len(words) * scale))]),
            max_tokens=max(1, int(turn.max_tokens * scale)),
        )

    def shorten(system: str) -> str:
        words = system.split()
        return " ".join(words[: int(len(words) * scale)])

    said = f"; shortened to {scale:.0%} for a context of {context_len}" if scale < 1 else ""
    return replace(workload.change(shrink, shorten), about=workload.about + said)


def shortened(whole: Iterable[Workload], fitted: Iterable[Workload]) -> list[str]:
    """Return a line for each workload that `fit` has made shorter."""
    return [
        f"{before.name} is shortened: a request of up to {before.longest} tokens does not fit the context; "
        f"it now has up to {after.longest}, prompt and output in proportion"
        for before, after in zip(whole, fitted, strict=True)
        if after.longest < before.longest
    ]


def vary(workload: Workload, repeat: int, vocab_size: int = DEFAULT_VOCAB) -> Workload:
    """Return the same lengths and times with other tokens, so that repeats do not hit the prefix cache.

    Equal tokens stay equal, so prefixes that are shared within the workload stay shared.
    """
    if repeat == 0:
        return workload
    size = vocab_size - FIRST_ID
    shift = 37 * repeat % len(WORDS)
    other_word = dict(zip(WORDS, WORDS[shift:] + WORDS[:shift], strict=True))

    def change(text: str) -> str:
        return " ".join(other_word.get(word, word) for word in text.split(" "))

    def other(turn: Turn) -> Turn:
        ids = tuple(FIRST_ID + (token_id - FIRST_ID + 7919 * repeat) % size for token_id in turn.ids)
        return replace(turn, ids=ids, text=change(turn.text))

    return workload.change(other, change)
