"""The networks of a search as pictures, and the ancestors of a trial."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.search.spaces.architectures.base import ArchitectureSpace, BuiltInSpace
from orchestray.search.spaces.drawing.draw import draw
from orchestray.search.spaces.registry import SPACES, make_space

_MAX_ANCESTORS = 60
_STYLE_ATTRIBUTE = re.compile(r' style="[^"]*"')


class NetworkPictures:
    """A renderer of genomes of a built-in space. A user's own space is code from a file, which a page must not run."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        """Prepare the space; `architecture` is the section of the search's config, empty if there is none."""
        self._space = _space_of(architecture)
        self._drawn = lru_cache(maxsize=512)(self._draw)
        self._genomes: dict[int, Any] = {}

    def svg(self, line: Mapping[str, Any]) -> str | None:
        """Return the network of a trial's line as SVG; None if it has no genome, or one that cannot be drawn."""
        genome, trial = line.get("genome"), line.get("trial")
        if genome is None or self._space is None or not isinstance(trial, int):
            return None
        self._genomes[trial] = genome
        return self._drawn(trial)

    def text(self, genome: Any) -> str | None:
        """Return the network as readable text; None if that is not possible."""
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
        except Exception:  # noqa: BLE001 - for any damaged or foreign genome the page shows its text instead
            return None
        # The page allows no style attributes; its own style sheet has the same rule.
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
    """Return the ancestors of `trial`, the oldest first and the trial itself last; at most the latest 60."""
    parents: dict[int, int] = {}
    for node in nodes:
        if isinstance(node.get("parent"), int) and node["parent"] != node["trial"]:
            parents.setdefault(node["trial"], node["parent"])
    family = [trial]
    while len(family) < _MAX_ANCESTORS and (parent := parents.get(family[-1])) is not None and parent not in family:
        family.append(parent)
    return family[::-1]
