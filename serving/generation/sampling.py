"""The sampling of a request: the choice of its next token, and its end. Does not import torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from orchestray.serving.models.errors import InputError

_LARGEST_SEED = 2**63 - 1
MOST_STOPS = 16
"""Largest number of stop strings of one request."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one request.

    Args:
        max_tokens: largest number of tokens to generate.
        temperature: 0 takes the likeliest token; else the logits are divided by it.
        top_k: draw among that many of the likeliest tokens; 0: among all.
        top_p: draw among the likeliest of those that have this probability together.
        seed: seed of the draws; equal seeds give equal tokens, independently of other requests. None: a random one.
        stop: texts that end the answer and are not part of it.
        stop_tokens: tokens that end the answer and are not part of it.

    Raises:
        InputError: a value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError("max_tokens", "a whole number >= 1", str(self.max_tokens))
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError("temperature", "a finite number >= 0", str(self.temperature))
        if self.top_k < 0:
            raise InputError("top_k", "a whole number >= 0", str(self.top_k))
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", "a number above 0 and up to 1", str(self.top_p))
        if self.seed is not None and not 0 <= self.seed <= _LARGEST_SEED:
            raise InputError("seed", f"a whole number from 0 to {_LARGEST_SEED}", str(self.seed))
        if len(self.stop) > MOST_STOPS or not all(self.stop):
            got = f"{len(self.stop)} texts" if all(self.stop) else "an empty text"
            raise InputError("stop", f"up to {MOST_STOPS} texts, none empty", got)

    def draws(self) -> random.Random:
        """Return the random numbers of this request: one for each token."""
        return random.Random(self.seed)
