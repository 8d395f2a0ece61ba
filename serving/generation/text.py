"""From tokens to text as it comes: whole characters only, and nothing that may still turn out to be a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, token: int) -> bytes:
        """The bytes of one token; those of a text one after the other are the text in UTF-8."""
        ...


class ByteVocabulary:
    """Each byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token: int) -> bytes:
        return bytes((token,))


class TextStream:
    """The text of one answer.

    Args:
        stops: texts that end it; the answer ends before the first of them.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False
        """Whether a stop text has come."""

    def feed(self, data: bytes) -> str:
        """Take the bytes of the next token; returns the text that is certain to be part of the answer."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest of the answer, which goes no further."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)], ""
            return released
        keep = max((_beginning(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released


def _beginning(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
