"""The ascent of a gain: over numbers, with choices held, with bounds, and by several scores."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.search.methods.hyper.acquisition import Acquisition
from orchestray.search.methods.hyper.encoding import Encoded, Encoder
from orchestray.search.methods.hyper.feasibility import Feasibility
from orchestray.search.methods.hyper.gaussian_process import Kernel, Posterior
from orchestray.search.methods.hyper.history import History
from orchestray.search.methods.hyper.improvement import Best, Front
from orchestray.search.spaces.dimensions import Choice, Dimension, Uniform

SPACE: dict[str, Dimension] = {"x": Uniform(0.0, 1.0), "y": Uniform(0.0, 1.0), "kind": Choice(("a", "b"))}
ENCODER = Encoder(SPACE, has_genomes=False)


def acquisition(num_scores: int, *, has_bounds: bool) -> Acquisition:
    """Return the gain after 30 trials of smooth scores, feasible where x is below 0.6."""
    rng = np.random.default_rng(0)
    history = History(2, 1)
    for _ in range(30):
        values = {key: dimension.sample(rng) for key, dimension in SPACE.items()}
        scores = (np.sin(5 * values["x"]) + values["y"], -values["x"] - values["y"] ** 2)[:num_scores]
        history.add(ENCODER.encode(values), None, scores, (values["x"] - 0.6,) if has_bounds else ())
    points, columns = history.points(), history.objectives().T
    prior = Kernel.prior(ENCODER.typical_lengths())
    posteriors = [Posterior(prior, ENCODER.distances(points, points), column) for column in columns]
    feasibility = Feasibility(ENCODER, prior) if has_bounds else None
    if feasibility is not None:
        feasibility.update(history)
    aim = Best(float(columns[0].max())) if num_scores == 1 else Front(columns.T, np.eye(2))
    return Acquisition(ENCODER, points, posteriors, aim, feasibility)


@pytest.mark.parametrize("has_bounds", [False, True])
@pytest.mark.parametrize("num_scores", [1, 2])
def test_the_ascent_ends_on_a_summit_no_lower_than_its_start_and_moves_free_numbers_only(
    num_scores: int, *, has_bounds: bool
) -> None:
    gain = acquisition(num_scores, has_bounds=has_bounds)
    rng = np.random.default_rng(1)
    for _ in range(5):
        start = ENCODER.encode({key: dimension.sample(rng) for key, dimension in SPACE.items()})
        found = gain.ascend(start, np.array([True, True]))
        held = gain.ascend(start, np.array([True, False]))
        assert found.choices.tolist() == start.choices.tolist()
        assert held.units[0, 1] == start.units[0, 1]
        summit = float(gain.at(found)[0])
        assert min(summit, float(gain.at(held)[0])) >= float(gain.at(start)[0])
        around = np.clip(found.units + 0.002 * rng.normal(size=(50, 2)), 0, 1)
        nearby = gain.at(Encoded(around, np.repeat(found.choices, 50, axis=0), np.repeat(found.genes, 50, axis=0)))
        assert summit >= float(nearby.max()) - 1e-3
