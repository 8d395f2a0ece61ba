"""The results of a search as Ray Tune has them. Imports Tune late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestray.platform.errors import RunNameError

if TYPE_CHECKING:
    from ray.tune import ResultGrid

    from orchestray.search.config.schema import Objective


def result_grid(directory: Path, objective: Objective) -> ResultGrid:
    """Return the results of the experiments of a search, by the names of their trials.

    Args:
        directory: directory of the experiments, which are numbered.
        objective: objective by which the grid finds the best result.

    Raises:
        RunNameError: there is no experiment.
    """
    numbers = sorted(int(path.parent.name) for path in directory.glob("*/tuner.pkl") if path.parent.name.isdigit())
    if not numbers:
        raise RunNameError(f"there are no results of Ray Tune in {directory}: no trial has begun")
    from ray.tune import ExperimentAnalysis, ResultGrid

    places = [str(directory / str(number)) for number in numbers]
    found = {str(trial): trial for place in places for trial in ExperimentAnalysis(place).trials or ()}
    analysis = ExperimentAnalysis(
        places[-1], trials=list(found.values()), default_metric=objective.metric, default_mode=objective.mode
    )
    return ResultGrid(analysis)
