"""SMASH: its steps, its ranking by generated weights, a state handed on, and what it leaves behind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestray
from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.memory_bank import MemoryBank, MemoryBankCode
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot.smash import SmashTrial
from orchestray.trainers.config.schema import TrainConfig

torch.set_num_threads(1)

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5, "hidden": 8}
BANKS: dict[str, Any] = {"blocks": 1, "channels": [8], "max_ops": 4, "max_convolutions": 1, "kernels": [3]}


def config(steps: int, **train: Any) -> TrainConfig:
    genome = make_space("memory_bank", **BANKS).sample(rng_of(0))
    section = searched_task_section({"type": "digits"}, {"space": "memory_bank", **BANKS}, genome)
    settings = {"batch_size": 64, "steps": steps, "optimizer": {"type": "adam", "lr": 0.01}, "seed": 0, **train}
    return TrainConfig.model_validate({"name": "smash", "task": section, "train": settings})


def trial_of(steps: int, *, num_judged: int = 4, num_perturbed: int = 2, train: Any = None, **more: Any) -> SmashTrial:
    counts = {"num_judged": num_judged, "num_perturbed": num_perturbed}
    return SmashTrial(config(steps, **(train or {})), **{**COMMON, **counts, **more})


def batch_of(trial: SmashTrial) -> Any:
    with trial._judged_by:
        return trial._cast(trial._judged_by.at(0))


def test_networks_that_were_never_trained_classify_by_weights_of_their_own_code_better_than_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = trial_of(150, num_judged=1, num_perturbed=0, hidden=32)
    seen: list[Any] = []
    sample, code = trial.space.sample, MemoryBank.code
    monkeypatch.setattr(trial.space, "sample", lambda rng: seen.append(sample(rng)) or seen[-1])
    trial.advance(150)
    assert len({str(genome) for genome in seen}) > 100, "each step draws a network"
    unseen = [one for one in map(sample, map(rng_of, range(900, 990))) if one not in seen][:24]
    batch = batch_of(trial)

    def of_no_network(space: MemoryBank, genome: Any) -> MemoryBankCode:
        described = code(space, genome)
        return replace(described, cells=0 * described.cells)

    def of_another(space: MemoryBank, genome: Any) -> MemoryBankCode:
        described = code(space, genome)
        cells = code(space, unseen[(unseen.index(genome) + 1) % len(unseen)]).cells
        rows = np.arange(described.cells.shape[1]) % cells.shape[1]
        return replace(described, cells=np.ascontiguousarray(cells[:, rows]))

    losses = []
    for coded in (code, of_another, of_no_network):
        monkeypatch.setattr(MemoryBank, "code", coded)
        losses.append(-sum(trial.judge(genome, batch) for genome in unseen) / len(unseen))
    right, wrong, none = losses
    print(f"mean loss by the network's code {right:.2f}, by another's {wrong:.2f}, by none {none:.2f}")
    assert right < 0.95 * wrong
    assert right < 0.75 * math.log(10) < 0.95 * none, "chance is the logarithm of ten classes"


def test_a_perturbation_of_the_best_replaces_it_where_it_is_better() -> None:
    drawn, perturbed = (trial_of(30, num_judged=6, num_perturbed=number) for number in (0, 24))
    for trial in (drawn, perturbed):
        trial.advance(30)
    with perturbed._judged_by:
        batches = perturbed._ranking_batches(0)

    def scores(trial: SmashTrial) -> list[float]:
        return [sum(perturbed.judge(genome, batch) for batch in batches) for genome in trial.found]

    assert max(scores(drawn)) < scores(perturbed)[0]
    assert scores(perturbed) == sorted(scores(perturbed), reverse=True)


def test_a_trial_that_goes_on_from_its_state_is_one_that_was_never_paused() -> None:
    whole, first, second = (trial_of(12) for _ in range(3))
    whole.advance(12)
    first.advance(5)
    second.load(first.state())
    second.advance(12)
    ours, theirs = second.state(), whole.state()
    assert ours.position == theirs.position
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ours.tensors)


def test_the_best_network_is_left_behind_with_its_generated_weights(tmp_path: Path) -> None:
    trial = trial_of(20)
    best = trial.advance(20).told["genomes"][0]
    trial.leave_run(tmp_path / "best")
    run = orchestray.load_run(tmp_path / "best")
    assert run.load_task().genome == best
    batch = run.load_task().to_batch(run.load_task().dataset("validation"))
    with torch.no_grad():
        loss = float(run.load_task().loss(run.load_model()(batch["inputs"]), batch))
    assert loss == pytest.approx(trial.validate(trial.child(best))["loss"], rel=1e-5)


def test_a_step_of_the_hypernet_is_clipped_as_the_config_says() -> None:
    trial = trial_of(1, train={"optimizer": {"type": "sgd", "lr": 1.0}, "grad_clip": 0.01})
    before = {name: tensor.detach().clone() for name, tensor in trial.writer.named_parameters()}
    trial.advance(1)
    moved = [(tensor.detach() - before[name]).square().sum() for name, tensor in trial.writer.named_parameters()]
    assert 0 < float(sum(moved)) ** 0.5 <= 0.01 * (1 + 1e-5)


def test_the_names_of_metrics_are_known_before_the_first_step() -> None:
    trial = trial_of(2)
    assert trial.metric_names(["other"]) == ["accuracy"]
    assert trial.step == 0


def test_a_metric_of_which_less_is_better_ranks_the_other_way_round() -> None:
    one, other = (trial_of(4, metric="accuracy", less_is_better=less) for less in (False, True))
    genome, batch = one.space.sample(rng_of(0)), batch_of(one)
    assert one.judge(genome, batch) == -other.judge(genome, batch) > 0
