"""The fastest plans, tried: each trains for some steps, as predictions do not tell apart what is about as fast."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, Interrupted, OrchestrayError
from orchestray.platform.run.metrics import read_lines
from orchestray.trainers.driver.training import train
from orchestray.trainers.planning.planner import Unfit
from orchestray.trainers.planning.record import measured_step_s

if TYPE_CHECKING:
    from orchestray.trainers.planning.planner import Plans
    from orchestray.trainers.planning.plans import Plan

_ROUNDS = 3
"""Times that each is trained, in turn: one run differs from the next by some percent."""
_TRAINED_S, _LEAST_STEPS, _MOST_STEPS = 3.0, 40, 2000


def try_plans(plans: Plans, number: int, *, report: Callable[[int, int], None] = lambda _done, _all: None) -> Plans:
    """Train by the fastest plans that keep the result of a single process, and return all with what their steps took.

    Each trains for about three seconds, and at least 40 steps, three times. Nothing of it is kept but the planner's
    record of its errors. A plan that fails is one that does not fit.

    Args:
        plans: plans for this machine, or for the Ray cluster that this process is connected to.
        number: number of plans to try.
        report: called with the numbers of trainings done and in all.

    Raises:
        ConfigError: `number` is below 1, or no plan keeps the result.
        Interrupted: Ctrl-C or SIGTERM.
    """
    if number < 1:
        raise ConfigError(f"the number of plans to try must be 1 or more, got {number}")
    chosen = [plan for plan in plans.plans if plan.keeps_result][:number]
    if not chosen:
        raise ConfigError("there is no plan to try: none keeps the result of a single process")
    times_s: dict[str, list[float]] = {plan.name: [] for plan in chosen}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="orchestray-plans-") as folder:
        for each in range(_ROUNDS):
            for place, plan in enumerate(chosen):
                report(each * len(chosen) + place, _ROUNDS * len(chosen))
                if plan.name in failed:
                    continue
                try:
                    times_s[plan.name].append(_tried_s(plan, Path(folder), f"tried-{place}-{each}"))
                except Interrupted:
                    raise
                except OrchestrayError as error:
                    failed[plan.name] = f"it failed when it was tried: {error}"
    report(_ROUNDS * len(chosen), _ROUNDS * len(chosen))
    fitting = [
        replace(plan, tried_s=median(times_s[plan.name])) if times_s.get(plan.name) else plan
        for plan in plans.plans
        if plan.name not in failed
    ]
    unfit = [Unfit(name, why) for name, why in failed.items()]
    return replace(plans, plans=tuple(fitting), unfit=(*plans.unfit, *unfit))


def _tried_s(plan: Plan, folder: Path, name: str) -> float:
    """Return the mean seconds of a step of a short run by a plan."""
    num_steps = round(min(_MOST_STEPS, max(_LEAST_STEPS, _TRAINED_S / plan.step_s)))
    train(_shortened(plan, num_steps), runs_dir=folder, name=name)
    step_s = measured_step_s(read_lines(folder / name / "metrics.jsonl"))
    assert step_s is not None, "a run of 40 steps has as many as a mean needs"
    return step_s


def _shortened(plan: Plan, num_steps: int) -> dict[str, Any]:
    """Return the config of a plan with a length of its own, which tells nobody and fails nowhere on purpose."""
    config: dict[str, Any] = json.loads(json.dumps(dict(plan.config)))
    never = 10 * num_steps
    ends = {"epochs": None, "until": None, "early_stopping": None, "time_limit_s": None}
    config["train"] |= {**ends, "steps": num_steps, "validate_every_steps": never}
    config["checkpoint"] |= {"every_steps": never, "best": None, "storage": None}
    return config | {"trackers": [], "faults": []}
