"""One request in the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.text import TextStream

FinishReason = Literal["stop", "length", "cancelled"]


class Request:
    """A prompt, its generated tokens, and its blocks of keys and values.

    A model sees `context` tokens, and an answer may go on beyond that. The model then sees the last tokens, from a
    start that moves by half a context at a time. The start depends only on the number of tokens.

    Args:
        prompt: tokens, at least one.
        sampling: choice of the next tokens.
        context: largest number of tokens that the model looks back at.
        number: position in the order of arrival.
        priority: higher goes first.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, context: int, number: int, priority: int = 0) -> None:
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.sampling = sampling
        self.number = number
        self.priority = priority
        self.blocks: list[int] = []
        self.num_cached = 0
        """Number of tokens from `start` whose keys and values are cached."""
        self.start = 0
        """Index of the first token that the model sees."""
        self.num_read = self.num_prompt
        """Number of tokens that are read in blocks, never singly, whatever else a step has: so results do not vary."""
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
        """Number of tokens that the model must see for the next one."""
        return len(self.tokens) - self.start

    @property
    def most_cached(self) -> int:
        """Largest number of tokens whose keys and values are cached at once; those of the last token are not needed."""
        if len(self.tokens) > self._context:
            return self._context
        return min(self._context, self.num_prompt + self.sampling.max_tokens - 1)

    def look_back(self) -> bool:
        """Move the start to where the model begins to see, given the number of tokens; return True if it moved.

        Cached keys and values are then useless, as they depend on the position of their token.
        """
        beyond = len(self.tokens) - self._context
        start = -(-beyond // self._stride) * self._stride if beyond > 0 else 0
        moved = start != self.start
        if moved:
            self.start, self.num_cached, self.num_read = start, 0, len(self.tokens)
        return moved

    def next_uniform(self) -> float:
        """Return the random number that decides the next token."""
        return self._draws.random() if self.sampling.temperature > 0 else 0.0
