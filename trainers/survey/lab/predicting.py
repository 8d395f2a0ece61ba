"""Times of training that models of the literature predict, beside those that networks take: errors as found.

Four models: Paleo, a table of measured products, data parallelism on CPUs, and a whole epoch from its first steps. The
networks are of no model's making: Paleo's part of the peak is fitted to others.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from orchestray.platform.cluster.cluster import connect, current
from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.inputs import call
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.profile import MachineProfile
from orchestray.trainers.survey.cost_models.counted import Counted, counted
from orchestray.trainers.survey.cost_models.models import (
    cpu_distributed_s,
    epoch_s,
    fitted_percent_of_peak,
    gemm_lookup_s,
    paleo_s,
)
from orchestray.trainers.survey.cost_models.steps import materialised, steps_s
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import threads
from orchestray.trainers.survey.networks.connected import densenet_for_cifar, resnet_for_cifar
from orchestray.trainers.survey.networks.plain import LeNet5

FIRST_STEPS = 20
"""Steps by which an epoch is predicted, or half of it if it is shorter than twice that."""
_EPOCH_S, _TIMEOUT_S = 4.0, 120.0
"""Seconds after which an epoch has no more steps, if it has twice the first ones; seconds to wait for a worker."""

Made: TypeAlias = Callable[[], tuple[nn.Module, Any]]
"""Function that returns a model and a mini-batch on `meta`; it can be pickled."""


@dataclass(frozen=True)
class Case:
    """A network with a mini-batch.

    Args:
        build: returns the network; a function of a module, with its arguments.
        shape: shape of the inputs.
        has_workers: True to train it with two workers as well.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    has_workers: bool = False

    def __call__(self) -> tuple[nn.Module, Tensor]:
        with torch.device("meta"):
            return self.build().train(), torch.empty(self.shape)


def _mlp(*widths: int) -> nn.Module:
    parts = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def _cnn(*channels: int) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    side = 32 // 2 ** (len(channels) - 1)
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels[-1] * side**2, 10))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)


FITTED: Mapping[str, Case] = {
    "MLP of 4 x 512": Case(partial(_mlp, 512, 512, 512, 512, 10), (64, 512)),
    "CNN 32-64": Case(partial(_cnn, 3, 32, 64), (32, 3, 32, 32)),
}
"""Networks that Paleo's percent of peak is fitted to; none of them is predicted."""
HELD_OUT: Mapping[str, Case] = {
    "MLP 784-1024-1024-10": Case(partial(_mlp, 784, 1024, 1024, 10), (128, 784), has_workers=True),
    "MLP of 12 x 128": Case(partial(_mlp, *[128] * 12, 10), (32, 128)),
    "MLP of 2 x 2048": Case(partial(_mlp, 256, 2048, 2048, 10), (32, 256)),
    "CNN 16-16-16": Case(partial(_cnn, 3, 16, 16, 16), (32, 3, 32, 32), has_workers=True),
    "CNN 64-128": Case(partial(_cnn, 3, 64, 128), (16, 3, 32, 32)),
    "transformer encoder": Case(_encoder, (8, 64, 128)),
    "LSTM, 32 steps": Case(partial(nn.LSTM, 64, 128, batch_first=True), (32, 32, 64)),
    "LeNet-5": Case(LeNet5, (64, 1, 32, 32), has_workers=True),
    "ResNet-20, CIFAR": Case(partial(resnet_for_cifar, 20), (16, 3, 32, 32)),
    "DenseNet-40, CIFAR": Case(partial(densenet_for_cifar, 40, 12), (4, 3, 32, 32)),
}
PUBLISHED: Mapping[str, str] = {
    "Paleo": "10 to 30 %",
    "table of products": "5 to 19 %",
    "two workers": "none",
    "whole epoch": "none",
}
"""By model, the error that the survey (Ben-Nun and Hoefler 2019, section 2.6) names."""


def predictions(
    rounds: int = 100,
    held_out: Mapping[str, Case] = HELD_OUT,
    fitted: Mapping[str, Case] = FITTED,
    profile: MachineProfile | None = None,
) -> Exhibit:
    """Hold each model against networks that it has not seen.

    Args:
        rounds: steps of an epoch.
        held_out: networks to predict.
        fitted: networks that Paleo's percent of peak is fitted to.
        profile: machine; None: the one that `orchestray calibrate` has measured.

    Raises:
        ConfigError: this machine is not calibrated.
    """
    profile = profile or kept.load()
    with threads(1), connected() if any(case.has_workers for case in held_out.values()) else nullcontext():
        measured = [(count(*case()), median(steps_of(case, FIRST_STEPS))) for case in fitted.values()]
        percent = fitted_percent_of_peak(measured, profile)
        errors: dict[str, list[float]] = {model: [] for model in PUBLISHED}
        rows: list[list[Any]] = []
        for name, case in held_out.items():
            taken_s = steps_of(case, rounds)
            found = errors_of(case, taken_s, profile, percent)
            for model, error in found.items():
                errors[model].append(error)
            cells = [f"{found[model]:+.0%}" if model in found else None for model in PUBLISHED]
            rows.append([name, 1e3 * median(taken_s), *cells])
    findings = [_finding(model, [abs(one) for one in each]) for model, each in errors.items() if each]
    findings.append(f"Paleo's percent of peak, {percent:.2f}, is fitted to {' and '.join(fitted)}.")
    columns = ["network", "step, ms", *(f"{model} is off by" for model in PUBLISHED)]
    return Exhibit("predictions", "Times of training that models predict", columns, rows, findings)


def _finding(model: str, off: list[float]) -> str:
    found = f"{median(off):.0%} in the median, {max(off):.0%} at most, over {len(off)} networks"
    return f"{model}: off by {found}; the survey names {PUBLISHED[model]}."


def errors_of(case: Case, taken_s: list[float], profile: MachineProfile, percent: float) -> dict[str, float]:
    """Return prediction / measurement - 1 of each model.

    Args:
        case: network.
        taken_s: seconds of the steps of an epoch of it.
        profile: machine.
        percent: Paleo's percent of peak.
    """
    counts, step_s = count(*case()), median(taken_s)
    num_first = max(2, min(FIRST_STEPS, len(taken_s) // 2))
    found = {
        "Paleo": paleo_s(counts, profile, percent_of_peak=percent) / step_s - 1,
        "table of products": gemm_lookup_s(counts, profile) / step_s - 1,
    }
    if case.has_workers:
        both_s = two_workers_s(case, num_first)
        found["two workers"] = cpu_distributed_s(step_s, counts.parameter_bytes, profile) / both_s - 1
    return {**found, "whole epoch": epoch_s(taken_s[:num_first], len(taken_s)) / sum(taken_s) - 1}


def count(model: nn.Module, inputs: Any) -> Counted:
    """Return the counted forward and backward pass of a model on `meta`."""
    return counted(partial(_summed, model, inputs), model.parameters())


def _summed(model: nn.Module, inputs: Any) -> Tensor:
    """Return the sum of all outputs, as a loss."""
    return torch.stack([each.sum() for each in tensors_in(call(model, inputs)) if each.is_floating_point()]).sum()


def steps_of(made: Made, num_steps: int) -> list[float]:
    """Return the seconds of the steps of an epoch in this process; of a slow network it has fewer."""
    model, inputs = materialised(*made())
    run = partial(steps_s, partial(_summed, model, inputs), lambda: list(model.parameters()))
    least = min(num_steps, 2 * FIRST_STEPS)
    found = run(least)
    while len(found) < num_steps and sum(found) < _EPOCH_S:
        found += run(min(5, num_steps - len(found)))
    return found


def two_workers_s(made: Made, num_steps: int) -> float:
    """Return the median seconds of a step of two actors of Ray, each with a mini-batch, that add up their gradients.

    Raises:
        TrainingError: one of them has ended before.
    """
    import ray  # late: an experiment without it takes a second less to start

    with connected(), tempfile.TemporaryDirectory() as folder:
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Worker)
        workers = [actor.remote(rank, f"{folder}/meet", ray.cloudpickle.dumps(made), sys.path) for rank in range(2)]
        try:
            steps = ray.get([worker.median_step_s.remote(num_steps) for worker in workers], timeout=_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise TrainingError(
                "Two workers that add up their gradients were to be measured, and one ended before, perhaps for want "
                "of memory."
            ) from error
        finally:
            for worker in workers:
                ray.kill(worker)
        return float(steps[0])


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a cluster of Ray, if there is no connection; what was started for it ends with it."""
    is_there = current() is not None
    cluster = connect()
    try:
        yield
    finally:
        if not is_there:
            cluster.close()


class _Worker:
    """One of two data-parallel workers: an actor with a model and a mini-batch.

    Args:
        rank: number of the worker.
        meeting: path of a file by which the two meet.
        made: pickled function that returns the model and its mini-batch.
        path: where modules are looked for, as in the process that asks.
    """

    def __init__(self, rank: int, meeting: str, made: bytes, path: list[str]) -> None:
        torch.set_num_threads(1)
        sys.path += [each for each in path if each not in sys.path]
        self._model, self._inputs = materialised(*pickle.loads(made)())  # noqa: S301 - this program pickled it
        self._group = Collective.gloo(FileStore(meeting, 2), rank, 2, _TIMEOUT_S)

    def median_step_s(self, num_steps: int) -> float:
        """Return the median seconds of a step: a pass through the model, and the sum of the gradients of both."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        flat = torch.zeros(sum(each.numel() for each in trained))
        taken_s = []
        for _ in range(3 + num_steps):
            self._group.barrier()
            (computed_s,) = steps_s(partial(_summed, self._model, self._inputs), lambda: trained, 1)
            torch.cat([each.grad.view(-1) for each in trained if each.grad is not None], out=flat)
            began_s = perf_counter()
            self._group.all_reduce(flat)
            taken_s.append(computed_s + perf_counter() - began_s)
        self._group.barrier()
        return median(taken_s[3:])
