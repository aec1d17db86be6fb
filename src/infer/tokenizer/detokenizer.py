"""Turn token ids that arrive one by one into text that is safe to show.

A token may end in the middle of a character, and text may be the beginning of a stop string. Only these two
are held back, until more tokens arrive:

    ids    ──►  bytes  ──►  whole characters  ──►  text before the first stop string
            Tokenizer    incremental UTF-8        `_StopSearch`

Because a text *is* the UTF-8 of its tokens' bytes, the invariant is simple. It is tested with random ids,
random splits and random stop strings:

    "".join(pushes) + finish()  ==  tokenizer.decode(all ids), cut at the first stop string

The first stop string is the one that begins earliest; if several begin there, the longest.
So with the stop strings "abcd" and "bc" the text "abc" is still undecided, because a "d" may follow.

Each pushed byte and each character is processed once per stop string, however long the text gets.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from infer.errors import RequestError
from infer.tokenizer.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """The text of one sequence. Not thread-safe: only the sequence's reader uses it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Start a new text, or one that continues `prompt_ids`; special tokens in `shown` appear as text.

        Sentencepiece vocabularies drop the first space of a text. A continuation keeps it, unless the
        prompt ends in a special token: then, as after BOS, the vocabulary added the space.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._spell = self._shown_bytes_of if shown else self._bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._search = _StopSearch(stop) if stop else None
        is_continuation = bool(prompt_ids) and prompt_ids[-1] not in tokenizer.special_ids
        self._num_to_strip = 0 if is_continuation else tokenizer.num_stripped
        self._utf8.decode(self._tail_of(prompt_ids))  # a prompt may end in the middle of a character

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, once it is certain."""
        return self._search.hit if self._search else None

    def look_for(self, stop: Sequence[str]) -> str:
        """Replace the stop strings; return text that was held back because of the old ones.

        Text that was already shown is not searched again.
        """
        held = self._search.finish() if self._search is not None else ""
        if self.stopped is None:
            self._search = _StopSearch(stop) if stop else None
        return held

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that can now be shown. After a stop string: nothing."""
        if self._search is not None and self._search.hit is not None:
            return ""
        data = b"".join(map(self._spell, ids))
        while self._num_to_strip and data:
            self._num_to_strip = self._num_to_strip - 1 if data[:1] == b" " else 0
            data = data[1:] if data[:1] == b" " else data
        return self._show(self._utf8.decode(data))

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for padding rows, which the tokenizer does not know."""
        tokenizer = self._tokenizer
        return tokenizer.visible_bytes(token_id) if token_id < tokenizer.vocab_size else b""

    def _shown_bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if token_id in self._shown else self._bytes_of(token_id)

    def breaks_off(self, token_id: int) -> bool:
        """Return True if this token cannot continue the unfinished character, which then becomes U+FFFD."""
        begun, _ = self._utf8.getstate()
        if not begun or not 0 <= token_id < self._tokenizer.vocab_size:
            return False
        data = self._tokenizer.visible_bytes(token_id)
        try:
            codecs.utf_8_decode(begun + data[:1], "strict", False)
        except UnicodeDecodeError:
            return True
        return False

    def finish(self) -> str:
        """End the sequence; return the text that was held back."""
        if self.stopped is not None:
            return ""
        text = self._show(self._utf8.decode(b"", final=True))
        return text + self._search.finish() if self._search else text

    def _show(self, text: str) -> str:
        return self._search.push(text) if self._search else text

    def _tail_of(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the last bytes of the prompt, enough for any unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= _LONGEST_CHARACTER:
                break
            if 0 <= token_id < self._tokenizer.vocab_size:
                tail = self._tokenizer.visible_bytes(token_id) + tail
        return tail


class _StopSearch:
    """Finds the first stop string in a text that arrives in pieces, and holds back possible matches."""

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError.about("stop", f"must hold non-empty strings, got {stop!r}")
        self.hit: str | None = None
        self._trackers = [_Tracker(stop) for stop in dict.fromkeys(stops)]
        self._held = ""  # text that is not shown yet
        self._num_shown = 0
        self._num_seen = 0
        self._found: tuple[int, int, str] | None = None  # (start, -length, stop); the smallest wins

    def push(self, text: str) -> str:
        self._held += text
        for char in text:
            self._num_seen += 1
            for tracker in self._trackers:
                if tracker.advance(char):
                    length = len(tracker.stop)
                    found = (self._num_seen - length, -length, tracker.stop)
                    self._found = min(found, self._found) if self._found else found
            if self._found and self._first_open() > self._found[0]:
                return self._end()
        safe = self._first_open()
        return self._show(min(safe, self._found[0]) if self._found else safe)

    def finish(self) -> str:
        return self._end() if self._found else self._show(self._num_seen)

    def _first_open(self) -> int:
        """Return the start of the earliest stop string that later text may complete."""
        return self._num_seen - max(tracker.num_matched for tracker in self._trackers)

    def _end(self) -> str:
        assert self._found is not None
        start, _, self.hit = self._found
        return self._show(start)

    def _show(self, end: int) -> str:
        count = end - self._num_shown
        shown, self._held = self._held[:count], self._held[count:]
        self._num_shown = end
        return shown


class _Tracker:
    """Tracks how much of one stop string the text ends with: the Knuth-Morris-Pratt automaton."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # length of the longest proper prefix of `stop` that the text ends with
        self._fallback = [0]  # _fallback[i]: the longest proper prefix of stop that also ends stop[:i+1]
        matched = 0
        for char in stop[1:]:
            while matched and stop[matched] != char:
                matched = self._fallback[matched - 1]
            matched += stop[matched] == char
            self._fallback.append(matched)

    def advance(self, char: str) -> bool:
        """Add a character; return True if it completes the stop string."""
        matched = self.num_matched
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        matched += self.stop[matched] == char
        is_complete = matched == len(self.stop)
        self.num_matched = self._fallback[-1] if is_complete else matched
        return is_complete
