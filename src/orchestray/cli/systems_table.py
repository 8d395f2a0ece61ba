"""The table of systems.tsv, one line per system, as frozen values.

A system *works* if its row gives a command that runs it here and tests that show it. It is *context* if its row says
why there is nothing to run (a peer, hardware that is not here). Everything else is *not yet*.

tests/unit/cli/test_systems_table.py checks the table: named tests exist, named commands validate.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from orchestray.platform.errors import ConfigError

COLUMNS = ("group", "name", "what", "runs_with", "tests", "context")

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "A": "Concurrency analysis and cost models",
        "B": "Update rules, batches, learning rates, normalisation, memory",
        "C": "Network-level parallelism",
        "D": "Consistency and centralisation, fault tolerance",
        "E": "Compression and communication reduction",
        "F": "Consolidation",
        "G": "Other optimisation, hyper-parameter and architecture search",
        "H": "Serving and inference",
        "I": "Frameworks, peers, hardware, data sets",
    }
)
"""Title of each group, by its letter."""


class State(Enum):
    """The state of a system here: it works, does not work yet, or is context only."""

    WORKS = "works"
    NOT_YET = "not yet"
    CONTEXT = "context"


@dataclass(frozen=True)
class System:
    """A row of the table."""

    group: str
    """Letter of the group, a key of `GROUPS`."""
    name: str
    what: str
    """Description in a few words."""
    runs_with: str = ""
    """Command that runs it, as typed in the root of the repository; empty if it does not work here."""
    tests: tuple[str, ...] = ()
    """Node ids of the tests that show it."""
    context: str = ""
    """Reason why it is context only; empty if it is not."""

    @property
    def state(self) -> State:
        """State of the row, which works only with a command and a named test."""
        if self.tests and self.runs_with:
            return State.WORKS
        return State.CONTEXT if self.context else State.NOT_YET

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, with its state and the title of its group."""
        return {**asdict(self), "tests": list(self.tests), "state": self.state.value, "title": GROUPS[self.group]}


@cache
def load_systems() -> tuple[System, ...]:
    """Return all systems, in the order of the table.

    Raises:
        ValueError: the table has a line with too few or too many columns, or another heading.
    """
    return parse_systems((files(__package__) / "systems.tsv").read_text(encoding="utf-8"))


def parse_systems(text: str) -> tuple[System, ...]:
    """Return the systems of a table with the columns `COLUMNS`, separated by tabs; tests are separated by spaces.

    Raises:
        ValueError: a line has too few or too many columns, or the heading differs.
    """
    heading, *lines = text.removesuffix("\n").split("\n")
    if tuple(heading.split("\t")) != COLUMNS:
        raise ValueError(f"The table of systems has the heading {heading!r}, not the columns {', '.join(COLUMNS)}.")
    systems = []
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if len(cells) != len(COLUMNS):
            raise ValueError(f"Line {number} of the table of systems has {len(cells)} columns, not {len(COLUMNS)}.")
        group, name, what, runs_with, tests, context = cells
        systems.append(System(group, name, what, runs_with, tuple(tests.split()), context))
    return tuple(systems)


def find_system(name: str, systems: Sequence[System] | None = None) -> System:
    """Return the system with this name, in any case; part of a name is enough if only one system has it.

    Args:
        name: name, or part of it.
        systems: systems to search; default: the whole table.

    Raises:
        ConfigError: the name fits none or several; the nearest are named.
    """
    by_name = {system.name.casefold(): system for system in (load_systems() if systems is None else systems)}
    wanted = " ".join(name.casefold().split())
    if wanted in by_name:
        return by_name[wanted]
    holding = [system for key, system in by_name.items() if wanted and wanted in key]
    if len(holding) == 1:
        return holding[0]
    if holding:
        raise ConfigError(f"More than one system is called {name!r}: {_listed(holding)}.")
    near = [by_name[key] for key in _nearest(wanted, by_name)]
    hint = f" Did you mean {_listed(near)}?" if near else " `orchestray systems` and `--missing` list them all."
    raise ConfigError(f"There is no system called {name!r}.{hint}")


def _nearest(wanted: str, names: Mapping[str, System]) -> list[str]:
    """Return up to three names that are similar to `wanted`, or have a similar word, the most similar first."""

    def likeness(name: str) -> float:
        words = [name, *name.replace("(", " ").replace(")", " ").split()]
        return max(difflib.SequenceMatcher(None, wanted, word).ratio() for word in words)

    scored = sorted(((likeness(name), name) for name in names), key=lambda pair: -pair[0])
    return [name for score, name in scored[:3] if score >= max(0.6, scored[0][0] - 0.15)]


def _listed(systems: Sequence[System]) -> str:
    names = [f"'{system.name}'" for system in systems[:4]]
    return ", ".join(names) + (f" and {len(systems) - 4} more" if len(systems) > 4 else "")
