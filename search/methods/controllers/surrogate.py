"""A model that predicts the score of answers from answers that were tried, also of longer ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from orchestray.search.methods.base import rng_of
from orchestray.trainers.optimizers import AdamW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orchestray.search.spaces.choices import Decision

_NUM_MEMBERS = 5
_HIDDEN = 32
_NUM_STEPS = 200
_LEARNING_RATE = 0.02
_WEIGHT_DECAY = 1e-2


class Surrogate:
    """The mean of five small networks, each fitted to four fifths of what is known (Liu et al., "Progressive Neural
    Architecture Search", ECCV 2018, section 3.4: an ensemble of multi-layer perceptrons).

    A sequence of answers is described by how often each option was taken (numbers in the names of choices left out, so
    that what is learned of the first nodes of a cell tells of the next), and by which option each choice has.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._columns: dict[str, int] = {}
        self._weights: list[torch.Tensor] = []
        self._mean, self._scale = 0.0, 1.0

    def fit(self, sequences: Sequence[Sequence[Decision]], scores: Sequence[float]) -> None:
        """Learn from sequences that were tried, and their scores."""
        described = [_described(sequence) for sequence in sequences]
        names = sorted({name for one in described for name in one})
        self._columns = {name: index for index, name in enumerate(names)}
        targets = torch.tensor(list(scores), dtype=torch.float64)
        self._mean, self._scale = float(targets.mean()), float(targets.std(correction=0)) or 1.0
        self._train(torch.from_numpy(self._matrix(described)), (targets - self._mean) / self._scale)

    def predict(self, sequences: Sequence[Sequence[Decision]]) -> NDArray[np.float64]:
        """The scores expected of some sequences, [sequences]."""
        if not sequences:
            return np.zeros(0)
        inputs = torch.from_numpy(self._matrix([_described(sequence) for sequence in sequences]))
        with torch.no_grad():
            means = _forward(self._weights, inputs).mean(0)
        return np.asarray(means * self._scale + self._mean)

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        rng = rng_of(self._seed)
        width = max(inputs.shape[1], 1)
        drawn = [rng.normal(0, width**-0.5, (_NUM_MEMBERS, width, _HIDDEN)), np.zeros((_NUM_MEMBERS, 1, _HIDDEN))]
        drawn += [rng.normal(0, _HIDDEN**-0.5, (_NUM_MEMBERS, _HIDDEN, 1)), np.zeros((_NUM_MEMBERS, 1, 1))]
        self._weights = [torch.from_numpy(values).requires_grad_() for values in drawn]
        places = torch.from_numpy(rng.permutation(len(targets)) % _NUM_MEMBERS)
        is_seen = (places[None, :] != torch.arange(_NUM_MEMBERS)[:, None]) | (len(targets) < 2 * _NUM_MEMBERS)
        optimizer = AdamW(weight_decay=_WEIGHT_DECAY)
        optimizer.init((str(index), weight.detach()) for index, weight in enumerate(self._weights))
        for _ in range(_NUM_STEPS):
            loss = ((_forward(self._weights, inputs) - targets).square() * is_seen).sum(1) / is_seen.sum(1)
            optimizer.step(self._weights, torch.autograd.grad(loss.sum(), self._weights), _LEARNING_RATE)

    def _matrix(self, described: Sequence[Counter[str]]) -> NDArray[np.float64]:
        """[sequences, columns]; what no sequence that was tried had is left out."""
        matrix = np.zeros((len(described), max(len(self._columns), 1)))
        for row, one in enumerate(described):
            known = [(self._columns[name], value) for name, value in one.items() if name in self._columns]
            if known:
                columns, values = zip(*known, strict=True)
                matrix[row, columns] = values
        return matrix


def _described(sequence: Sequence[Decision]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for one in sequence:
        counts[f"{one.name}={one.value}"] += 1
        counts[f"any {re.sub('[0-9]+', '#', one.name)}={one.value}"] += 1
    return counts


def _forward(weights: Sequence[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """[members, sequences]."""
    first, first_bias, second, second_bias = weights
    found: torch.Tensor = torch.tanh(inputs @ first + first_bias) @ second + second_bias
    scores: torch.Tensor = found[..., 0]
    return scores
