"""A model that predicts the score of answers from evaluated answers, which may be shorter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from orchestray.search.methods.base import rng_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orchestray.search.spaces.architectures.choices import Decision

Description = Mapping[str, int]

_NUM_MEMBERS = 5
_HIDDEN = 64
_PENALTY = 0.1


class Surrogate:
    """The mean of five small networks, each fitted to four fifths of the known scores.

    It is an ensemble as in Liu et al., "Progressive Neural Architecture Search", ECCV 2018, section 3.4. The hidden
    layer of each network is random, and the inputs are connected to the output as well. Only the output's weights are
    fitted, by penalised least squares. So a fit to thousands of trials takes milliseconds; the paper's predictor is
    trained by gradients.

    A sequence of answers is described by the option of each choice, and by how often each option was taken. For the
    counts, numbers in the names of choices are left out, so that the first nodes of a cell predict the next ones.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._columns: dict[str, int] = {}
        self._members: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        """Hidden layer and output weights of each network."""
        self._mean = 0.0

    def fit(self, described: Sequence[Description], scores: Sequence[float]) -> None:
        """Fit the networks to evaluated sequences, described by `describe`, and their scores."""
        names = sorted(set(chain.from_iterable(described)))
        self._columns = {name: index for index, name in enumerate(names)}
        inputs, targets = self._matrix(described), np.asarray(scores, dtype=np.float64)
        self._mean = float(targets.mean())
        rng = rng_of(self._seed)
        places = rng.permutation(len(targets)) % _NUM_MEMBERS
        num_inputs, centred = inputs.shape[1], targets - self._mean
        products = inputs.T @ inputs  # of all; the part that a member does not see is subtracted
        self._members = []
        for member in range(_NUM_MEMBERS):
            hidden = rng.normal(0.0, num_inputs**-0.5, (num_inputs, _HIDDEN))
            seen = places != member if len(targets) >= 2 * _NUM_MEMBERS else np.full(len(targets), True)
            used, unseen = inputs[seen], inputs[~seen]
            units = np.tanh(used @ hidden)
            across = used.T @ units
            gram = np.block([[products - unseen.T @ unseen, across], [across.T, units.T @ units]])
            gram[np.diag_indices_from(gram)] += _PENALTY
            wanted = np.concatenate([used.T @ centred[seen], units.T @ centred[seen]])
            self._members.append((hidden, np.linalg.solve(gram, wanted)))

    def predict(self, described: Sequence[Description]) -> NDArray[np.float64]:
        """Return the predicted scores of some sequences, [sequences]."""
        inputs = self._matrix(described)
        predicted = [_features(inputs, hidden) @ weights for hidden, weights in self._members]
        return np.asarray(self._mean + np.mean(predicted, axis=0))

    def _matrix(self, described: Sequence[Description]) -> NDArray[np.float64]:
        """Return the inputs, [sequences, columns]; options that no evaluated sequence had are left out."""
        matrix = np.zeros((len(described), max(len(self._columns), 1)))
        lengths = [len(one) for one in described]
        rows = np.repeat(np.arange(len(described)), lengths)
        found = map(self._columns.get, chain.from_iterable(described), repeat(-1))
        columns = np.fromiter(found, np.int64, len(rows))
        values = np.fromiter(chain.from_iterable(one.values() for one in described), np.float64, len(rows))
        known = columns >= 0
        matrix[rows[known], columns[known]] = values[known]
        return matrix


def describe(sequence: Sequence[Decision]) -> Description:
    """Return the number of times that a sequence of answers has each feature of the surrogate."""
    counts: Counter[str] = Counter()
    for one in sequence:
        counts[f"{one.name}={one.value}"] += 1
        counts[f"any {_without_numbers(one.name)}={one.value}"] += 1
    return counts


@lru_cache(maxsize=4096)
def _without_numbers(name: str) -> str:
    return re.sub("[0-9]+", "#", name)


def _features(inputs: NDArray[np.float64], hidden: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([inputs, np.tanh(inputs @ hidden)], axis=1)
