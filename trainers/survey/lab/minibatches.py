"""The trade-off of the minibatch size on digits: the time of a step, and accuracy after the same passes over the data.

Each size has the best of some rates, for the accuracy and for the steps to a target apart (Shallue et al. 2019): twice
the batch first takes half of the steps, and later saves next to none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.convergence.batch_regions import StepTime, regions
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import times_s
from orchestray.trainers.tasks.digits import Digits

SIZES = (8, 32, 128, 512, 1024)
RATES = (0.02, 0.06, 0.2, 0.6)
_CHANNELS = (8, 16)
_MOMENTUM = 0.9
_EPOCHS, _TARGET, _LEAST_STEPS = 5, 0.95, 60
"""Passes over the data after which the accuracy counts; the accuracy to come to, and the least steps to try it for."""
_TOLERANCE = 0.02
"""Two standard errors of an accuracy of 0.97 on the 359 images."""
_LOOK_SAMPLES = 256
"""Samples between two validations."""


@dataclass(frozen=True)
class Learned:
    """The result of a training."""

    accuracy: float
    """Validation accuracy after the passes over the data."""
    steps_to_target: int | None
    """Steps to the target; None: not reached."""


class Training:
    """A training of a convolutional network on digits, with one minibatch size and one rate.

    Args:
        batch_size: samples of a minibatch.
        lr: constant learning rate.
        seed: that of the weights and of the order.
    """

    def __init__(self, batch_size: int, lr: float, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.batch_size = batch_size
        self.network = Digits(hidden=_CHANNELS, model="cnn").build_model()
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=lr, momentum=_MOMENTUM)
        (self._images, self._labels), (self._held_images, self._held_labels) = (
            _images(split) for split in ("training", "validation")
        )
        self._order: list[Tensor] = []

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a minibatch."""
        return nn.functional.cross_entropy(self.network(images), labels)

    def step(self) -> None:
        """Make a step with the next minibatch; passes over the data follow each other, each in an order of its own."""
        while sum(map(len, self._order)) < self.batch_size:
            self._order.append(torch.randperm(len(self._images)))
        waiting = torch.cat(self._order)
        chosen, self._order = waiting[: self.batch_size], [waiting[self.batch_size :]]
        self._optimizer.zero_grad()
        self.loss(self._images[chosen], self._labels[chosen]).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def accuracy(self) -> float:
        """Return the validation accuracy."""
        self.network.eval()
        with torch.no_grad():
            right = self.network(self._held_images).argmax(1) == self._held_labels
        self.network.train()
        return float(right.double().mean())

    def learn(self, epochs: int) -> Learned:
        """Train for some passes over the data, and for `_LEAST_STEPS` if need be; return what was learned."""
        num_steps = max(1, epochs * len(self._images) // self.batch_size)
        every = max(1, _LOOK_SAMPLES // self.batch_size)
        accuracy, reached = 0.0, None
        for step in range(1, max(num_steps, _LEAST_STEPS) + 1):
            self.step()
            if step == num_steps or (reached is None and step % every == 0):
                found = self.accuracy()
                accuracy = found if step == num_steps else accuracy
                reached = step if reached is None and found >= _TARGET else reached
            if step >= num_steps and reached is not None:
                break
        return Learned(accuracy, reached)


def _images(split: str) -> tuple[Tensor, Tensor]:
    task = Digits(hidden=_CHANNELS, model="cnn")
    batch = task.to_batch(task.dataset(split))
    return batch["inputs"], batch["targets"]


def best_of_rates(batch_size: int, rates: Sequence[float], epochs: int) -> tuple[float, float, int | None]:
    """Return the best accuracy of all rates, its rate, and the fewest steps of all rates to the target."""
    found = {lr: Training(batch_size, lr).learn(epochs) for lr in rates}
    best = max(found, key=lambda lr: found[lr].accuracy)
    steps = [one.steps_to_target for one in found.values() if one.steps_to_target is not None]
    return found[best].accuracy, best, min(steps, default=None)


def scaling_of(steps: Mapping[int, int | None]) -> str | None:
    """Return how the fewest steps to the target fall with the first and with the last growth of the minibatch.

    Args:
        steps: steps by minibatch size, in rising order; None: the target was not reached.

    Returns:
        A sentence, or None if fewer than three sizes reached the target.
    """
    found = [(size, number) for size, number in steps.items() if number is not None]
    if len(found) < 3:
        return None
    first, last = (
        f"{before / after:.2g} times from {small} to {large}, {large / small:.2g} times the batch"
        for (small, before), (large, after) in (found[:2], found[-2:])
    )
    return f"Steps to {_TARGET} fall {first}, and {last}."


def minibatches(
    rounds: int = 20, sizes: Sequence[int] = SIZES, rates: Sequence[float] = RATES, epochs: int = _EPOCHS
) -> Exhibit:
    """Train with each minibatch size, time its steps, and say which region it is in.

    Args:
        rounds: rounds of the timings.
        sizes: minibatch sizes, in rising order.
        rates: learning rates that each size may choose from.
        epochs: passes over the data after which the accuracy counts.
    """
    taken = times_s({str(size): Training(size, rates[0]).step for size in sizes}, rounds)
    steps_s = [median(taken[str(size)]) for size in sizes]
    time = StepTime.fitted(sizes, steps_s)
    learned = dict(zip(sizes, map(partial(best_of_rates, rates=rates, epochs=epochs), sizes), strict=True))
    accuracies = {size: one[0] for size, one in learned.items()}
    of_size = regions(accuracies, time, tolerance=_TOLERANCE)
    rows: list[list[Any]] = []
    for size, step_s in zip(sizes, steps_s, strict=True):
        accuracy, lr, steps = learned[size]
        seconds = None if steps is None else steps * step_s
        rows.append([size, 1e3 * step_s, size / step_s, lr, accuracy, steps, seconds, of_size[size]])
    quickest = min((row for row in rows if row[6] is not None), key=lambda row: row[6], default=None)
    findings = [
        f"A step takes {1e3 * time.fixed_s:.2g} ms and {1e6 * time.sample_s:.2g} us a sample.",
        f"Half of the most samples a second are those of a batch of {time.half_speed_size:.0f}.",
        f"Accuracy is {max(accuracies.values()):.3f} at best, and {accuracies[sizes[-1]]:.3f} with {sizes[-1]:,}.",
    ]
    if (scaling := scaling_of({size: learned[size][2] for size in sizes})) is not None:
        findings.append(scaling)
    if quickest is not None:
        findings.append(f"The quickest to an accuracy of {_TARGET} is {quickest[0]}, of region {quickest[7]}.")
    columns = ["batch", "step, ms", "samples/s", "best rate", "accuracy"]
    columns += [f"steps to {_TARGET}", "seconds", "region"]
    title = f"Minibatch sizes on digits, {epochs} passes over the data"
    return Exhibit("minibatches", title, columns, rows, findings)
