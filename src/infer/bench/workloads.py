"""Workloads as data: who asks what, and when. The same seed gives the same workload on every machine.

    Workload
    ├── arrival     closed: so many clients, each asks again when it has its answer
    │               open:   requests come at their own times, whether or not the server keeps up
    └── sessions    each starts at a time, and is one turn or several
        └── turns   what is added to the prompt, and how many tokens to make of it

A request is a session of one turn. In a longer session the prompt of a turn holds everything before it,
the answers too: that is how agents and chats grow, and what a prefix cache is for.

Under a closed loop the server sets the pace, so latency stays flat and throughput tells; under an open
loop a server that is too slow builds a queue, and the time to the first token shows it. Neither replaces
the other, and a figure without its loop means nothing.

A prompt is token ids, exact in length on every model; or, in chats, words, since a chat has no ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infer.errors import ConfigError, closest

DEFAULT_VOCAB = 10_000  # ids that nearly every vocabulary has
FIRST_ID = 10  # below are special tokens, in many vocabularies

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
    """When sessions start."""

    kind: Literal["closed", "open"]
    concurrency: int = 0  # closed: sessions at once; 0: all of them
    rate: float = 0.0  # open: sessions per second, as a Poisson process; 0: all at once

    def describe(self) -> str:
        """In words."""
        if self.kind == "closed":
            return f"closed loop, {self.concurrency or 'all'} at once"
        return f"open loop, {self.rate:g} per second (Poisson)" if self.rate else "open loop, all at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn adds to its session's prompt: token ids, or words of a chat."""

    max_tokens: int
    ids: Sequence[int] = ()
    text: str = ""

    @property
    def prompt_len(self) -> int:
        """Tokens; of text, about as many as there are words."""
        return len(self.ids) or len(self.text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client's requests, each after the answer to the one before."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0  # from the beginning; read in open loops only
    system: str = ""  # in front of a chat
    priority: int = 0  # smaller is more urgent; for engines, not for servers
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything a client has to do, and nothing about who answers."""

    name: str
    about: str
    arrival: Arrival
    sessions: tuple[Session, ...]
    is_chat: bool = False

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def num_output_tokens(self) -> int:
        """Tokens asked for."""
        return sum(turn.max_tokens for session in self.sessions for turn in session.turns)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the first turns bring; later ones repeat what came before."""
        return sum(session.turns[0].prompt_len for session in self.sessions)

    @property
    def longest(self) -> int:
        """Tokens of the longest session at its end; of a chat, about so many."""
        return max(
            len(session.system.split()) + sum(turn.prompt_len + turn.max_tokens for turn in session.turns)
            for session in self.sessions
        )


class _Maker:
    """Draws prompts and arrivals from one seed."""

    def __init__(self, name: str, seed: int, vocab_size: int) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self._vocab_size = vocab_size
        self._now = 0.0

    def ids(self, count: int) -> tuple[int, ...]:
        rng = self.rng
        return tuple(rng.randrange(FIRST_ID, self._vocab_size) for _ in range(count))

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    def request(self, prompt: tuple[int, ...], max_tokens: int, rate: float = 0.0) -> Session:
        """A session of one turn; with a rate it starts some time after the one before."""
        if rate:
            self._now += self.rng.expovariate(rate)
        return Session(turns=(Turn(ids=prompt, max_tokens=max_tokens),), start_s=self._now)


CLOSED_ONE = Arrival(kind="closed", concurrency=1)
AT_ONCE = Arrival(kind="open")


def _baseline(make: _Maker, variant: str) -> Workload:
    sessions = tuple(make.request(make.ids(128), 48) for _ in range(10))
    return Workload(name="", about="10 requests, one after the other", arrival=CLOSED_ONE, sessions=sessions)


def _continuous_batching(make: _Maker, variant: str) -> Workload:
    rng = make.rng
    sessions = tuple(
        make.request(make.ids(rng.randint(32, 192)), rng.choice((16, 24, 64, 96)), rate=4.0)
        for _ in range(32)
    )
    about = "32 requests of mixed lengths at 4 per second: who is done leaves, who comes joins"
    return Workload(name="", about=about, arrival=Arrival(kind="open", rate=4.0), sessions=sessions)


def _paged_attention(make: _Maker, variant: str) -> Workload:
    rng = make.rng
    sessions = tuple(make.request(make.ids(rng.randint(16, 384)), rng.randint(16, 64)) for _ in range(48))
    return Workload(
        name="", about="48 requests at once: memory is the limit", arrival=AT_ONCE, sessions=sessions
    )


def _chunked_prefill(make: _Maker, variant: str) -> Workload:
    rng = make.rng
    sessions = []
    for number in range(48):
        is_long = number % 4 != 3  # exactly three quarters, spread evenly
        length = rng.randint(512, 1024) if is_long else rng.randint(16, 64)
        sessions.append(make.request(make.ids(length), 16 if is_long else 64, rate=6.0))
    about = "48 requests at 6 per second, 75 % with long prompts: do short answers stall behind them?"
    return Workload(name="", about=about, arrival=Arrival(kind="open", rate=6.0), sessions=tuple(sessions))


def _prefix_caching(make: _Maker, variant: str) -> Workload:
    shared = make.ids(1024)
    sessions = tuple(
        make.request(shared + make.ids(make.rng.randint(8, 48)), 24, rate=8.0) for _ in range(48)
    )
    about = "48 requests at 8 per second that share their first 1024 tokens"
    return Workload(name="", about=about, arrival=Arrival(kind="open", rate=8.0), sessions=sessions)


def _w1_single(make: _Maker, variant: str) -> Workload:
    sessions = (make.request(make.ids(256), 256),)
    return Workload(name="", about="one request, 256 in, 256 out", arrival=CLOSED_ONE, sessions=sessions)


def _w2_mixed(make: _Maker, variant: str) -> Workload:
    count, rng = int(variant), make.rng
    sessions = tuple(
        make.request(make.ids(rng.randint(32, 1024)), rng.randint(64, 256)) for _ in range(count)
    )
    about = f"{count} at once, prompts of 32 to 1024 tokens, outputs of 64 to 256"
    arrival = Arrival(kind="closed", concurrency=count)
    return Workload(name="", about=about, arrival=arrival, sessions=sessions)


def _w3_shared_prefix(make: _Maker, variant: str) -> Workload:
    count = int(variant)
    system = make.words(512)
    sessions = tuple(
        Session(system=system, turns=(Turn(text=make.words(make.rng.randint(16, 64)), max_tokens=64),))
        for _ in range(count)
    )
    return Workload(
        name="",
        about=f"{count} chats at once with one system prompt",
        arrival=Arrival(kind="closed", concurrency=count),
        sessions=sessions,
        is_chat=True,
    )


# preset: (sessions, turns, words of the system prompt, words of a turn, output tokens)
AGENTS = {"short": (2, 4, 256, 64, 32), "mid": (8, 8, 1024, 192, 96), "long": (16, 16, 2048, 512, 192)}
CHATS = {"short": (8, 2, 64, 24, 40), "mid": (32, 4, 256, 64, 128), "long": (64, 8, 512, 128, 256)}


def _grow(
    make: _Maker, preset: tuple[int, int, int, int, int], *, shares_system: bool
) -> tuple[Session, ...]:
    """Sessions whose prompts grow with every turn."""
    count, num_turns, system_len, turn_len, max_tokens = preset
    shared = make.words(system_len)
    sessions = []
    for _ in range(count):
        turns = tuple(
            Turn(text=make.words(make.rng.randint(turn_len // 2, turn_len)), max_tokens=max_tokens)
            for _ in range(num_turns)
        )
        sessions.append(Session(system=shared if shares_system else make.words(system_len), turns=turns))
    return tuple(sessions)


def _agent_session(make: _Maker, variant: str) -> Workload:
    preset = AGENTS[variant]
    return Workload(
        name="",
        about=f"{preset[0]} agents of {preset[1]} turns: the whole history again with every turn",
        arrival=Arrival(kind="closed"),
        sessions=_grow(make, preset, shares_system=False),
        is_chat=True,
    )


def _chat_serving(make: _Maker, variant: str) -> Workload:
    preset = CHATS[variant]
    rate = 2.0
    sessions, now = [], 0.0
    for session in _grow(make, preset, shares_system=True):
        now += make.rng.expovariate(rate)
        sessions.append(replace(session, start_s=now))
    return Workload(
        name="",
        about=f"{preset[0]} chats of {preset[1]} turns, {rate:g} new ones per second, one system prompt",
        arrival=Arrival(kind="open", rate=rate),
        sessions=tuple(sessions),
        is_chat=True,
    )


PRESETS = ("short", "mid", "long")
COUNTS = ("16", "64")

# name: (maker, variants; the first is meant where none is named)
SERVING: dict[str, tuple[Callable[[_Maker, str], Workload], tuple[str, ...]]] = {
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


# -- offline throughput, the lists that other engines are timed on as well ----------------------------


def _nano(vocab: int = DEFAULT_VOCAB) -> list[tuple[list[int], int]]:
    """256 requests, 100 to 1024 tokens in and out; the order of the draws is part of the workload."""
    rng = random.Random(0)
    made = []
    for _ in range(256):
        prompt = [rng.randint(0, vocab) for _ in range(rng.randint(100, 1024))]
        made.append((prompt, rng.randint(100, 1024)))
    return made


def _fixed(
    count: int, prompt_len: int, output_len: int, vocab: int = DEFAULT_VOCAB
) -> list[tuple[list[int], int]]:
    rng = random.Random(1)
    return [([rng.randint(0, vocab) for _ in range(prompt_len)], output_len) for _ in range(count)]


OFFLINE: dict[str, tuple[str, Callable[[], list[tuple[list[int], int]]]]] = {
    "nano256": ("256 requests, 100 to 1024 tokens in and out", _nano),
    "b1_256_256": ("1 request, 256 in, 256 out", lambda: _fixed(1, 256, 256)),
    "b8_256_256": ("8 requests, 256 in, 256 out", lambda: _fixed(8, 256, 256)),
    "b32_256_256": ("32 requests, 256 in, 256 out", lambda: _fixed(32, 256, 256)),
    "b128_256_256": ("128 requests, 256 in, 256 out", lambda: _fixed(128, 256, 256)),
    "prefill_8x4096": ("8 prompts of 4096, one token out", lambda: _fixed(8, 4096, 1)),
}


def make_workload(name: str, *, seed: int = 42, vocab_size: int = DEFAULT_VOCAB) -> Workload:
    """The workload called `name` or `name:variant`, such as `w2_mixed:64` or `chat_serving:mid`.

    Those of OFFLINE are the same whatever the seed and the vocabulary, as everybody's figures are of them.
    """
    base, colon, variant = name.partition(":")
    if base in OFFLINE and not colon:
        about, requests = OFFLINE[base]
        sessions = tuple(
            Session(turns=(Turn(ids=tuple(prompt), max_tokens=length),)) for prompt, length in requests()
        )
        return Workload(name=base, about=about, arrival=AT_ONCE, sessions=sessions)
    if base not in SERVING:
        known = [*SERVING, *OFFLINE]
        raise ConfigError(f"unknown workload {base!r}{closest(base, known, listed='known')}")
    if vocab_size <= FIRST_ID:
        raise ConfigError(f"a vocabulary must have more than {FIRST_ID} tokens, got {vocab_size}")
    make, variants = SERVING[base]
    if colon and variant not in variants:
        allowed = ", ".join(f"{base}:{known}" for known in variants) or base
        raise ConfigError(f"workload {base} has no variant {variant!r}; give {allowed}")
    variant = variant or (variants[0] if variants else "")
    return replace(make(_Maker(base, seed, vocab_size), variant), name=name)


def read_names(text: str, *, group: str) -> list[str]:
    """Names with commas between, or all: `all` is every workload of the group, `peer` those of OFFLINE."""
    if text == "all":
        return list(SERVING if group == "serving" else OFFLINE)
    if text == "peer":
        return list(OFFLINE)
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
