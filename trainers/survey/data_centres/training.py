"""Training in data centres in virtual time: servers of `centre`, a simulated network, and a sparse problem."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.sim.network import Link, SimulatedNetwork
from orchestray.platform.sim.programs import Promise, VirtualHandle
from orchestray.trainers.survey.data_centres.centre import DataCentre, Rules
from orchestray.trainers.survey.data_centres.outbox import Message, Outbox
from orchestray.trainers.survey.lab.timing import threads


class SparseRegression:
    """A least-squares problem whose samples have few features: a worker reads and changes the weights of these alone.

    Each data centre has samples of its own, mostly with the features of its region. No noise: the least loss is 0.
    """

    def __init__(
        self,
        seed: int,
        num_centres: int,
        *,
        num_samples: int = 400,
        num_weights: int = 400,
        num_features: int = 8,
        locality: float = 10.0,
    ) -> None:
        """
        Args:
            seed: seed of the samples.
            num_centres: number of data centres.
            num_samples: samples of each data centre.
            num_weights: number of weights.
            num_features: features of a sample that are not 0.
            locality: how many times as often a sample has a feature of its own region as another.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (num_centres, num_samples)
        region = torch.arange(num_weights) * num_centres // num_weights
        often = torch.where(region == torch.arange(num_centres)[:, None], locality, 1.0)
        # Without replacement by these weights: the largest u^(1 / weight) (Efraimidis and Spirakis 2006).
        keys = torch.rand(*shape, num_weights, generator=generator) ** (1 / often)[:, None]
        chosen = keys.topk(num_features, dim=-1).indices
        values = torch.randn(*shape, num_features, generator=generator, dtype=torch.float64)
        self._chosen, self._values = chosen, values
        self.inputs = torch.zeros(*shape, num_weights, dtype=torch.float64).scatter_(-1, chosen, values)
        self.targets = self.inputs @ torch.randn(num_weights, generator=generator, dtype=torch.float64)

    @property
    def num_weights(self) -> int:
        return self.inputs.shape[-1]

    def rows(self, centre: int, dice: random.Random, size: int) -> Tensor:
        """Draw a minibatch of a data centre's samples, `[size]`."""
        return torch.tensor(dice.sample(range(self.inputs.shape[1]), size))

    def places(self, centre: int, rows: Tensor) -> Tensor:
        """Return the indices of the weights that samples need, int64, ascending."""
        places: Tensor = torch.unique(self._chosen[centre, rows])
        return places

    def gradient(self, centre: int, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the samples' mean loss by these weights, in the shape of `places`."""
        inputs = self.inputs[centre, rows][:, places]
        return inputs.T @ (inputs @ weights - self.targets[centre, rows]) / len(rows)

    def loss(self, weights: Tensor) -> float:
        """Return the mean loss over the samples of all data centres."""
        outputs = (self._values * weights[self._chosen]).sum(-1)  # of 8 weights a sample, of 400
        return float((outputs - self.targets).square().mean() / 2)


@dataclass(frozen=True)
class Setting:
    """The machines, the network, and the training.

    Args:
        link: link between any two data centres, in each direction.
        step_s: mean seconds that a worker of each data centre computes for a minibatch.
        num_workers: workers of each data centre.
        batch_size: samples of a worker's minibatch.
        lr: learning rate.
        target: loss at which the training ends, as a part of the loss at its start.
        most_clocks: clocks after which a worker gives up.
    """

    link: Link
    step_s: tuple[float, ...] = (0.010, 0.010, 0.015)
    num_workers: int = 2
    batch_size: int = 8
    lr: float = 0.4
    target: float = 0.01
    most_clocks: int = 500


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        seconds: virtual seconds until every data centre's copy had reached it; None: it was not reached.
        clocks: clocks that the slowest data centre had completed.
        num_bytes: bytes between data centres.
        most_ahead: most clocks that a worker was ahead of the slowest data centre.
        waited_s: seconds that workers waited, by the rule for which they did.
    """

    seconds: float | None
    clocks: int
    num_bytes: int
    most_ahead: int
    waited_s: Mapping[str, float]


class Witness:
    """A witness of a training, which does nothing; a subclass may."""

    def reads(self, reader: DataCentre, places: Tensor) -> None:
        """Note the parameters that a worker of a data centre is about to read, by their indices."""

    def updated(self, centre: DataCentre) -> None:
        """Note that a worker of a data centre has made its change."""

    def arrived(self, receiver: DataCentre, sender: int, message: Message) -> None:
        """Note a message that a data centre has received."""


class Training:
    """A training in virtual time. The seed decides everything.

    Attributes:
        centres: the servers.
        network: network between them, and the clock.
    """

    def __init__(
        self,
        rules: Rules,
        setting: Setting,
        seed: int = 0,
        *,
        witness: Witness | None = None,
    ) -> None:
        """
        Args:
            rules: rules between the data centres.
            setting: machines, network and training.
            seed: seed.
            witness: witness of what happens.
        """
        self._setting, self._seed = setting, seed
        self._witness = witness or Witness()
        self.network = SimulatedNetwork(setting.link, seed=seed)
        numbers = range(len(setting.step_s))
        self._problem = SparseRegression(seed, len(numbers))
        start = torch.zeros(self._problem.num_weights, dtype=torch.float64)
        self._goal = setting.target * self._problem.loss(start)
        self._outboxes = {
            (sender, receiver): Outbox(start, partial(self._transmit, sender, receiver), announces=rules.announces)
            for sender in numbers
            for receiver in numbers
            if sender != receiver
        }
        self.centres = [
            DataCentre(
                number,
                start.clone(),
                rules,
                {receiver: outbox for (sender, receiver), outbox in self._outboxes.items() if sender == number},
                setting.num_workers,
            )
            for number in numbers
        ]
        self._waiting: list[list[Promise[None]]] = [[] for _ in numbers]
        self._reached_s: float | None = None
        self._most_ahead = 0
        self._waited_s = {"barrier": 0.0, "clock": 0.0}

    def run(self) -> Trained:
        """Train until every data centre's copy has reached the target, or the workers give up."""
        for centre in self.centres:
            for worker in range(self._setting.num_workers):
                self.network.start(f"worker {centre.number}/{worker}", self._program(centre, worker))
        with threads(1):  # the sums are the same on any machine, and so small that more threads take longer
            self.network.run()
        num_bytes = sum(traffic.num_bytes for traffic in self.network.traffic.values())
        clocks = min(centre.clock for centre in self.centres)
        return Trained(self._reached_s, clocks, num_bytes, self._most_ahead, self._waited_s)

    def _has_ended(self) -> bool:
        return self._reached_s is not None

    def _program(self, centre: DataCentre, worker: int) -> Callable[[], Generator[Any, Any, None]]:
        setting, problem, network, number = self._setting, self._problem, self.network, centre.number
        dice = random.Random(f"{self._seed} {number} {worker}")

        def steps() -> Generator[Any, Any, None]:
            for clock in range(setting.most_clocks):
                rows = problem.rows(number, dice, setting.batch_size)
                places = problem.places(number, rows)
                while not self._has_ended() and (rule := centre.blocked_by(worker, places)) is not None:
                    began_s = network.now_s
                    yield self._news(number)
                    self._waited_s[rule] += network.now_s - began_s
                if self._has_ended():
                    return
                self._witness.reads(centre, places)
                gradient = problem.gradient(number, rows, places, centre.values[places])
                yield network.sleep(setting.step_s[number] * dice.uniform(0.8, 1.2))
                if self._has_ended():
                    return
                before = centre.clock
                centre.update(worker, places, gradient.mul(-setting.lr))
                self._most_ahead = max(self._most_ahead, clock + 1 - min(each.clock for each in self.centres))
                self._witness.updated(centre)
                if centre.clock > before:
                    self._look()
                self._wake(number)

        return steps

    def _look(self) -> None:
        if max(self._problem.loss(centre.values) for centre in self.centres) <= self._goal:
            self._reached_s = self.network.now_s
            for centre in self.centres:
                self._wake(centre.number)

    def _news(self, number: int) -> VirtualHandle[None]:
        promise: Promise[None] = Promise()
        self._waiting[number].append(promise)
        return VirtualHandle(promise, "a worker waited for its parameters", inf, self.network)

    def _wake(self, number: int) -> None:
        waiting, self._waiting[number] = self._waiting[number], []
        for promise in waiting:
            promise.succeed()

    def _transmit(self, sender: int, receiver: int, message: Message) -> None:
        def arrive() -> None:
            self.centres[receiver].receive(sender, message)
            self._witness.arrived(self.centres[receiver], sender, message)
            self._wake(receiver)

        free_s = self.network.transmit(str(sender), str(receiver), message.num_bytes, arrive)
        self.network.at(free_s, self._outboxes[sender, receiver].freed)
