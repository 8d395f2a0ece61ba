"""Trainings whose settings `orchestray search` chooses, in the process of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WARM_UP_STEPS = 20


def searched(
    config: Mapping[str, Any], space: Mapping[str, Any], metric: str, trials: int, place: Path
) -> list[dict[str, Any]]:
    """Return the trials of a search along a Sobol sequence: of each `config`, `objective` and `steps`.

    Args:
        config: the training, whose `train.steps` is that of a trial.
        space: keys of it, and the values of each.
        metric: metric of the validation at the end of a trial.
        trials: number of trials.
        place: where the search goes.
    """
    import orchestray

    base = {**config, "train": {name: value for name, value in config["train"].items() if name != "steps"}}
    told = {
        "base": base,
        "search": {
            "method": {"type": "random", "sequence": "sobol"},
            "objective": {"metric": metric},
            "space": dict(space),
            "budget": {"trials": trials, "steps_per_trial": config["train"]["steps"]},
            "parallel": 2,
        },
    }
    lines = orchestray.search(told, runs_dir=place, name=_name("search", place)).lines()
    return [
        {key: line[key] for key in ("config", "objective", "steps")} for line in lines if line["objective"] is not None
    ]


def train(config: Mapping[str, Any], changes: Mapping[str, Any], place: Path) -> Any:
    """Return the run of a config with other values of some keys, dotted."""
    import json

    import orchestray

    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return orchestray.train(config, overrides=overrides, runs_dir=place, name=_name("run", place))


def step_ms(config: Mapping[str, Any], place: Path) -> float:
    """Return the mean milliseconds of a step of a run, without the first ones and without validation."""
    lines = train(config, {"train.validate_every_steps": 100_000}, place).metrics().to_pylist()
    ends = [line["time_s"] for line in lines if line.get("split") is None][_WARM_UP_STEPS:]
    return 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)


def _name(kind: str, place: Path) -> str:
    return f"{kind}-{len(list(place.iterdir()))}"
