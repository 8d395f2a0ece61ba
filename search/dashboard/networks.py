"""The networks of a search as pictures, and who descends from whom."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.search.spaces.base import ArchitectureSpace, BuiltInSpace
from orchestray.search.spaces.draw import draw
from orchestray.search.spaces.registry import SPACES, make_space

_MAX_ANCESTORS = 60
_STYLE_ATTRIBUTE = re.compile(r' style="[^"]*"')


class NetworkPictures:
    """Draws genomes of a built-in space. A user's own space is code from a file: a page that only looks runs none."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        """`architecture`: the section of the search's config; empty if it searches none."""
        self._space = _space_of(architecture)
        self._drawn = lru_cache(maxsize=512)(self._draw)
        self._genomes: dict[int, Any] = {}

    def svg(self, line: Mapping[str, Any]) -> str | None:
        """The network of a trial's line; None if it has no genome, or one that cannot be drawn."""
        genome, trial = line.get("genome"), line.get("trial")
        if genome is None or self._space is None or not isinstance(trial, int):
            return None
        self._genomes[trial] = genome
        return self._drawn(trial)

    def text(self, genome: Any) -> str | None:
        """The network as a person reads it; None if it cannot be told."""
        if genome is None or not isinstance(self._space, BuiltInSpace):
            return None
        try:
            return self._space.text(genome)
        except Exception:  # noqa: BLE001 - as in `_draw`
            return None

    def _draw(self, trial: int) -> str | None:
        space = self._space
        assert isinstance(space, BuiltInSpace)
        try:
            picture = draw(space.graph(self._genomes[trial]), f"network of trial {trial}")
        except Exception:  # noqa: BLE001 - whatever a damaged or foreign genome does, the page shows its text instead
            return None
        # The page allows no styles in attributes: its own style sheet says the same.
        return _STYLE_ATTRIBUTE.sub("", picture, count=1)


def _space_of(architecture: Mapping[str, Any]) -> ArchitectureSpace | None:
    name = architecture.get("space")
    if not isinstance(name, str) or name not in SPACES:
        return None
    try:
        return make_space(name, **{str(key): value for key, value in architecture.items() if key != "space"})
    except OrchestrayError:
        return None


def ancestors(trial: int, nodes: Iterable[Mapping[str, Any]]) -> list[int]:
    """The trials that `trial` was made from, the first ancestor first and itself last; only the last 60 of them."""
    parents: dict[int, int] = {}
    for node in nodes:
        if isinstance(node.get("parent"), int) and node["parent"] != node["trial"]:
            parents.setdefault(node["trial"], node["parent"])
    family = [trial]
    while len(family) < _MAX_ANCESTORS and (parent := parents.get(family[-1])) is not None and parent not in family:
        family.append(parent)
    return family[::-1]
