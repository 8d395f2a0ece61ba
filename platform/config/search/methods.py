"""The `search.method` section: every method, and what each can search."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from orchestray.platform.config.search.controllers import ControllerMethod
from orchestray.platform.config.search.evolution import EvolutionMethod
from orchestray.platform.config.search.hyper import HyperMethod
from orchestray.platform.config.search.population import PopulationMethod
from orchestray.platform.config.search.stopping import Proposals, StoppingMethod

AnyMethod = Annotated[
    HyperMethod | StoppingMethod | PopulationMethod | EvolutionMethod | ControllerMethod, Field(discriminator="type")
]

ONLY_SPACE = frozenset({"population_based_training", "omnivore", "particle_swarm", "spectral"})
"""Methods that search hyper-parameters and no architecture."""
ONLY_ARCHITECTURE = frozenset({"codeepneat", "neat", "enas", "darts", "smash"})
"""Methods that need an architecture to search."""
SHARES_WEIGHTS = frozenset({"enas", "darts", "smash"})
"""Methods whose first trial trains one set of weights for all networks."""
COUNTS_ITSELF = frozenset({"grid", "omnivore"})
"""Methods that end by themselves, without `budget.trials`."""


def parameters_of(method: Any) -> dict[str, Any]:
    """What the constructor of a method gets beyond the arguments every method has: every key but `type`."""
    return {name: value for name, value in method.model_dump(mode="python").items() if name != "type"}


def proposer_of(method: Any) -> tuple[str, Any]:
    """Who proposes the trials of a search: the key of its section, and the section."""
    if isinstance(method, Proposals):
        return "search.method.proposals", method.proposals
    return "search.method", method


_COUNTS = ("population", "networks", "samples", "initial", "beam")
"""Of a method, how many trials it makes before it looks at what came of them: a generation, a level, a stage."""


def counts_of(method: Any) -> dict[str, int]:
    """How many trials a method needs before it has learned anything, by the keys that say so."""
    keys = (*_COUNTS, "children") if method.type == "reinforce" else _COUNTS
    numbers = {key: getattr(method, key) for key in keys if key in type(method).model_fields}
    return {key: number for key, number in numbers.items() if isinstance(number, int)}


def is_one_process(method: Any) -> bool:
    """Whether a trial of a method is a program of its own, which trains many networks, or members, in its process."""
    return method.type in SHARES_WEIGHTS or bool(getattr(method, "packed", False))
