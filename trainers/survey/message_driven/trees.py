"""Boolean expressions as trees: samples that each have a shape of their own."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LEAVES = ("false", "true")
OPERATORS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "not": (1, operator.not_),
    "and": (2, operator.and_),
    "or": (2, operator.or_),
    "xor": (2, operator.xor),
}
"""By word: how many operands an operator has, and its function."""


@dataclass(frozen=True)
class Tree:
    """A Boolean expression whose places are numbered in postorder: operands before their operator, the root last.

    Args:
        words: operator or leaf of each place.
        children: operands of each place; none for a leaf.
        parents: operator that each place is an operand of; -1 for the root.
        values: value of each place: 0 or 1.
    """

    words: tuple[str, ...]
    children: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]
    values: tuple[int, ...]

    def places(self, word: str) -> list[int]:
        """Return the places at which a word stands."""
        return [place for place, each in enumerate(self.words) if each == word]


def parsed(text: str) -> Tree:
    """Return the tree of an expression in postfix form, such as "true false xor not".

    Raises:
        ValueError: the text is not one expression.
    """
    words = tuple(text.split())
    if unknown := {*words} - {*LEAVES, *OPERATORS}:
        raise ValueError(f"{min(unknown)!r} is not a word of expressions, which are {', '.join([*LEAVES, *OPERATORS])}")
    num_operands = [OPERATORS[word][0] if word in OPERATORS else 0 for word in words]
    children: list[tuple[int, ...]] = []
    parents, values = [-1] * len(words), [0] * len(words)
    open_places: list[int] = []
    for place, (word, arity) in enumerate(zip(words, num_operands, strict=True)):
        first = len(open_places) - arity
        if first < 0:
            raise ValueError(f"{word!r}, word {place + 1} of {text!r}, has not {arity} operands before it")
        operands = tuple(open_places[first:])
        del open_places[first:]
        for operand in operands:
            parents[operand] = place
        of_operands = [values[operand] for operand in operands]
        values[place] = int(OPERATORS[word][1](*of_operands)) if arity else LEAVES.index(word)
        children.append(operands)
        open_places.append(place)
    if len(open_places) != 1:
        raise ValueError(f"{text!r} is {len(open_places)} expressions, not one")
    return Tree(words, tuple(children), tuple(parents), tuple(values))


def drawn(count: int, seed: int, depth: int = 4) -> list[Tree]:
    """Return random trees.

    Args:
        count: how many.
        seed: seed of the draw.
        depth: operators at most between a leaf and the outside.
    """
    rng = random.Random(seed)
    return [parsed(_text(rng, depth)) for _ in range(count)]


def _text(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(LEAVES)
    word = rng.choice([*OPERATORS])
    return " ".join([*(_text(rng, depth - 1) for _ in range(OPERATORS[word][0])), word])
