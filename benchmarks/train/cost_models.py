"""Times of training that models of the literature predict, beside those that networks take: errors as found."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import benchmark

_EPOCH_STEPS = 100
_SHAPES = 60
_GEMM_LIMIT = 0.10


@dataclass(frozen=True)
class Case:
    """A network with a mini-batch: `make` returns the `Subject`, on `meta`."""

    make: Callable[[], Any]
    replicas: bool = False
    """True to train it with two workers as well."""


def _network(name: str, build: Callable[[], Any], *shape: int, dtype: str = "float32") -> Any:
    import torch

    from orchestray.trainers.planning.subject import Subject

    with torch.device("meta"):
        return Subject(name, build().train(), torch.empty(shape, dtype=getattr(torch, dtype)), shape[0])


def _config(name: str, *overrides: str) -> Any:
    from orchestray.trainers.planning.subject import subject_of

    return subject_of(str(benchmark.REPOSITORY / "configs" / "train" / f"{name}.yaml"), overrides)


def _mlp(*widths: int) -> Any:
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 10)),
    )


def _encoder() -> Any:
    from torch import nn

    return nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)


def _lstm() -> Any:
    from torch import nn

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(64, 128, batch_first=True)
            self.head = nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.cells(x)[0][:, -1])

    return Last()


def _survey(name: str, *shape: int, **arguments: int) -> Any:
    from orchestray.trainers.survey.networks import connected, plain

    build = getattr(plain, name, None) or getattr(connected, name)
    return _network(name, partial(build, **arguments), *shape)


FITTED: Mapping[str, Case] = {
    "MLP of 4 x 512": Case(lambda: _network("mlp", lambda: _mlp(512, 512, 512, 512, 10), 64, 512)),
    "CNN of 2 layers": Case(lambda: _network("cnn", _cnn, 32, 3, 32, 32)),
}
"""Networks that Paleo's percent of peak is fitted to; none of them is predicted."""
HELD_OUT: Mapping[str, Case] = {
    "task digits": Case(lambda: _config("digits"), replicas=True),
    "task digits, CNN": Case(lambda: _config("digits-cnn"), replicas=True),
    "task digits, inception": Case(lambda: _config("digits-inception-branches")),
    "task python_source, transformer": Case(lambda: _config("python-source-tensor"), replicas=True),
    "MLP 784-1024-1024-10": Case(lambda: _network("mlp", lambda: _mlp(784, 1024, 1024, 10), 128, 784), replicas=True),
    "MLP of 12 x 128": Case(lambda: _network("mlp", lambda: _mlp(*[128] * 12, 10), 32, 128)),
    "transformer encoder": Case(lambda: _network("encoder", _encoder, 8, 64, 128)),
    "LSTM, 32 steps": Case(lambda: _network("lstm", _lstm, 32, 32, 64)),
    "LeNet-5": Case(lambda: _survey("LeNet5", 64, 1, 32, 32), replicas=True),
    "AlexNet": Case(lambda: _survey("alexnet", 4, 3, 227, 227)),
    "GoogLeNet": Case(lambda: _survey("googlenet", 2, 3, 224, 224)),
    "ResNet-18": Case(lambda: _survey("resnet", 2, 3, 224, 224, num_layers=18)),
    "ResNet-20, CIFAR": Case(lambda: _survey("resnet_for_cifar", 32, 3, 32, 32, num_layers=20)),
    "DenseNet-40, CIFAR": Case(lambda: _survey("densenet_for_cifar", 8, 3, 32, 32, num_layers=40, growth=12)),
}


def _predictors(profile: Any, percent_of_peak: float) -> dict[str, Callable[[Any], float]]:
    """Return what predicts the seconds of a step in one process, of one thread, from what is counted."""
    from orchestray.trainers.survey.cost_models.models import gemm_lookup_s, paleo_s

    return {
        "Paleo, at peak": lambda counted: paleo_s(counted, profile),
        "Paleo": lambda counted: paleo_s(counted, profile, percent_of_peak=percent_of_peak),
        "GEMM table": lambda counted: gemm_lookup_s(counted, profile),
    }


def _made(name: str) -> tuple[Any, Any]:
    """Return a network by its name, and its mini-batch, on `meta`."""
    subject = {**FITTED, **HELD_OUT}[name].make()
    return subject.model, subject.inputs


def add_options(parser: Any) -> None:
    parser.add_argument("--profile", type=Path, default=None, metavar="FILE", help="a machine's, instead of measuring")
    parser.add_argument("--only", nargs="+", choices=tuple(HELD_OUT), default=tuple(HELD_OUT), metavar="NAME")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    from orchestray.trainers.driver.engines.driver import HOST
    from orchestray.trainers.machine import kept
    from orchestray.trainers.machine.calibrate import calibrate
    from orchestray.trainers.survey.cost_models.models import (
        cpu_distributed_s,
        epoch_s,
        fitted_percent_of_peak,
    )
    from orchestray.trainers.survey.lab.predicting import FIRST_STEPS, count, steps_of, two_workers_s

    torch.set_num_threads(1)
    given = options.arguments.profile
    benchmark.say("calibration")
    profile = kept.load(given) if given else calibrate(HOST, options.workspace, benchmark.say, quick=options.quick)
    report.settings = {"threads": 1, "steps_of_an_epoch": _EPOCH_STEPS, "spread_of_calibration": profile.spread}
    _hold_out_shapes(report, profile, 10 if options.quick else _SHAPES)

    fitted = []
    for name in FITTED:
        taken_s = steps_of(partial(_made, name), 2 * FIRST_STEPS)
        fitted.append((count(*_made(name)), statistics.median(taken_s)))
    percent = fitted_percent_of_peak(fitted, profile)
    predictors = _predictors(profile, percent)
    errors: dict[str, list[float]] = {name: [] for name in (*predictors, "CPU distributed", "whole epoch")}
    rows = []
    for name in options.arguments.only:
        benchmark.say(name)
        counts = count(*_made(name))
        predicted = {model: predict(counts) for model, predict in predictors.items()}
        taken_s = steps_of(partial(_made, name), 2 * FIRST_STEPS if options.quick else _EPOCH_STEPS)
        step_s = statistics.median(taken_s)
        report.add(f"step, {name}", "ms", [1e3 * each for each in taken_s])
        found = {model: each / step_s - 1 for model, each in predicted.items()}
        found["whole epoch"] = epoch_s(taken_s[:FIRST_STEPS], len(taken_s)) / sum(taken_s) - 1
        if HELD_OUT[name].replicas:
            two_s = two_workers_s(partial(_made, name), 3 * FIRST_STEPS)
            found["CPU distributed"] = cpu_distributed_s(step_s, counts.parameter_bytes, profile) / two_s - 1
            report.add(f"step of two workers, {name}", "ms", [1e3 * two_s])
        for model, error in found.items():
            errors[model].append(error)
        rows.append([name, f"{1e3 * step_s:.3g}", *(f"{found[m]:+.0%}" if m in found else "" for m in errors)])
    report.table(["network", "step, ms", *errors], rows)
    for model, each in errors.items():
        if each:
            report.add(f"error of {model}", "%", [100 * abs(error) for error in each])
    report.notes += [
        f"Paleo's percent of peak, {percent:.2f}, is fitted to {' and '.join(FITTED)}, which are not predicted.",
        "An error is prediction / measurement - 1. A step is forward and backward, in one process of one thread.",
        "CPU distributed: two workers, each with a whole mini-batch; compute + T_allreduce of the gradients.",
        f"Whole epoch: from its first {FIRST_STEPS} steps.",
    ]


def _hold_out_shapes(report: benchmark.Report, profile: Any, count: int) -> None:
    """Hold the table of products against shapes that are not in it."""
    import torch

    from orchestray.trainers.machine.measure_compute import places_for, product_s

    draw, errors, places = random.Random(0), list[float](), places_for(3000, torch.float32)
    while len(errors) < count:
        m, n, k = (round(2 ** draw.uniform(0, 11.5)) for _ in range(3))
        if m * n * k < 5e8:
            taken_s = min(product_s(m, n, k, places) for _ in range(3))
            errors.append(abs(profile.gemm_s(m, n, k) / taken_s - 1))
    report.add("error of the table of products, held-out shapes", "%", [100 * each for each in errors])
    report.goal("error of the table of products, held-out shapes", statistics.median(errors), _GEMM_LIMIT)


if __name__ == "__main__":
    benchmark.run(
        "cost_models",
        "The error of models of the literature that predict training times, over networks that none of them saw.",
        measure,
        add_options,
    )
