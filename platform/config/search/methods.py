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


def population_of(method: Any) -> int | None:
    """How many members its population has; None: it has none, or says so elsewhere."""
    size = getattr(method, "population", None) if "population" in type(method).model_fields else None
    return size if isinstance(size, int) else None
