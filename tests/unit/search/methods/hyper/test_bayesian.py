"""Bayesian optimisation: the process and its gradient, the estimator, and what is proposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import check_grad
from torch import nn

from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.hyper.bayesian import Bayesian
from orchestray.search.methods.hyper.encoding import Encoded, Encoder
from orchestray.search.methods.hyper.gaussian_process import Kernel, Posterior, _loss, log_expected_improvement
from orchestray.search.methods.hyper.history import History
from orchestray.search.methods.hyper.surrogates import _standardised
from orchestray.search.methods.hyper.tpe import Parzen, _improvements
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.base import Genome, Graph
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose
from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform
from support.functions import BRANIN_SPACE, branin
from support.replayed import replay

MIXED: dict[str, Dimension] = {
    "x": Uniform(0.0, 1.0),
    "n": Integer(1, 64, is_log=True),
    "kind": Choice(("a", "b", "c")),
    "flag": Binary(),
}
Model = Literal["gaussian_process", "tpe"]


def mixed(proposal: Proposal, _step: int) -> float:
    values = proposal.changes
    return (
        -((values["x"] - 0.3) ** 2)
        - 0.1 * math.log2(values["n"] / 8) ** 2
        + {"a": 0.0, "b": 0.5, "c": 0.1}[values["kind"]]
        + 0.2 * values["flag"]
    )


class Layers(ChoiceSpace):
    """One to four layers, each of one of four kinds."""

    def compose(self, choose: Choose) -> None:
        for layer in range(choose("num_layers", [1, 2, 3, 4])):
            choose(f"kind_{layer}", ["conv", "pool", "dense", "none"])

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        raise AssertionError("nothing is built here")

    def graph(self, genome: Genome) -> Graph:
        raise AssertionError("nothing is drawn here")


class Words:
    """A user's own space, as small as allowed: words of six letters."""

    def sample(self, rng: np.random.Generator) -> Any:
        return [int(letter) for letter in rng.integers(4, size=6)]

    def mutate(self, genome: Any, rng: np.random.Generator) -> Any:
        changed = list(genome)
        changed[int(rng.integers(6))] = int(rng.integers(4))
        return changed

    crossover = build = None


def word_score(proposal: Proposal, _step: int) -> float:
    return float(sum(letter == place % 4 for place, letter in enumerate(proposal.genome)))


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_likelihood_is_its_finite_difference() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((20, 3))
    distances = (points.T[:, :, None] - points.T[:, None, :]) ** 2
    scores = rng.normal(size=20)
    for at in (np.zeros(5), np.array([1.0, -2.0, 2.0, 0.5, -3.0])):
        error = check_grad(lambda a: _loss(distances, scores, a)[0], lambda a: _loss(distances, scores, a)[1], at)
        assert error < 1e-4 * max(1, float(np.abs(_loss(distances, scores, at)[1]).max()))


def test_the_posterior_passes_through_the_scores_and_is_unsure_far_away() -> None:
    points = np.linspace(0, 1, 6)[:, None]
    places = np.vstack([points, [[50.0]]])
    kernel = Kernel(np.array([4.0]), 0.0, math.log(1e-8))
    scores = np.sin(6 * points[:, 0])
    posterior = Posterior(kernel, ((points - points.T) ** 2)[None], scores)
    means, deviations = posterior.at(((points - places.T) ** 2)[None])
    assert means[:6] == pytest.approx(scores, abs=1e-5)
    assert deviations[:6].max() < 1e-3
    assert means[6] == pytest.approx(0, abs=1e-6)
    assert deviations[6] == pytest.approx(1, abs=1e-6)


def test_expected_improvement_is_its_integral_and_never_vanishes() -> None:
    means, deviations = np.array([0.0, -0.5, -3.0, 2.0]), np.array([1.0, 0.3, 1.0, 0.1])
    draws = means[:, None] + deviations[:, None] * stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    by_integral = np.maximum(draws - 0.4, 0).mean(1)
    assert np.exp(log_expected_improvement(means, deviations, 0.4)) == pytest.approx(by_integral, rel=2e-2, abs=1e-7)
    far = log_expected_improvement(-np.geomspace(1, 1e5, 40), np.ones(40), 0.0)
    assert np.all(np.isfinite(far))
    assert np.all(np.diff(far) < 0)


def parzen(units: Sequence[Sequence[float]], choices: Sequence[Sequence[int]], *, together: bool) -> Parzen:
    """Return the estimate of points with numbers and choices of three options, all of which they have."""
    points = encoded(units, choices)
    return Parzen(points, [3] * points.choices.shape[1], *all_of(points), np.ones(len(points)), together=together)


def encoded(units: Sequence[Sequence[float]], choices: Sequence[Sequence[int]]) -> Encoded:
    return Encoded(np.array(units), np.array(choices, dtype=np.int64), np.empty((len(units), 0), dtype=np.int64))


def all_of(points: Encoded) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(points.units.shape, bool), np.ones(points.choices.shape, bool)


@pytest.mark.parametrize("together", [True, False])
def test_a_parzen_estimate_is_a_density_and_is_drawn_from(together: bool) -> None:
    estimate = parzen([[0.1, 0.9], [0.12, 0.7], [0.8, 0.2]], [[0], [0], [2]], together=together)
    line = (np.arange(200) + 0.5) / 200
    grid = [[x, y] for x in line for y in line]
    means, total = np.zeros(3), 0.0
    for code in range(3):
        places = encoded(grid, [[code]] * len(grid))
        density = np.exp(estimate.log_density(places, *all_of(places))) / len(grid)
        total += density.sum()
        means += [*(density @ places.units), code * density.sum()]
    assert total == pytest.approx(1, abs=1e-3)
    units, choices = estimate.sample(20_000, np.random.default_rng(0))
    assert [*units.mean(0), choices.mean()] == pytest.approx(means, abs=0.02)


def test_trials_are_drawn_by_their_weights_and_count_by_them() -> None:
    points = encoded([[0.1], [0.9]], [[], []])
    estimate = Parzen(points, [], *all_of(points), np.array([1.8, 0.2]), together=True)
    units, _ = estimate.sample(20_000, np.random.default_rng(0))
    line = encoded([[(x + 0.5) / 500] for x in range(500)], [[]] * 500)
    density = np.exp(estimate.log_density(line, *all_of(line))) / 500
    assert density.sum() == pytest.approx(1, abs=1e-3)
    assert units.mean() == pytest.approx(density @ line.units[:, 0], abs=0.01)
    assert units.mean() < 0.48, "of equal weights it is a half; each density is wide"


def test_good_trials_weigh_by_the_squares_of_their_improvements() -> None:
    history = History(1, 0)
    point = encoded([[0.5]], [[]])
    for score in (0.0, 3.0, 1.0, 2.0):
        history.add(point, None, (score,), ())
    assert _improvements(history, history.best_first(), 2) == pytest.approx(np.array([4.0, 1.0]) / 2.5)
    assert _improvements(history, history.best_first(), 4).tolist() == [1.0] * 4, "there is no other"


def test_keys_that_are_good_together_are_drawn_together_and_else_by_themselves() -> None:
    at = [[x, x] for x in (0.05, 0.1, 0.9, 0.95)] * 5
    dice = np.random.default_rng(0)
    alike = {
        together: float(np.corrcoef(parzen(at, [[]] * 20, together=together).sample(4000, dice)[0].T)[0, 1])
        for together in (True, False)
    }
    assert alike[True] > 0.7
    assert abs(alike[False]) < 0.1


def test_a_trial_says_nothing_about_keys_that_it_does_not_have() -> None:
    points = encoded([[0.1, 0.1], [0.12, 0.1]], [[0], [0]])
    estimate = Parzen(points, [3], np.array([[True, False]] * 2), np.zeros((2, 1), bool), np.ones(2), together=True)
    line = [[0.1, y] for y in (0.1, 0.5, 0.9)]
    places = encoded(line, [[0], [1], [2]])
    assert np.ptp(estimate.log_density(places, *all_of(places))) < 0.15  # only the even one bends


def test_points_come_back_from_their_encoding() -> None:
    encoder = Encoder(MIXED, has_genomes=True)
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = {key: dimension.sample(rng) for key, dimension in MIXED.items()}
        point = encoder.encode(values, {"a": [1, 2]})
        decoded = encoder.decode(encoder.snap(point.units)[0], point.choices[0])
        assert decoded == pytest.approx(values)
    one, other = encoder.encode(values, {"a": [1, 2]}), encoder.encode(values, {"a": [1, 3, 4]})
    assert encoder.distances(one, other)[:, 0, 0].tolist() == [0, 0, 0, 0, 3], "a length, a changed and a new scalar"


def test_bad_scores_far_off_leave_the_good_ones_apart() -> None:
    scores = np.append(np.linspace(0, 1, 20), [-1e3, -1e4])
    standardised = _standardised(scores)
    assert standardised.mean() == pytest.approx(0, abs=1e-9)
    assert standardised.std() == pytest.approx(1)
    assert np.all(np.diff(standardised[:20]) > 0)
    assert np.all(standardised[20:] < standardised[0])
    plain = (scores - scores.mean()) / scores.std()
    assert np.ptp(standardised[:20]) > 100 * np.ptp(plain[:20])
    assert np.all(_standardised(np.ones(5)) == 0)


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_numbers_integers_choices_and_flags_are_searched_together(model: Model) -> None:
    searched = simulate(Bayesian(space=MIXED, model=model, trials=60), mixed, workers=2)
    best = searched.best.proposal.changes
    assert best["kind"] == "b"
    assert best["flag"]
    assert searched.best.score is not None
    assert searched.best.score > 0.6, "0.7 is the best there is"


def two_scores(model: str, *, has_bounds: bool, num_trials: int = 45) -> np.ndarray:
    """Maximise -(x - 1)^2 and -(x + 1)^2, both less by y^2, in numbers around 0; return the points [n, 2]."""
    space = {"x": Uniform(-3.0, 3.0), "y": Uniform(-2.0, 3.0)}
    method = Bayesian(space=space, model=model, trials=num_trials, initial=8, seed=1)  # type: ignore[arg-type]
    points = []
    for _ in range(num_trials):
        proposal = method.ask()
        assert proposal is not None
        x, y = proposal.changes["x"], proposal.changes["y"]
        points.append((x, y))
        scores = (-((x - 1) ** 2) - y**2, -((x + 1) ** 2) - y**2)
        violations = (-x,) if has_bounds else ()
        method.tell(Finished(proposal.trial, "succeeded", 1, scores[0], scores, violations=violations))
    return np.array(points)


@pytest.mark.parametrize(("model", "width"), [("gaussian_process", 0.35), ("tpe", 0.9)])
def test_several_objectives_are_searched_along_their_whole_front(model: str, width: float) -> None:
    points = two_scores(model, has_bounds=False)
    near = np.sort(points[(np.abs(points[:, 1]) < 0.3) & (np.abs(points[:, 0]) < 1.2)][:, 0])
    assert np.diff(np.concatenate([[-1.0], near, [1.0]])).max() < width, "of a front from -1 to 1"


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_of_several_objectives_the_feasible_part_of_the_front_is_searched(model: str) -> None:
    late = two_scores(model, has_bounds=True)[-15:]
    assert np.mean(late[:, 0] > -0.1) > 0.6, "feasible is x >= 0"


def widths(untrained: float, seed: int = 0, trials: int = 24) -> list[tuple[int, float]]:
    """Search a width of at most 300, where more is better, beside two other numbers.

    Args:
        untrained: score of a width above that, which is not trained.
        seed: seed of the search.
        trials: number of trials.

    Returns:
        The width of each trial, and the accuracy that it has, or would have.
    """
    space: dict[str, Dimension] = {
        "width": Integer(4, 4096, is_log=True),
        "x": Uniform(-4.0, 0.0),
        "y": Uniform(0.0, 1.0),
    }
    method = Bayesian(space=space, trials=trials, seed=seed)
    found = []
    for _ in range(trials):
        proposal = method.ask()
        assert proposal is not None
        width, x, y = proposal.changes.values()
        accuracy = 0.9 - 0.3 * math.exp(-width / 80) - 0.05 * (x + 2) ** 2 - 0.1 * (y - 0.7) ** 2
        found.append((width, accuracy))
        step, score = (0, untrained) if width > 300 else (9, accuracy)
        method.tell(Finished(proposal.trial, "succeeded", step, score, (score,), violations=(width / 300 - 1,)))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_the_score_of_what_was_not_trained_for_its_bound_hides_nothing_beside_it(seed: int) -> None:
    found = widths(0.1, seed)
    assert found == widths(-5.0, seed)
    best = max(accuracy for width, accuracy in found if width <= 300)
    assert best > 0.9 - 0.3 * math.exp(-300 / 80) - 5e-4
    assert sum(width > 300 for width, _ in found) <= 6, "the bound is learnt"


def test_without_a_trained_trial_the_bound_is_searched() -> None:
    method = Bayesian(space={"w": Uniform(0.0, 1.0)}, trials=12, initial=2)
    points = []
    for _ in range(12):
        proposal = method.ask()
        assert proposal is not None
        points.append(proposal.changes["w"])
        violation = points[-1] / 0.02 - 1
        told = Finished(proposal.trial, "succeeded", 0, 0.1, (0.1,), violations=(violation,))
        method.tell(told if violation > 0 else Finished(proposal.trial, "succeeded", 9, 0.9, (0.9,)))
    assert min(points[:2]) > 0.02 >= min(points)


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(model: Model) -> None:
    make = lambda: Bayesian(space=MIXED, model=model, trials=30, seed=5)  # noqa: E731
    replay(make(), simulate(make(), mixed, workers=3, seconds_per_step=lambda p: 1 + p.trial % 3).calls)


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_no_point_comes_twice_and_a_finite_space_is_exhausted(model: Model) -> None:
    space: dict[str, Dimension] = {"n": Integer(1, 6), "kind": Choice(("a", "b")), "flag": Binary()}
    searched = simulate(Bayesian(space=space, model=model, trials=100), lambda p, _s: float(p.changes["n"]), workers=2)
    points = [tuple(trial.proposal.changes.values()) for trial in searched.trials.values()]
    assert len(points) == len(set(points)) == 24


def test_a_summit_that_promises_no_more_is_left_for_places_elsewhere_and_still_looked_at() -> None:
    space: dict[str, Dimension] = {name: Uniform(0.0, 1.0) for name in ("x", "y", "z")}

    def peak(proposal: Proposal, _step: int) -> float:
        return float(np.exp(-8 * sum((value - 0.3) ** 2 for value in proposal.changes.values())))

    searched = simulate(Bayesian(space=space, trials=56), peak)
    away = [max(abs(v - 0.3) for v in trial.proposal.changes.values()) for trial in searched.trials.values()]
    assert searched.best.score is not None
    assert searched.best.score > 0.99999, "a summit is known well before it is left"
    assert sum(distance > 0.2 for distance in away[-15:]) >= 8, "two of three are made elsewhere"
    assert sum(distance < 0.1 for distance in away[-15:]) >= 2, "and one of three where the best is"


@pytest.mark.parametrize("pending", ["believer", "liar"])
def test_workers_side_by_side_try_points_apart_from_each_other(pending: Literal["believer", "liar"]) -> None:
    method = Bayesian(space=BRANIN_SPACE, trials=100, pending=pending)
    searched = simulate(Bayesian(space=BRANIN_SPACE, trials=12, pending=pending), branin)
    replay(method, searched.calls)
    points = [np.array(list(p.changes.values())) for p in (method.ask() for _ in range(5)) if p is not None]
    apart = [float(np.abs(a - b).max()) for number, a in enumerate(points) for b in points[:number]]
    assert len(points) == 5
    assert min(apart) > 0.02, "of a range of 15"


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_all_trials_failing_or_scoring_alike_or_infinitely_is_survived(model: Model) -> None:
    def fail(_proposal: Proposal, _step: int) -> float:
        raise RuntimeError("diverged")

    for evaluate in (fail, lambda _p, _s: 1.0, lambda p, _s: -math.inf if p.trial % 2 else p.changes["x"]):
        searched = simulate(Bayesian(space=MIXED, model=model, trials=20), evaluate)
        assert len(searched.trials) == 20


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_architectures_are_searched_in_a_space_of_choices_each_network_once(model: Model) -> None:
    def evaluate(proposal: Proposal, _step: int) -> float:
        kinds = [proposal.genome.get(f"kind_{layer}") for layer in range(4)]
        return float(sum(kind == wanted for kind, wanted in zip(kinds, ["conv", "conv", "pool", "dense"], strict=True)))

    found = []
    for seed in range(3):
        searched = simulate(Bayesian(space={}, architecture=Layers(), model=model, trials=40, seed=seed), evaluate)
        genomes = [str(sorted(trial.proposal.genome.items())) for trial in searched.trials.values()]
        assert len(set(genomes)) == len(genomes) == 40
        found.append(searched.best.score)
    assert np.median(found) == 4, "one of the 340 networks"


@pytest.mark.parametrize("model", ["gaussian_process", "tpe"])
def test_a_users_own_space_is_searched_beside_hyper_parameters(model: Model) -> None:
    found = []
    for seed in range(3):
        method = Bayesian(
            space={"x": Uniform(0.0, 1.0)},
            architecture=Words(),  # type: ignore[arg-type]
            model=model,
            trials=36,
            seed=seed,
        )
        searched = simulate(method, lambda p, step: word_score(p, step) - abs(p.changes["x"] - 0.5), workers=2)
        found.append(searched.best.score)
    assert np.median(found) > 4.5, "of 6; the best of 36 draws has less than 4 in the mean"
