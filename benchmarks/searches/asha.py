"""Successive halving against random search on `digits`: epochs of all trials together until one has an accuracy.

Both searches draw the same trials. The accuracy is the best that successive halving comes to with its whole budget. It
has that after most of its epochs, and few of the trials that random search trains to their end come to it. An accuracy
that any fair trial has would be found by the search that begins with one. Each epoch is validated, so random search
pays for no epoch after the one that gets there; where none does, it pays for all its epochs, which is too little.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.benchmark import Options, Report, run, say
from orchestray.search.methods.base import Proposal
from orchestray.search.registry.methods import make_method
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Choice, Dimension, Integer, Uniform
from orchestray.trainers.tasks import resolve

SPACE: Mapping[str, Dimension] = {
    "lr": Uniform(1e-5, 10.0, is_log=True),
    "momentum": Uniform(0.0, 0.99),
    "decay": Uniform(1e-6, 1e-1, is_log=True),
    "width": Integer(4, 128, is_log=True),
    "batch_size": Choice((16, 32, 64, 128)),
}
_TRIALS, _EPOCHS = 64, 64


class Trainings:
    """Real trainings, each continued where its trial was held."""

    def __init__(self, data: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> None:
        self.inputs, self.labels, self.held_inputs, self.held_labels = data
        self.seed = seed
        self.running: dict[int, tuple[int, nn.Module, torch.optim.Optimizer]] = {}
        self.accuracies: list[float] = []
        """Validation accuracies after each epoch of all trials, in the order in which they report."""
        self.best_of: dict[int, float] = {}
        """The best of each trial's epochs."""

    def accuracy(self, proposal: Proposal, epochs: int) -> float:
        """Return the validation accuracy of a trial that has been trained for `epochs` epochs."""
        done, model, optimizer = self.running.get(proposal.trial) or (0, *self._begin(proposal.changes))
        for epoch in range(done, epochs):
            self._epoch(model, optimizer, proposal.changes["batch_size"], epoch)
            with torch.no_grad():
                right = model(self.held_inputs).argmax(1) == self.held_labels
            self.accuracies.append(float(right.double().mean()))
            self.best_of[proposal.trial] = max(self.best_of.get(proposal.trial, 0.0), self.accuracies[-1])
        self.running[proposal.trial] = (epochs, model, optimizer)
        return self.accuracies[-1]

    def epochs_until(self, accuracy: float) -> int | None:
        """Return the epochs of all trials together up to the first that came to it; None: none did."""
        return next((number for number, one in enumerate(self.accuracies, start=1) if one >= accuracy), None)

    def _begin(self, changes: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(64, changes["width"]), nn.ReLU(), nn.Linear(changes["width"], 10))
        rates = {"lr": changes["lr"], "momentum": changes["momentum"], "weight_decay": changes["decay"]}
        return model, torch.optim.SGD(model.parameters(), **rates)

    def _epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, epoch: int) -> None:
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        for rows in order.split(batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(self.inputs[rows]), self.labels[rows]).backward()
            optimizer.step()


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and labels of the built-in task, of training and validation."""
    task = resolve("digits")(hidden=[8])
    training, validation = (task.to_batch(task.dataset(split)) for split in ("train", "validation"))
    return training["inputs"], training["targets"], validation["inputs"], validation["targets"]


def measure(report: Report, options: Options) -> None:
    torch.set_num_threads(1)
    seeds = options.rounds(5)
    trials, epochs = (16, 16) if options.quick else (_TRIALS, _EPOCHS)
    report.settings = {"seeds": seeds, "trials": trials, "epochs_per_trial": epochs}
    data = load()
    halved, plain, lost, parts, num_never = [], [], [], [], 0
    for seed in range(seeds):
        say(f"seed {seed}")
        ours, peer = Trainings(data, seed), Trainings(data, seed)
        for kind, given, trainings in (("asha", {"eta": 4, "grace_steps": 1}, ours), ("random", {}, peer)):
            method = make_method(kind, space=SPACE, trials=trials, steps_per_trial=epochs, seed=seed, **given)
            simulate(method, trainings.accuracy, workers=2)
        target = max(ours.accuracies)
        reached = peer.epochs_until(target)
        num_never += reached is None
        halved.append(float(ours.epochs_until(target) or len(ours.accuracies)))
        plain.append(float(reached or len(peer.accuracies)))
        lost.append(max(peer.accuracies) - target)
        parts.append(statistics.mean(best >= target for best in peer.best_of.values()))
        found = "never" if reached is None else f"after {reached}"
        whole = f"{len(ours.accuracies)} and {len(peer.accuracies)} epochs in all"
        report.notes.append(f"Seed {seed}: {target:.4f} after {halved[-1]:.0f} epochs, random search {found}; {whole}.")
    report.notes.append(f"Random search never got there, and pays for all its epochs, in {num_never} of {seeds} seeds.")
    report.add("epochs of successive halving until its best accuracy", "epochs", halved)
    report.add("epochs of random search until that accuracy", "epochs", plain)
    report.add("part of the trials of random search that come to it", "", parts)
    report.add("accuracy that random search ends above successive halving", "", lost)
    ratio = report.compare("epochs until that accuracy, successive halving / random search", halved, plain)
    report.goal("epochs until that accuracy, part of those of random search", ratio, 0.25)
    report.goal("accuracy lost to random search", statistics.median(lost), 0.005)


if __name__ == "__main__":
    run("asha", "Epochs that successive halving and random search need for the same accuracy on digits.", measure)
