"""Streaming conversion of tokens to text: only whole characters, and nothing that may still become a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """A conversion of text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, token: int) -> bytes:
        """Return the bytes of one token; those of a text, joined, are the text in UTF-8."""
        ...


class ByteVocabulary:
    """A vocabulary in which each byte of UTF-8 is a token."""

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
        """True if a stop text has come."""

    def feed(self, data: bytes) -> str:
        """Take the bytes of the next token; return the text that is certain to be part of the answer."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """End the answer, and return the rest of its text."""
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
    """Return the largest number of last characters of `text` that are the first of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
