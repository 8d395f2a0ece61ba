"""Successive halving against random search on `digits`: epochs until a search has found an accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import Options, Report, run, say
from torch import Tensor, nn
from torch.nn import functional

from orchestray.search.methods.base import Proposal
from orchestray.search.methods.registry import make_method
from orchestray.search.simulate import Simulated, simulate
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

    def accuracy(self, proposal: Proposal, epochs: int) -> float:
        """Validation accuracy of a trial that has been trained so many epochs."""
        done, model, optimizer = self.running.get(proposal.trial) or (0, *self._begin(proposal.changes))
        for epoch in range(done, epochs):
            self._epoch(model, optimizer, proposal.changes["batch_size"], epoch)
        self.running[proposal.trial] = (epochs, model, optimizer)
        with torch.no_grad():
            return float((model(self.held_inputs).argmax(1) == self.held_labels).double().mean())

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
    """Inputs and labels of the built-in task, of training and validation."""
    task = resolve("digits")(hidden=[8])
    training, validation = (task.to_batch(task.dataset(split)) for split in ("train", "validation"))
    return training["inputs"], training["targets"], validation["inputs"], validation["targets"]


def measure(report: Report, options: Options) -> None:
    torch.set_num_threads(1)
    seeds = options.rounds(5)
    trials, epochs = (16, 16) if options.quick else (_TRIALS, _EPOCHS)
    report.settings = {"seeds": seeds, "trials": trials, "epochs_per_trial": epochs}
    data = load()
    ratios, halved, plain, lost = [], [], [], []
    for seed in range(seeds):
        say(f"seed {seed}")
        search: Callable[[str, dict[str, Any]], Simulated] = lambda kind, given, seed=seed: simulate(  # noqa: E731
            make_method(kind, space=SPACE, trials=trials, steps_per_trial=epochs, seed=seed, **given),
            Trainings(data, seed).accuracy,
            workers=2,
        )
        ours, peer = search("asha", {"eta": 4, "grace_steps": 1}), search("random", {})
        assert ours.best.score is not None
        assert peer.best.score is not None
        lost.append(peer.best.score - ours.best.score)
        halved.append(float(ours.steps))
        plain.append(float(peer.steps))
        ratios.append(ours.steps / peer.steps)
    report.add("epochs of successive halving", "epochs", halved)
    report.add("epochs of random search", "epochs", plain)
    report.add("accuracy that random search ends above successive halving", "", lost)
    report.compare("epochs, successive halving / random search", halved, plain)
    report.goal("epochs, part of those of random search", statistics.median(ratios), 0.25)
    report.goal("accuracy lost to random search", statistics.median(lost), 0.005)


if __name__ == "__main__":
    run("asha", "Epochs that successive halving and random search need for the same accuracy on digits.", measure)
