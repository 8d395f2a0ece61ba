"""The sampling of a request: the choice of its next token, and its end. Does not import torch."""

from __future__ import annotations

import random
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from orchestray.serving.models.json_object import JsonObject

_LARGEST = 2**63 - 1
_MOST_STOPS = 16
Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[tuple[Text, ...], Field(max_length=_MOST_STOPS, strict=False)]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Sampling(JsonObject):
    """The sampling parameters of one request.

    Raises:
        InputError: a value is out of range.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 64
    """a whole number >= 1; largest number of tokens to generate"""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """a finite number >= 0; 0 takes the likeliest token, else the logits are divided by it"""
    top_k: Annotated[int, Field(ge=0, le=_LARGEST)] = 0
    """a whole number >= 0; draw among that many of the likeliest tokens, 0: among all"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """a number above 0 and up to 1; draw among the likeliest tokens that have this probability together"""
    seed: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    """a whole number from 0 to 2^63 - 1; equal seeds give equal tokens, independently of other requests"""
    stop: Annotated[_Texts, BeforeValidator(_listed, json_schema_input_type=_Texts | Text)] = ()
    """up to 16 texts, none empty; they end the answer and are not part of it"""
    stop_tokens: Annotated[frozenset[int], Field(strict=False)] = frozenset()
    """whole numbers; tokens that end the answer and are not part of it"""

    def draws(self) -> random.Random:
        """Return the random numbers of this request: one for each token."""
        return random.Random(self.seed)
