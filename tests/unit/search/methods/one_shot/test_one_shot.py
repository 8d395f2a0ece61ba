"""The first trial trains the shared weights; what it found is then trained by itself."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Continue, Finished, Report, rng_of
from orchestray.search.methods.one_shot.base import OneShot
from orchestray.search.methods.one_shot.darts import Darts
from orchestray.search.methods.one_shot.enas import Enas
from orchestray.search.methods.one_shot.smash import Smash
from orchestray.search.spaces.dimensions import Uniform
from orchestray.search.spaces.registry import OwnSpace
from support.method_cases import small_banks
from support.mixed_space import BEST, Mixed
from support.toy_choices import Layers

OTHER = {"first": "identity", "second": "sine"}
THIRD = {"first": "sine", "second": "sine"}


def banked() -> list[Any]:
    """Return three networks of different keys."""
    found = {small_banks().key(one): one for one in map(small_banks().sample, map(rng_of, range(20)))}
    return list(found.values())[:3]


METHODS = [(Enas, Mixed, [BEST, OTHER, THIRD]), (Darts, Mixed, [BEST, OTHER, THIRD]), (Smash, small_banks, banked())]


class Own:
    def sample(self, rng: Any) -> Any:
        return [1]

    def mutate(self, genome: Any, rng: Any) -> Any:
        return genome

    def crossover(self, a: Any, b: Any, rng: Any) -> Any:
        return a

    def build(self, genome: Any, input_shape: Any, num_outputs: int) -> Any: ...


@pytest.mark.parametrize(("kind", "architecture", "found"), METHODS, ids=["enas", "darts", "smash"])
def test_a_program_comes_first_and_then_the_networks_it_found_each_once(
    kind: type[OneShot], architecture: Any, found: list[Any]
) -> None:
    best, other, third = found
    method = kind(
        space={}, architecture=architecture(), seed=3, trials=10, steps_per_trial=50, finalists=2, inherit=True
    )
    first = method.ask()
    assert first is not None
    assert first.program == kind.program
    assert first.steps == 200
    assert method.ask() is None
    assert not method.is_done
    told = {"genomes": [best, best, other, third]}
    assert method.genome_of(first) == first.genome
    assert method.report(Report(0, 200, 0.5, told=told)) == Continue()
    assert method.genome_of(first) == best
    method.tell(Finished(0, "succeeded", 200, 0.5))
    finalists = [method.ask(), method.ask()]
    assert [one.genome for one in finalists if one] == [best, other]
    assert all(one.parent == 0 and one.inherits and one.program is None for one in finalists if one)
    assert method.is_done
    assert method.ask() is None


def test_the_weights_are_reported_of_while_they_train_and_the_networks_of_the_end_are_trained_further() -> None:
    method = Darts(space={}, architecture=Mixed(), trials=10, steps_per_trial=50, search_steps=202, finalists=1)
    first = method.ask()
    assert first is not None
    steps = [0]
    while steps[-1] < 202:
        steps.append(method.next_report(0, steps[-1]))
    assert steps == [0, 41, 81, 122, 162, 202]
    for step, score, found in ((41, 0.9, OTHER), (81, 0.7, BEST)):
        method.report(Report(0, step, score, told={"genomes": [found]}))
        assert method.genome_of(first) == OTHER, "that of the best report: its weights are kept"
        assert method.ask() is None
        assert not method.is_done
    method.report(Report(0, 202, 0.8, told={"genomes": [BEST]}))
    assert method.genome_of(first) == OTHER
    method.tell(Finished(0, "succeeded", 202, 0.9))
    finalist = method.ask()
    assert finalist is not None
    assert finalist.genome == BEST
    assert method.is_done


def test_no_more_finalists_than_there_are_trials() -> None:
    method = Darts(space={}, architecture=Mixed(), trials=1)
    method.ask()
    method.tell(Finished(0, "succeeded", told={"genomes": [BEST]}))
    assert method.is_done


def test_the_shared_weights_are_wanted_as_long_as_a_network_was_not_trained_further() -> None:
    method = Enas(space={}, architecture=Mixed(), trials=2, steps_per_trial=50, finalists=2, inherit=True)
    method.ask()
    method.report(Report(0, 200, 0.5, told={"genomes": [BEST, OTHER]}))
    method.tell(Finished(0, "succeeded", 200, 0.5))
    method.ask()
    assert method.is_done
    assert list(method.parents()) == [0]
    method.allow(3)
    method.ask()
    assert list(method.parents()) == []


def test_a_first_trial_that_failed_ends_the_search() -> None:
    method = Enas(space={}, architecture=Mixed(), trials=5)
    method.ask()
    method.tell(Finished(0, "failed", error="out of memory"))
    assert method.is_done


@pytest.mark.parametrize("kind", [Enas, Darts])
def test_a_space_without_shared_weights_is_refused_with_what_would_fit(kind: type[OneShot]) -> None:
    with pytest.raises(ConfigError, match=r"Layers has none. Take the space cell, or .* regularized_evolution"):
        kind(space={}, architecture=Layers())


def test_a_space_that_is_no_program_of_choices_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(ConfigError, match="enas answers the choices of a program, and Own is none"):
        Enas(space={}, architecture=OwnSpace(Own()))


def test_a_space_without_memory_banks_is_refused_by_smash() -> None:
    for space, name in ((Mixed(), "Mixed"), (OwnSpace(Own()), "Own")):
        with pytest.raises(
            ConfigError, match=rf"codes of memory banks, and {name} has none. Take the space memory_bank"
        ):
            Smash(space={}, architecture=space)


def test_hyper_parameters_beside_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"finds an architecture in one training .* train\.optimizer\.lr"):
        Darts(space={"train.optimizer.lr": Uniform(0.0, 1.0)}, architecture=Mixed())
    with pytest.raises(ConfigError, match=r"search\.architecture: is needed by the method smash"):
        Smash(space={})


@pytest.mark.parametrize(("kind", "architecture"), [(Enas, Mixed), (Smash, small_banks)], ids=["enas", "smash"])
def test_networks_are_found_by_what_the_search_looks_for_unless_the_method_names_another(
    kind: Any, architecture: Any
) -> None:
    def told(metric: str, mode: str, given: str | None = None) -> tuple[Any, Any]:
        method = kind(space={}, architecture=architecture(), trials=3, metric=given)
        method.judge_by(metric, mode)
        first = method.ask()
        return first.arguments["metric"], first.arguments.get("less_is_better", False)

    assert told("accuracy", "max") == ("accuracy", False)
    assert told("top1_error", "min") == ("top1_error", True)
    assert told("loss", "min") == (None, False)
    assert told("train_loss", "min") == (None, False)
    assert told("accuracy", "max", given="loss") == told("loss", "min", given="train_loss") == (None, False)
    assert told("latency_ms", "min") == (None, False)
    assert told("accuracy", "max", given="recall") == ("recall", False)
    assert told("accuracy", "max", given="rmse") == ("rmse", True)
    assert told("closeness", "min", given="closeness") == ("closeness", True)
