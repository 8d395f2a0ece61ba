"""ENAS and DARTS on a space with a planted best; what they leave behind; a state handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import orchestray
from orchestray.platform.errors import ConfigError
from orchestray.search.trials.one_shot.darts import DartsTrial
from orchestray.search.trials.one_shot.data import two_parts
from orchestray.search.trials.one_shot.enas import EnasTrial
from support.mixed_space import BEST, Squares, mixed_config

torch.set_num_threads(1)

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5}


def test_the_two_parts_of_the_data_have_no_row_in_common_and_all_together() -> None:
    whole = Squares(num_rows=101).dataset("train")["x0"].to_pylist()
    trained, judged = two_parts(Squares(num_rows=101), 0.3)
    rows = [part.read([0]).take(range(part.num_rows))["x0"].to_pylist() for part in (trained, judged)]
    assert (len(rows[0]), len(rows[1])) == (71, 30)
    assert sorted(rows[0] + rows[1]) == sorted(whole)


@pytest.mark.parametrize("order", [1, 2])
def test_darts_gives_the_planted_operations_most_weight(order: int) -> None:
    trial = DartsTrial(mixed_config(steps=80), order=order, architecture_learning_rate=0.05, warmup_part=0.1, **COMMON)
    progress = trial.advance(80)
    assert trial.alphas["halves"].argmax(dim=1).tolist() == [1, 2]
    assert progress.told["genomes"] == [BEST]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"average": {"type": "ema"}}, "train.average: weights that networks share are not averaged"),
        ({"optimizer": None, "solver": {"type": "lbfgs"}}, "train.solver: weights that networks share see another"),
        ({"early_stopping": {"metric": "loss"}}, "train.early_stopping: weights that networks share train for all"),
        ({"until": {"metric": "loss", "value": 0.1}}, "train.until: weights that networks share train for all steps"),
        ({"time_limit_s": 5.0}, "train.time_limit_s: .* use search.budget.trial_time_limit_s"),
        ({"freeze": ["*.bias"]}, "train.freeze: weights that networks share are trained without it"),
        ({"precision": "bfloat16"}, "train.precision: weights that networks share train in float32 or float64"),
        (
            {"optimizer": {"type": "adam", "lr": 0.02, "groups": [{"match": "no.such", "lr": 0.1}]}},
            "groups.0.match: no parameter has a name like 'no.such'",
        ),
    ],
    ids=["average", "solver", "early stopping", "until", "time limit", "freeze", "bfloat16", "groups"],
)
def test_what_shared_weights_have_not_is_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnasTrial(mixed_config(steps=10, **train), **COMMON)


def test_enas_children_share_the_same_tensors() -> None:
    trial = EnasTrial(mixed_config(steps=10), **COMMON)
    with trial._trained_on:
        batch = trial._trained_on.at(0)
    for genome in trial.space.enumerate():
        loss = trial._task.loss(trial.supernet(batch["inputs"], genome), batch)
        grads = torch.autograd.grad(loss, trial._params, allow_unused=True)
        used = {name for (name, _), grad in zip(trial._named, grads, strict=True) if grad is not None}
        assert used == trial.child_state(genome).keys()


def test_what_one_child_of_enas_has_learned_is_known_to_all_that_have_a_part_of_it() -> None:
    trial = EnasTrial(mixed_config(steps=10), **COMMON)
    children = list(trial.space.enumerate())
    before = [trial.child_state(genome) for genome in children]
    with trial._trained_on:
        batch = trial._trained_on.at(0)
    loss = trial._task.loss(trial.supernet(batch["inputs"], BEST), batch)
    trial._update(trial._optimizer, trial._params, loss, 1)
    learned = trial.child_state(BEST)
    for genome, earlier in zip(children, before, strict=True):
        for name, tensor in trial.child_state(genome).items():
            assert torch.equal(tensor, learned.get(name, earlier[name])), (genome, name)
            assert torch.equal(tensor, earlier[name]) == (name not in learned), (genome, name)


def test_enas_finds_the_planted_network() -> None:
    found = []
    for seed in range(2):
        trial = EnasTrial(mixed_config(steps=100), controller_every=5, **{**COMMON, "seed": seed})
        found.append(trial.advance(100).told["genomes"][0])
    assert found == [BEST] * 2  # of nine networks


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_networks_whose_reward_is_no_number_are_ranked_last_and_leave_the_controller_of_enas_whole(
    value: float,
) -> None:
    trial = EnasTrial(mixed_config(steps=10), children=8, **COMMON)
    with trial._judged_by:
        trial.supernet.operations["first_identity"].shift.data.fill_(value)
        trial._update_controller()
        assert all(tensor.isfinite().all() for tensor in trial.policy.parameters.values())
        ranked = trial._find()
        diverged = [genome["first"] == "identity" for genome in ranked]
        assert any(diverged)
        assert diverged == sorted(diverged)
        before = {name: tensor.clone() for name, tensor in trial.policy.parameters.items()}
        trial.supernet.head.bias.data.fill_(value)
        trial._update_controller()
        assert all(torch.equal(tensor, before[name]) for name, tensor in trial.policy.parameters.items())
        trial.supernet.head.bias.data.zero_()
        trial._update_controller()
    assert [reward is None for reward in trial.rewards] == [False, True, False]


@pytest.mark.parametrize("program", [EnasTrial, DartsTrial])
def test_a_trial_that_goes_on_from_its_state_is_one_that_was_never_paused(program: Any) -> None:
    config = mixed_config(steps=40)
    whole = program(config, **COMMON)
    whole.advance(40)
    first = program(config, **COMMON)
    first.advance(23)
    second = program(config, **COMMON)
    second.load(first.state())
    second.advance(40)
    ours, theirs = second.state(), whole.state()
    assert ours.position == theirs.position
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ours.tensors)


@pytest.mark.parametrize("program", [EnasTrial, DartsTrial])
def test_a_trial_that_is_asked_to_stop_does_after_the_step_and_goes_on_as_if_it_had_not_been(program: Any) -> None:
    config = mixed_config(steps=20)
    whole, first, second = (program(config, **COMMON) for _ in range(3))
    told = whole.advance(20)
    train_step = first._train_step

    def stopped_at_13(batch: Any, step: int) -> Any:
        if step == 13:
            first.request_stop()
        return train_step(batch, step)

    first._train_step = stopped_at_13
    stopped = first.advance(20)
    assert (stopped.step, stopped.is_interrupted, first.found) == (13, True, [])
    second.load(first.state())
    for trial in (first, second):
        again = trial.advance(20)
        assert (again.step, again.is_interrupted, again.metrics, again.told) == (20, False, told.metrics, told.told)
        ours, theirs = trial.state(), whole.state()
        assert ours.position == theirs.position
        assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_the_run_left_behind_is_the_best_child_with_its_shared_weights(tmp_path: Path) -> None:
    trial = EnasTrial(mixed_config(steps=30), **COMMON)
    progress = trial.advance(30)
    trial.leave_run(tmp_path / "best")
    run = orchestray.load_run(tmp_path / "best")
    model, task = run.load_model(), run.load_task()
    assert task.genome == trial.found[0]
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        assert float(task.loss(model(batch["inputs"]), batch)) == pytest.approx(progress.metrics["loss"], rel=1e-5)
