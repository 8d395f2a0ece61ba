"""A population as one batched program is what its members are as trials of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.search.methods.base import Report
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.spaces.dimensions import Dimension, Uniform
from orchestray.search.trials.packed import PackedPopulation
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.saved.run import load_run
from support.pairs_task import PAIRS
from support.training import furthest

LR, DECAY, MOMENTUM = (f"train.optimizer.{name}" for name in ("lr", "weight_decay", "momentum"))
TASK = {"type": "digits", "hidden": [16]}


def config_of(task: dict[str, Any] | None = None, steps: int = 30, **train: Any) -> TrainConfig:
    chosen = {"batch_size": 128, "steps": steps, "optimizer": {"type": "sgd", "lr": 0.1}, **train}
    return load_train_config({"name": "packed", "task": task or TASK, "train": chosen})


def packed(
    config: TrainConfig, space: dict[str, Dimension], initial: list[dict[str, Any]], **how: Any
) -> PackedPopulation:
    method = PopulationBasedTraining(
        space=space,
        population=len(initial),
        initial=initial,
        steps_per_trial=config.train.steps or 1,
        packed=True,
        **how,
    )
    proposal = method.ask()
    assert proposal is not None
    return PackedPopulation(config, **proposal.arguments)


@pytest.mark.parametrize(
    ("optimizer", "varied"),
    [
        ({"type": "sgd", "lr": 0.1}, [{LR: 0.05, MOMENTUM: 0.0, DECAY: 0.0}, {LR: 0.2, MOMENTUM: 0.9, DECAY: 0.01}]),
        (
            {"type": "sgd", "lr": 0.1, "momentum": 0.5, "nesterov": True},
            [{LR: 0.05, DECAY: 0.1}, {LR: 0.2, DECAY: 0.0}],
        ),
        ({"type": "adam", "lr": 0.01}, [{LR: 0.001, DECAY: 0.1}, {LR: 0.02, DECAY: 0.0}]),
        ({"type": "adamw", "lr": 0.01}, [{LR: 0.001, DECAY: 0.1}, {LR: 0.02, DECAY: 0.0}]),
    ],
)
def test_each_member_is_what_it_is_as_a_trial_of_its_own(
    optimizer: dict[str, Any], varied: list[dict[str, Any]]
) -> None:
    config = config_of(
        {**TASK, "dropout": 0.2},
        optimizer=optimizer,
        precision="float64",
        grad_clip=0.5,
        accumulate=2,
        lr_schedule={"type": "cosine", "warmup_steps": 5},
    )
    population = packed(config, {key: Uniform(0.0, 1.0) for key in varied[0]}, varied, interval_steps=29)
    population.advance(20)
    population.advance(28)
    for number, changes in enumerate(varied):
        chosen = {**optimizer, **{key.rpartition(".")[2]: value for key, value in changes.items()}}
        data = config.model_dump(mode="json")
        data["train"]["optimizer"] = chosen
        trial = TrainingTrial(load_train_config(data))
        alone = trial.advance(28)
        wanted, found = trial.state(), population.state_of(number)
        assert furthest(dict(wanted.tensors), dict(found.tensors)) < 1e-12
        assert population.members[number].metrics["accuracy"] == pytest.approx(alone.metrics["accuracy"])
        assert population.members[number].metrics["loss"] == pytest.approx(alone.metrics["loss"])


def test_a_copy_has_the_bytes_of_what_it_copied() -> None:
    initial = [{LR: 0.2}, {LR: 0.1}, {LR: 0.05}, {LR: 1e-4}]
    population = packed(config_of(), {LR: Uniform(1e-4, 1.0, is_log=True)}, initial, interval_steps=10)
    population.advance(10)
    best, before = population.best, population.state_of(population.best)
    population._next_generation()
    (line,) = population.lineage
    assert (line["member"], line["parent"], line["step"]) == (3, best, 10)
    assert line["changes"] == population.members[3].changes
    after = population.state_of(3)
    assert all(torch.equal(after.tensors[name], value) for name, value in before.tensors.items())
    assert population.members[3].changes[LR] in (
        pytest.approx(initial[best][LR] * 0.8),
        pytest.approx(initial[best][LR] * 1.2),
    )


def test_it_stops_after_the_step_when_asked_and_tells_at_its_next_report_what_it_would_have() -> None:
    initial = [{LR: 0.2}, {LR: 0.1}, {LR: 0.05}, {LR: 1e-4}]
    space: dict[str, Dimension] = {LR: Uniform(1e-4, 1.0, is_log=True)}
    whole, first, second = (packed(config_of(), space, initial, interval_steps=5) for _ in range(3))
    told = whole.advance(20)
    assert told.told["lineage"]
    train, count = first._batched.train, iter(range(1, 100))

    def stopped_at_13(*arguments: Any) -> Any:
        if next(count) == 13:
            first.request_stop()
        return train(*arguments)

    first._batched.train = stopped_at_13  # type: ignore[method-assign]
    stopped = first.advance(20)
    assert (stopped.step, stopped.is_interrupted) == (13, True)
    second.load(first.state())
    for population in (first, second):
        again = population.advance(20)
        assert (again.step, again.is_interrupted) == (20, False)
        assert (again.metrics, again.told) == (told.metrics, told.told)
        assert (*stopped.evaluations, *again.evaluations) == told.evaluations
        assert furthest(dict(whole.state().tensors), dict(population.state().tensors)) == 0.0


def test_it_goes_on_from_its_state_as_if_it_had_not_been_stopped() -> None:
    initial = [{LR: 0.2}, {LR: 0.1}, {LR: 0.05}, {LR: 1e-4}]
    space: dict[str, Dimension] = {LR: Uniform(1e-4, 1.0, is_log=True)}
    whole, first, second = (packed(config_of(), space, initial, interval_steps=5) for _ in range(3))
    whole.advance(30)
    first.advance(15)
    second.load(first.state())
    second.advance(30)
    assert furthest(dict(whole.state().tensors), dict(second.state().tensors)) == 0.0
    assert whole.state().position == second.state().position
    assert len(whole.lineage) >= 5


def test_the_best_member_is_left_as_a_run_that_loads_and_scores_the_same(tmp_path: Path) -> None:
    initial = [{LR: 0.2}, {LR: 1e-4}]
    population = packed(config_of(), {LR: Uniform(1e-4, 1.0)}, initial, interval_steps=20)
    progress = population.advance(30)
    population.leave_run(tmp_path / "best")
    run = load_run(tmp_path / "best")
    assert run.result["final"]["validation"]["accuracy"] == pytest.approx(progress.metrics["accuracy"])
    assert (
        furthest(
            dict(run.load_model().state_dict()),
            {name.removeprefix("model/"): value for name, value in population.state_of(0).tensors.items()},
        )
        == 0.0
    )


def test_members_that_diverge_are_copies_of_others_soon() -> None:
    initial = [{LR: 0.1}, {LR: 1e30}]
    population = packed(config_of(), {LR: Uniform(1e-4, 1e30, is_log=True)}, initial, interval_steps=5)
    population.advance(10)
    assert population.lineage[0]["member"] == 1
    with pytest.raises(TrainingError, match="all 2 members has diverged"):
        packed(config_of(), {LR: Uniform(1e-4, 1e30)}, [{LR: 1e30}] * 2, interval_steps=5).advance(10)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        (config_of(), "train.batch_size", "cannot differ between members"),
        (config_of(optimizer={"type": "rmsprop", "lr": 0.1}), LR, "rmsprop is not there for many members"),
        (config_of({**TASK, "batch_norm": True}), LR, "running averages are changed in place"),
        (config_of(precision="bfloat16"), LR, "float32 or float64"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_the_reason(config: TrainConfig, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        packed(config, {key: Uniform(1.0, 2.0)}, [{}, {}], interval_steps=5)


def test_a_task_of_several_inputs_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    config = config_of({"type": f"{tmp_path}/pairs.py:Pairs"})
    with pytest.raises(ConfigError, match=r"inputs are a mapping of mask: .*, not one tensor; use packed: false"):
        packed(config, {LR: Uniform(0.1, 0.2)}, [{}, {}], interval_steps=5).advance(5)


def test_a_packed_population_is_one_trial_of_the_method() -> None:
    method = PopulationBasedTraining(space={LR: Uniform(0.1, 1.0)}, steps_per_trial=30, interval_steps=10, packed=True)
    proposal = method.ask()
    assert proposal is not None
    assert method.ask() is None
    assert method.is_done
    assert [method.next_report(0, step) for step in (0, 10, 20)] == [10, 20, 30]
    members = [{"score": 0.5 - 0.01 * number, "changes": {LR: 0.5}} for number in range(8)]
    method.report(Report(0, 10, 0.5, told={"best": 0, "members": members, "lineage": []}))
    assert not method.released()


def test_a_population_without_validation_data_is_refused() -> None:
    config = config_of({"type": "support.no_validation:NoValidation"})
    with pytest.raises(ConfigError, match="compared by validation, and the task has no validation data"):
        packed(config, {LR: Uniform(0.01, 0.1)}, [{LR: 0.1}, {LR: 0.2}], interval_steps=10)
