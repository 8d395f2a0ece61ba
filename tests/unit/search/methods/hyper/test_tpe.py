"""The Parzen estimator over networks: its candidates are drawn as the good ones are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestray.search.methods.base import Observation, rng_of
from orchestray.search.methods.hyper.bayesian import Bayesian
from orchestray.search.methods.hyper.encoding import Encoder
from orchestray.search.methods.hyper.history import History
from orchestray.search.methods.hyper.tpe import ParzenModel
from orchestray.search.spaces.architectures.chain import Chain
from orchestray.search.spaces.architectures.choices import ChoiceSpace
from orchestray.search.spaces.architectures.hierarchical import Hierarchical
from orchestray.search.spaces.architectures.modules import Modules
from orchestray.search.spaces.dimensions import Uniform


@pytest.mark.parametrize("make", [lambda: Hierarchical(motifs=[4], nodes=[4, 4]), lambda: Modules(stem=2), Chain])
def test_networks_of_a_program_of_choices_are_drawn_as_the_good_ones_in_whatever_format_their_genomes_are(
    make: Callable[[], ChoiceSpace],
) -> None:
    space = make()
    best, chosen = space.sample(rng_of(1)), space.chosen_in(space.sample(rng_of(1)))
    others = [space.sample(rng_of(2, number)) for number in range(170)]
    method = Bayesian(space={}, architecture=space, model="tpe", initial=2, trials=20)
    method.learn([Observation({}, best, 1.0)] * 30 + [Observation({}, other, 0.0) for other in others])
    shares = []
    for _ in range(20):
        proposal = method.ask()
        assert proposal is not None
        own = space.chosen_in(proposal.genome)
        shares.append(sum(own.get(name) == value for name, value in chosen.items()) / len(chosen))
    assert sum(shares) / len(shares) > 0.7, "of networks that are drawn evenly less than half of the choices agree"


def test_a_point_that_is_still_evaluated_counts_as_bad_so_that_others_are_tried_beside_it() -> None:
    encoder, history = Encoder({"x": Uniform(0.0, 1.0)}, has_genomes=False), History(1, 0)
    for x in ((number + 0.5) / 20 for number in range(20)):
        history.add(encoder.encode({"x": x}, None), None, (-abs(x - 0.5),), ())
    model = ParzenModel(encoder, None, seed=0)
    first = model.propose(20, history, [])[0].values["x"]
    running = [encoder.encode({"x": first}, None)] * 10
    assert abs(model.propose(20, history, running)[0].values["x"] - first) > 0.05
