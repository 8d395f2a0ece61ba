"""Bayesian optimisation of two functions with a known best, against random search and optuna's TPE if it is there."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from harness.benchmark import FOLDER, Options, Report, run, say

sys.path.insert(0, str(FOLDER.parent / "tests"))
from lab.search_simulation import simulate
from orchestray.search.methods.base import Proposal
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import Dimension, Uniform
from support.functions import BRANIN_BEST, BRANIN_SPACE, HARTMANN_BEST, HARTMANN_SPACE, branin, hartmann

Function = Callable[[Proposal, int], float]
FUNCTIONS: Mapping[str, tuple[Function, Mapping[str, Dimension], float, int, float]] = {
    "Branin": (branin, BRANIN_SPACE, BRANIN_BEST, 40, 0.01),
    "Hartmann-6": (hartmann, HARTMANN_SPACE, HARTMANN_BEST, 80, 0.1),
}
"""The function, its space, its best, the trials and the regret that is to be reached."""
OURS = {"gaussian_process": ("bayesian", {}), "tpe": ("bayesian", {"model": "tpe"}), "random": ("random", {})}


def regret(method: str, name: str, seed: int, workers: int = 1) -> float:
    """Return how far the best found is from the best there is."""
    function, space, best, trials, _ = FUNCTIONS[name]
    if method == "optuna's TPE":
        return best - optunas(function, space, trials, seed)
    kind, parameters = OURS[method]
    searched = simulate(
        make_method(kind, space=space, trials=trials, seed=seed, **parameters), function, workers=workers
    )
    assert searched.best.score is not None
    return best - searched.best.score


def optunas(function: Function, space: Mapping[str, Dimension], trials: int, seed: int) -> float:
    """Return the best value that optuna's default sampler finds."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))

    def objective(trial: optuna.Trial) -> float:
        changes = {}
        for key, dimension in space.items():
            assert isinstance(dimension, Uniform)
            changes[key] = trial.suggest_float(key, dimension.low, dimension.high)
        return function(Proposal(trial.number, changes), 1)

    study.optimize(objective, n_trials=trials)
    return float(study.best_value)


def measure(report: Report, options: Options) -> None:
    seeds = options.rounds(20, quick=2)
    methods = [*OURS, *(["optuna's TPE"] if find_spec("optuna") else [])]
    report.settings = {"seeds": seeds, "trials": {name: given[3] for name, given in FUNCTIONS.items()}}
    if "optuna's TPE" not in methods:
        report.notes.append("optuna is not installed; install it to see its sampler beside these.")
    for name, (*_, trials, goal) in FUNCTIONS.items():
        for method in methods:
            say(f"{name}: {method}")
            regrets = [regret(method, name, seed) for seed in range(seeds)]
            report.add(f"{name}, {trials} trials: regret of {method}", "", regrets)
            if method == "gaussian_process":
                report.goal(f"{name}: regret after {trials}, Gaussian process", statistics.median(regrets), goal)
        parallel = [regret("gaussian_process", name, seed, workers=4) for seed in range(seeds)]
        report.add(f"{name}, {trials} trials: regret of gaussian_process, 4 workers", "", parallel)


if __name__ == "__main__":
    run("bayesian", "Regret of Bayesian optimisation on functions with a known best, over seeds.", measure)
