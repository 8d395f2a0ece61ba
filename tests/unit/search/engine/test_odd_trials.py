"""Outcomes of odd trials: objectives that are missing, limits, populations in one, weights of other networks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.messages import TrialLimits, TrialTask
from orchestray.search.engine.objective import Objective, Objectives
from orchestray.search.engine.session import MemoryJournal, MethodSession, SearchError
from orchestray.search.methods.base import Method, Proposal
from orchestray.search.registry.methods import make_method
from orchestray.search.results.schema import OUT_OF_TIME
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from support.search_loop import ACCURACY, base, begin, make_config
from support.tiny_task import TinyTask

LR = "train.optimizer.lr"
CHOICES = {LR: make_dimension("choice", values=[0.01, 0.1, 0.3])}


def grid() -> Method:
    return make_method("grid", space=CHOICES, steps_per_trial=4)


def test_a_misspelt_objective_ends_the_search_before_a_trial_has_trained(loops: Any) -> None:
    def unfit_to_train(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        task = {"type": "support.odd_task:OddTask", "behaviour": "raise"}
        train = base()["train"] | {"steps": steps}
        return load_train_config(base() | {"task": task, "train": train})

    loop = loops(grid(), objectives=Objectives([Objective("acuracy")]), make=unfit_to_train)
    told = "no trial reports 'acuracy'; what is reported is accuracy, loss, train_loss; did you mean 'accuracy'\\?"
    with pytest.raises(ConfigError, match=told):
        loop.run()
    assert loop.records.lines == {}


def test_what_the_network_measures_and_the_losses_are_no_metrics_of_the_task() -> None:
    objectives = Objectives([Objective(name) for name in ("parameters", "loss", "train_loss", "accuracy")])
    assert objectives.of_task == ["accuracy"]
    assert objectives.misnamed(["accuracy"]) is None


def test_an_objective_that_is_like_no_metric_is_left_to_the_training_to_tell(loops: Any) -> None:
    objectives = Objectives([Objective("f1")])
    assert objectives.misnamed(["accuracy"]) is None
    loop = loops(grid(), objectives=objectives)
    with pytest.raises(ConfigError, match="no trial reports 'f1'; what is reported is accuracy, loss, train_loss"):
        loop.run()


class OfClasses(TinyTask):
    """A task that reports the recall of a class only where there are any: of the second in the last batch alone."""

    def dataset(self, split: str) -> pa.Table:
        table = super().dataset(split)
        return table.sort_by("label") if split == "validation" else table

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = outputs.argmax(dim=1) == batch["targets"]
        return {
            f"recall_{'ab'[label]}": found[batch["targets"] == label].to(torch.float64).mean()
            for label in batch["targets"].unique().tolist()
        }


def test_an_objective_that_only_later_batches_have_is_found_and_the_search_goes_on(loops: Any) -> None:
    def of_classes(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        task = {"type": f"{__name__}:OfClasses"}
        return load_train_config(base() | {"task": task, "train": base()["train"] | {"steps": steps}})

    trial = TrainingTrial(of_classes({}, None, 4, 0))
    first, whole = trial.metric_names(["recall_a"]), trial.metric_names(["recall_b"])
    assert list(first or ()) == ["recall_a"]
    assert set(whole or ()) == {"recall_a", "recall_b"}
    host = loops(grid(), objectives=Objectives([Objective("recall_b")]), make=of_classes)
    assert not host.hosts[0].work(begin(host.conductor)).is_misnamed


class Unvalidated(TinyTask):
    """A task without validation data."""

    def dataset(self, split: str) -> Any:
        return super().dataset(split) if split == "train" else None


def unvalidated(changes: Any, genome: Any, steps: int, trial: int) -> Any:
    task = {"type": f"{__name__}:Unvalidated"}
    return load_train_config(base() | {"task": task, "train": base()["train"] | {"steps": steps}})


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_an_objective_of_a_validation_that_there_is_not_ends_the_search_at_once(loops: Any, metric: str) -> None:
    loop = loops(grid(), objectives=Objectives([Objective(metric)]), make=unvalidated)
    with pytest.raises(ConfigError, match=f"'{metric}' is known by validation, and the task has no validation data"):
        loop.run()
    assert loop.records.lines == {}


def test_trials_without_validation_are_judged_by_their_training_loss(loops: Any) -> None:
    loop = loops(grid(), objectives=Objectives([Objective("train_loss", "min")]), make=unvalidated).run()
    assert {line["status"] for line in loop.records.lines.values()} == {"succeeded"}


def test_an_objective_that_one_trial_lacks_fails_that_trial_alone(loops: Any) -> None:
    loop = loops(grid())
    work = loop.hosts[0].work

    def forgetful(order: TrialTask) -> Any:
        told = work(order)
        kept = {name: value for name, value in told.metrics.items() if name != "accuracy"}
        return replace(told, metrics=kept) if order.trial == 1 else told

    loop.hosts[0].work = forgetful
    loop.run()
    assert [loop.records.lines[trial]["status"] for trial in range(3)] == ["succeeded", "failed", "succeeded"]
    assert "'accuracy'" in loop.records.lines[1]["error"]


def test_the_loss_of_training_is_an_objective_too(loops: Any) -> None:
    loop = loops(grid(), objectives=Objectives([Objective("train_loss", "min")])).run()
    assert {line["status"] for line in loop.records.lines.values()} == {"succeeded"}
    assert all(line["objective"] > 0 for line in loop.records.lines.values())


def test_a_validation_on_the_way_that_is_no_number_is_left_out() -> None:
    found = ACCURACY.evaluations([{"accuracy": 0.5}, {"loss": 1.0}, {"accuracy": math.nan}, {"accuracy": 0.75}])
    assert found == (0.5, 0.75)


def test_the_size_of_the_tasks_own_network_is_an_objective(loops: Any) -> None:
    goals = Objectives([Objective("accuracy"), Objective("parameters", "min")])
    loop = loops(grid(), objectives=goals).run()
    num_parameters = sum(
        p.numel() for p in torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).parameters()
    )
    assert [line["parameters"] for line in loop.records.lines.values()] == [num_parameters] * 3
    assert loop.records.lines[0]["objectives"]["parameters"] == num_parameters


def test_what_a_trial_has_worked_elsewhere_counts_towards_its_time_limit(loops: Any) -> None:
    loop = loops(grid(), time_limit_s=1000.0)
    order = begin(loop.conductor)
    told = loop.hosts[0].work(replace(order, used_s=1001.0))
    assert "time limit of 1000 s" in told.error
    assert loop.hosts[0].work(replace(order, used_s=0.0)).error is None


class Wild(Method):
    def ask(self) -> Proposal | None:
        raise ZeroDivisionError("of the user's space")

    def tell(self, finished: Any) -> None: ...

    @property
    def is_done(self) -> bool:
        return False


def test_a_space_that_raises_while_it_draws_ends_the_search_with_a_sentence() -> None:
    with pytest.raises(SearchError, match="Wild failed with ZeroDivisionError: of the user's space"):
        MethodSession(Wild(space=CHOICES), MemoryJournal()).ask()


def packed(**arguments: Any) -> Method:
    space = {LR: make_dimension("log_uniform", low=1e-3, high=1.0)}
    common = {"population": 4, "trials": 4, "steps_per_trial": 12, "interval_steps": 3, "fraction": 0.5}
    return make_method("population_based_training", space=space, seed=3, packed=True, **{**common, **arguments})


@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_the_members_of_a_packed_population_are_trials_of_the_records(loops: Any, killed_after: int) -> None:
    loop = loops(packed())
    if killed_after:
        for _ in range(killed_after):
            loop.step()
        loop.close()
        loop = loops(packed(), journal=MemoryJournal(loop.journal.entries()), records=loop.records)
    loop.run()
    lines = loop.records.lines
    assert sorted(lines) == [0, 1, 2, 3]
    assert all(set(line["config"]) == {LR} and line["steps"] == 12 for line in lines.values())
    kept = loop.conductor.best()
    best = loop.conductor.best_trial(kept)
    assert lines[best]["objective"] == max(line["objective"] for line in lines.values()) == kept.score
    drawn = {trial for trial, parent, step, _ in loop.records.nodes if parent is None and step == 0}
    assert drawn >= {0, 1, 2, 3}
    copies = [(trial, parent) for trial, parent, step, _ in loop.records.nodes if step > 0]
    assert copies
    assert {lines[trial]["parent"] for trial, _ in copies} != {None}
    assert {trial for trial, step, _ in loop.records.reports if step == 12} == {0, 1, 2, 3}


def test_the_members_of_a_packed_population_are_shown_while_they_train_and_as_they_end(loops: Any) -> None:
    loop = loops(packed()).run()
    under_way = [(change.trial, change.step) for change in loop.shown if change.status == "running" and change.step]
    assert under_way == [(member, step) for step in (3, 6, 9, 12) for member in range(4)]
    last = {change.trial: change for change in loop.shown}
    assert {trial: (change.status, change.objective) for trial, change in last.items()} == {
        trial: (line["status"], line["objective"]) for trial, line in loop.records.lines.items()
    }


def test_a_packed_population_that_was_killed_ends_as_if_it_had_not_been(loops: Any) -> None:
    whole = loops(packed(), "whole").run()
    first = loops(packed())
    for _ in range(2):
        first.step()
    first.close()
    second = loops(packed(), journal=MemoryJournal(first.journal.entries()), records=first.records).run()
    assert {t: {**line, "seconds": 0} for t, line in second.records.lines.items()} == {
        t: {**line, "seconds": 0} for t, line in whole.records.lines.items()
    }
    assert set(second.records.nodes) == set(whole.records.nodes)


@pytest.mark.parametrize("num_reports", [0, 2])
def test_a_packed_population_that_the_searchs_time_limit_stopped_ends_as_if_it_had_not(
    loops: Any, num_reports: int
) -> None:
    whole = loops(packed(), "whole").run()
    first = loops(packed())
    assert begin(first.conductor) is not None if num_reports == 0 else all(first.step() for _ in range(num_reports))
    first.conductor.suspend()
    first.close()
    assert {line["reason"] for line in first.records.lines.values()} == {OUT_OF_TIME}
    second = loops(packed(), journal=MemoryJournal(first.journal.entries()), records=first.records)
    assert second.records.lines == {}
    second.run()
    assert {t: {**line, "seconds": 0} for t, line in second.records.lines.items()} == {
        t: {**line, "seconds": 0} for t, line in whole.records.lines.items()
    }


def test_a_wider_network_takes_the_part_of_the_weights_that_both_have_where_it_is_asked_for() -> None:
    parent, child = (TrainingTrial(make_config({}, None, 2, 0)) for _ in range(2))
    parent.advance(2)
    state = parent.state()
    narrow = replace(state, tensors={**state.tensors, "model/0.weight": state.tensors["model/0.weight"][:5]})
    before = child.state().tensors["model/0.weight"]
    child.inherit(narrow)
    assert torch.equal(child.state().tensors["model/0.weight"], before)
    assert torch.equal(child.state().tensors["model/2.weight"], state.tensors["model/2.weight"])
    child.inherit(narrow, overlap=True)
    after = child.state().tensors["model/0.weight"]
    assert torch.equal(after[:5], narrow.tensors["model/0.weight"])
    assert torch.equal(after[5:], before[5:])


def test_ray_train_is_refused_for_trials_of_several_workers() -> None:
    config: dict[str, Any] = {
        "name": "nested",
        "base": {
            "task": {"type": "digits"},
            "train": {"batch_size": 8, "steps": 4, "optimizer": {"type": "sgd", "lr": 0.1}},
            "engine": "ray_train",
            "strategy": {"network": {"data": 2}},
        },
        "search": {
            "method": {"type": "grid"},
            "objective": {"metric": "accuracy"},
            "space": {LR: {"type": "choice", "values": [0.1, 0.2]}},
        },
    }
    with pytest.raises(ConfigError, match=r"base\.engine: must be actors where a trial has several workers"):
        load_search_config(config)
    config["base"]["strategy"] = {}
    assert load_search_config(config).base.engine == "ray_train"


def test_rules_say_whether_networks_are_measured(tmp_path: Path) -> None:
    assert not TrialLimits(ACCURACY, str(tmp_path)).objectives.are_of_network
    assert Objectives([Objective("accuracy"), Objective("latency_ms", "min")]).are_of_network
