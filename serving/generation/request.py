"""One request as the engine keeps it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


class Request:
    """A prompt, what was generated, and where its keys and values are.

    A model sees `context` tokens, and an answer may go on beyond: then it sees the last ones, from a place that moves
    by half a context at a time. Where it begins depends on how many tokens there are and on nothing else.

    Args:
        prompt: tokens, at least one.
        sampling: how to go on.
        context: tokens that the model looks back at, at most.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, context: int, number: int, priority: int = 0) -> None:
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.sampling = sampling
        self.number = number
        self.priority = priority
        self.blocks: list[int] = []
        self.num_cached = 0
        """Tokens from `start` whose keys and values are there."""
        self.start = 0
        """The first token that the model sees."""
        self.num_read = self.num_prompt
        """Tokens up to here are read in blocks, never one at a time: how does not depend on what else is in a step."""
        self.text = TextStream(sampling.stop)
        self.finish_reason: FinishReason | None = None
        self._context = context
        self._stride = max(1, context // 2)
        self._draws: random.Random = sampling.draws()
        self.look_back()

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_seen(self) -> int:
        """Tokens that the model is to see for the next one."""
        return len(self.tokens) - self.start

    @property
    def most_cached(self) -> int:
        """Tokens whose keys and values are there at once, at most: those of the last one are not needed."""
        if len(self.tokens) > self._context:
            return self._context
        return min(self._context, self.num_prompt + self.sampling.max_tokens - 1)

    def look_back(self) -> bool:
        """Move to where the model begins to see, given how many tokens there are; returns whether that moved.

        What was cached is of no use then: every token's keys and values depend on its place.
        """
        beyond = len(self.tokens) - self._context
        start = -(-beyond // self._stride) * self._stride if beyond > 0 else 0
        moved = start != self.start
        if moved:
            self.start, self.num_cached, self.num_read = start, 0, len(self.tokens)
        return moved

    def next_uniform(self) -> float:
        """The random number that decides the next token."""
        return self._draws.random() if self.sampling.temperature > 0 else 0.0
