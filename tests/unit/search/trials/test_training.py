"""A trial in one process: the same bits as a run, wherever it pauses; states handed on; a run directory left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import CheckpointError, TrainingError
from orchestray.search.engine.objective import Objective, Objectives
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.core.arithmetic import Arithmetic
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.params import TaskConfig
from support.pairs_task import PAIRS

STEPS = 12


def config(**train: Any) -> Any:
    return load_train_config(
        {
            "name": "trial",
            "task": {"type": "support.tiny_task:TinyTask", "dropout": 0.2},
            "train": {
                "batch_size": 8,
                "steps": STEPS,
                "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
                "lr_schedule": {"type": "cosine"},
                **train,
            },
        }
    )


def assert_same_bits(a: TrainingTrial, b: TrainingTrial) -> None:
    first, second = a.state(), b.state()
    assert list(first.tensors) == list(second.tensors)
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name


def test_pauses_change_no_bit() -> None:
    whole, paused = TrainingTrial(config()), TrainingTrial(config())
    last = whole.advance(STEPS)
    for step in (1, 4, 5, 7, STEPS):
        progress = paused.advance(step)
        assert progress.step == step
    assert_same_bits(whole, paused)
    assert progress.metrics == last.metrics
    assert {"accuracy", "loss", "train_loss"} <= set(last.metrics)


def test_every_validation_since_the_last_report_is_told() -> None:
    trial = TrainingTrial(config(validate_every_steps=2))
    assert len(trial.advance(6).evaluations) == 3
    assert len(trial.advance(9).evaluations) == 2  # at 8, and at the pause


def test_a_state_taken_by_another_goes_on_with_the_same_bits() -> None:
    task_cache = TaskCache()
    source, clone = TrainingTrial(config(), task_cache=task_cache), TrainingTrial(config(), task_cache=task_cache)
    source.advance(5)
    state = source.state()
    source.advance(STEPS)
    clone.load(state)
    assert clone.step == 5
    clone.advance(STEPS)
    assert_same_bits(source, clone)


@pytest.mark.parametrize("kind", ["grows", "late", "not_saved", "assigned", "extra", "packed"])
def test_a_state_has_all_that_the_modules_need(kind: str) -> None:
    task = {"type": "support.stateful:StatefulTask", "kind": kind, "dtype": "float32"}
    chosen = config(optimizer={"type": "sgd", "lr": 0.001}).model_copy(update={"task": TaskConfig(**task)})
    source, clone = TrainingTrial(chosen), TrainingTrial(chosen)
    source.advance(5)
    state = source.state()
    source.advance(STEPS)
    clone.advance(STEPS - 2)  # it has a state of its own, of other shapes
    clone.load(state)
    clone.advance(STEPS)
    assert_same_bits(source, clone)


def test_another_learning_rate_leaves_the_weights_and_moves_differently() -> None:
    trial, other = TrainingTrial(config()), TrainingTrial(config())
    trial.advance(5)
    other.advance(5)
    other.become(config(optimizer={"type": "sgd", "lr": 0.01, "momentum": 0.9}))
    assert_same_bits(trial, other)
    trial.advance(6)
    other.advance(6)
    assert not torch.equal(trial.state().tensors["model/0.weight"], other.state().tensors["model/0.weight"])


@pytest.mark.parametrize("train", [{"batch_size": 16}, {"optimizer": {"type": "adam", "lr": 0.01}}])
def test_any_key_that_leaves_the_shapes_can_change(train: dict[str, Any]) -> None:
    trial = TrainingTrial(config())
    trial.advance(5)
    before = trial.state().tensors["model/0.weight"]
    trial.become(config(**train))
    assert torch.equal(trial.state().tensors["model/0.weight"], before)
    assert trial.advance(STEPS).step == STEPS


def test_weights_of_another_shape_are_refused() -> None:
    trial = TrainingTrial(config())
    state = trial.state()
    tensors = {**state.tensors, "model/0.weight": torch.zeros(3, 3)}
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        trial.load(type(state)(tensors, state.position))


def test_partly_takes_what_fits_and_begins_at_the_first_step() -> None:
    source, heir = TrainingTrial(config()), TrainingTrial(config(seed=3))
    source.advance(5)
    state = source.state()
    own = heir.state().tensors["model/0.bias"]
    heir.load(type(state)({k: v for k, v in state.tensors.items() if "bias" not in k}, state.position), partly=True)
    assert torch.equal(heir.state().tensors["model/0.weight"], state.tensors["model/0.weight"])
    assert torch.equal(heir.state().tensors["model/0.bias"], own)
    assert heir.step == 0


def test_the_run_left_behind_has_the_metric_that_was_told(tmp_path: Path) -> None:
    trial = TrainingTrial(config())
    told = trial.advance(STEPS).metrics
    trial.leave_run(tmp_path / "best")
    run = load_run(tmp_path / "best")
    assert run.result["final"]["validation"]["accuracy"] == told["accuracy"]
    assert run.result["steps"] == STEPS
    task, model = run.load_task(), run.load_model()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        measured = task.metrics(model.eval()(batch["inputs"]), batch)["accuracy"]
    assert float(measured) == pytest.approx(told["accuracy"], abs=1e-12)


def test_a_trial_without_steps_is_only_validated() -> None:
    progress = TrainingTrial(config()).advance(0)
    assert progress.step == 0
    assert "accuracy" in progress.metrics


def test_a_task_is_built_and_its_data_read_once_for_many_trials() -> None:
    task_cache = TaskCache()
    trials = [TrainingTrial(config(seed=seed), task_cache=task_cache) for seed in range(3)]
    assert len({id(trial._task) for trial in trials}) == 1
    for trial in trials:
        trial.advance(1)
    assert len(task_cache._sources) == 2


def test_what_a_task_sets_of_torch_holds_for_each_of_its_trials_and_for_no_others(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom support.tiny_task import TinyTask\ntorch.use_deterministic_algorithms(True)\n"
        "class Whole(TinyTask): ...\n"
        "class Double(TinyTask):\n"
        "    def __init__(self, dropout):\n"
        "        super().__init__(dropout=dropout)\n"
        "        torch.set_default_dtype(torch.float64)\n"
    )
    own, plain, cache = f"{tmp_path / 'own.py'}:", "support.tiny_task:TinyTask", TaskCache()
    types = [f"{own}Whole", f"{own}Double", f"{own}Double", plain, f"{own}Whole", f"{own}Double"]
    held = []
    try:
        for number, kind in enumerate(types):
            task = {"type": kind, "dropout": 0.1 * (number // 3)}
            TrainingTrial(load_train_config({**config().model_dump(mode="json"), "task": task}), task_cache=cache)
            held.append((torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype() == torch.float64))
    finally:
        Arithmetic().apply()
    assert held == [(kind != plain, kind.endswith("Double")) for kind in types]


def test_a_searched_network_is_measured_and_its_data_read_once_for_all_genomes() -> None:
    from orchestray.search.spaces.registry import make_space
    from orchestray.search.spaces.searched_task import searched_task_section

    space, task_cache = make_space("chain"), TaskCache()
    rng = np.random.default_rng(0)
    measured = []
    for _ in range(2):
        section = searched_task_section({"type": "support.tiny_task:TinyTask"}, "chain", space.sample(rng))
        train = {"batch_size": 8, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}}
        trial = TrainingTrial(
            load_train_config({"name": "trial", "task": section, "train": train}), task_cache=task_cache
        )
        assert trial.advance(2).step == 2
        measured.append(trial.measures())
        assert measured[-1]["parameters"] == sum(p.numel() for p in trial._replica.model.parameters())
    assert all(one["flops"] > 0 and one["latency_ms"] > 0 for one in measured)
    assert len(task_cache._sources) == 2


def test_the_network_of_a_task_of_several_inputs_is_measured(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    train = {"batch_size": 4, "steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = load_train_config({"name": "trial", "task": {"type": f"{tmp_path}/pairs.py:Pairs"}, "train": train})
    trial = TrainingTrial(config, is_measured=True)
    assert trial.advance(2).metrics["loss"] is not None
    assert trial.metric_names(()) == []
    found, network = trial.measures(), trial._replica.model
    assert found["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert found["flops"] > 0


SPECTRAL = """
import torch
from support.tiny_task import TinyTask


class Spectral(TinyTask):
    def build_model(self):
        model = super().build_model()
        model.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / torch.linalg.svdvals(inputs[0]).amax(),))
        return model
"""


def test_flops_that_cannot_be_counted_are_not_given_and_their_names_are(tmp_path: Path) -> None:
    (tmp_path / "spectral.py").write_text(SPECTRAL)
    train = {"batch_size": 4, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = load_train_config({"name": "trial", "task": {"type": f"{tmp_path}/spectral.py:Spectral"}, "train": train})
    trial = TrainingTrial(config, is_measured=True)
    with pytest.warns(UserWarning, match="no formula for _linalg_svd"):
        measures = trial.measures()
    assert math.isnan(measures["flops"])
    assert measures["parameters"] > 0
    with pytest.raises(TrainingError, match="flops of the network are not known"):
        Objectives([Objective("flops", "min")]).scores(measures)


WEIGHTED = """
from torch.nn.functional import cross_entropy
from support.tiny_task import TinyTask


class Weighted(TinyTask):
    def loss(self, outputs, batch):
        weights = 1.0 + 3.0 * batch["targets"]
        return (cross_entropy(outputs, batch["targets"], reduction="none") * weights).sum() / weights.sum()

    def weight(self, batch):
        return float((1 + 3 * batch["targets"]).sum())
"""


def test_a_loss_with_weights_of_its_own_is_that_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "weighted.py").write_text(WEIGHTED)
    section = TaskConfig(type=f"{tmp_path}/weighted.py:Weighted")
    found = []
    for accumulate in (1, 3):
        trial = TrainingTrial(config(accumulate=accumulate).model_copy(update={"task": section}))
        assert trial.advance(STEPS).step == STEPS
        found.append(trial.state().tensors["model/0.weight"])
    assert torch.allclose(*found, atol=1e-6)


TOTALS = """
from support.tiny_task import TinyTask


class Totals(TinyTask):
    def metrics(self, outputs, batch):
        return {"hits": (outputs.argmax(dim=1) == batch["targets"]).sum(), "points": len(outputs)}

    def final_metrics(self, totals):
        return {"share": float(totals["hits"]) / totals["points"]}
"""


def test_totals_are_not_taken_for_metrics(tmp_path: Path) -> None:
    (tmp_path / "totals.py").write_text(TOTALS)
    section = TaskConfig(type=f"{tmp_path}/totals.py:Totals")
    trial = TrainingTrial(config().model_copy(update={"task": section}))
    assert trial.metric_names(["share"]) is None
    assert {"share", "loss", "train_loss"} == set(trial.advance(1).metrics)
