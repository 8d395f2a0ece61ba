"""The samplers of Optuna and BoTorch on the functions of `searches.bayesian_cases`.

Cells come on stdin, one JSON list a line: case, sampler, workers, seed. Each is answered by a line on stdout: the cell,
its loss and its seconds. One thread.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import torch

from orchestray.search.spaces.dimensions import Integer, Uniform
from searches.bayesian_cases import CASES, Case, Outcome, drive

Ask = Callable[[], tuple[Any, Mapping[str, Any]]]
Tell = Callable[[Any, Outcome], None]

_RESTARTS, _RAW = 10, 512
"""Starts of BoTorch's ascent, and draws that they are chosen from: those of its tutorials."""


def _sampler(name: str, case: Case, workers: int, seed: int) -> optuna.samplers.BaseSampler:
    bounds: dict[str, Any] = {"constraints_func": _violations} if case.has_bound else {}
    if name == "GPSampler":
        return optuna.samplers.GPSampler(seed=seed, **bounds)
    if name == "TPESampler":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=workers > 1, **bounds)
    return optuna.samplers.NSGAIISampler(seed=seed, **bounds)


def _violations(trial: optuna.trial.FrozenTrial) -> Sequence[float]:
    return (trial.user_attrs["violation"],)


def _optuna(name: str, case: Case, workers: int, seed: int) -> tuple[Ask, Tell]:
    study = optuna.create_study(
        directions=["maximize"] * case.num_objectives, sampler=_sampler(name, case, workers, seed)
    )

    def ask() -> tuple[optuna.Trial, Mapping[str, Any]]:
        trial = study.ask()
        return trial, {key: _suggest(trial, key, dimension) for key, dimension in case.space.items()}

    def tell(trial: optuna.Trial, outcome: Outcome) -> None:
        trial.set_user_attr("violation", outcome.violation)
        study.tell(trial, list(outcome.scores))

    return ask, tell


def _suggest(trial: optuna.Trial, key: str, dimension: Any) -> Any:
    if isinstance(dimension, Uniform):
        return trial.suggest_float(key, dimension.low, dimension.high, log=dimension.is_log)
    if isinstance(dimension, Integer):
        return trial.suggest_int(key, dimension.low, dimension.high, log=dimension.is_log)
    return trial.suggest_categorical(key, dimension.all_values())


def _botorch(case: Case, seed: int) -> tuple[Ask, Tell]:
    """Search with BoTorch's defaults: its Gaussian process, (q)LogEI, and ascent from the best of Sobol draws.

    A choice is one number for each option (one-hot), an integer a number; both are searched as reals and rounded.
    """
    from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from botorch.utils.sampling import manual_seed
    from gpytorch.mlls import ExactMarginalLogLikelihood

    widths = [1 if isinstance(d, Uniform | Integer) else len(d.all_values() or ()) for d in case.space.values()]
    total = sum(widths)
    sobol = torch.quasirandom.SobolEngine(total, scramble=True, seed=seed)
    known: list[tuple[torch.Tensor, float]] = []
    running: dict[int, torch.Tensor] = {}
    num_asked = 0

    def rounded(point: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        values: dict[str, Any] = {}
        parts = []
        for (key, dimension), part in zip(case.space.items(), point.split(widths), strict=True):
            if isinstance(dimension, Uniform | Integer):
                values[key] = dimension.from_unit(float(part))
                parts.append(torch.tensor([dimension.to_unit(values[key])], dtype=torch.double))
            else:
                values[key] = (dimension.all_values() or [])[int(part.argmax())]
                parts.append(torch.nn.functional.one_hot(part.argmax(), len(part)).double())
        return torch.cat(parts), values

    def ask() -> tuple[int, Mapping[str, Any]]:
        nonlocal num_asked
        number, num_asked = num_asked, num_asked + 1
        if len(known) < 2 * len(case.space) + 2:
            point = sobol.draw(1).double()[0]
        else:
            with manual_seed(seed * 1000 + number):
                point = proposed()
        running[number], values = rounded(point)
        return number, values

    def proposed() -> torch.Tensor:
        points = torch.stack([point for point, _ in known])
        scores = torch.tensor([[score] for _, score in known], dtype=torch.double)
        scores = (scores - scores.mean()) / scores.std()
        model = SingleTaskGP(points, scores)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        gain: Any
        if running:
            gain = qLogExpectedImprovement(model, scores.max(), X_pending=torch.stack(list(running.values())))
        else:
            gain = LogExpectedImprovement(model, scores.max())
        bounds = torch.stack([torch.zeros(total), torch.ones(total)]).double()
        found, _ = optimize_acqf(gain, bounds, q=1, num_restarts=_RESTARTS, raw_samples=_RAW)
        return found[0]

    def tell(number: int, outcome: Outcome) -> None:
        known.append((running.pop(number), outcome.scores[0]))

    return ask, tell


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for line in sys.stdin:
        name, sampler, workers, seed = cell = json.loads(line)
        case = CASES[name]
        began_s = time.perf_counter()
        ask, tell = _botorch(case, seed) if sampler == "BoTorch" else _optuna(sampler, case, workers, seed)
        loss = drive(case, ask, tell, workers)
        print(json.dumps([*cell, loss, round(time.perf_counter() - began_s, 1)]), flush=True)


if __name__ == "__main__":
    main()
