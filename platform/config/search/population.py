"""Population-based training, as a search config names it."""

from __future__ import annotations

from typing import Literal

from orchestray.platform.config.base import Section


class PopulationBasedTraining(Section):
    """A population that trains, copies its winners and perturbs their hyper-parameters (Jaderberg et al., 2017)."""

    type: Literal["population_based_training"]
    """The method `population_based_training`."""
