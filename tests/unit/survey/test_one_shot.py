"""One training for all networks: the children of ENAS."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot.enas import EnasTrial
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.schema import TrainConfig

torch.set_num_threads(1)

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5}
CELLS = {"space": "cell", "nodes": 2, "operations": ["identity", "conv_3x3"], "channels": 4, "reductions": 0}


def config(space: dict[str, Any], genome: Any, steps: int, seed: int = 0) -> TrainConfig:
    section = searched_task_section({"type": "digits"}, space, genome)
    train = {"batch_size": 64, "steps": steps, "optimizer": {"type": "adam", "lr": 0.01}, "seed": seed}
    return TrainConfig.model_validate({"name": "one-shot", "task": section, "train": train})


def genomes_of(space: dict[str, Any], count: int) -> list[Any]:
    """Return different networks of a space."""
    made = make_space(space["space"], **{name: value for name, value in space.items() if name != "space"})
    found: dict[str, Any] = {}
    for index in range(100 * count):
        genome = made.sample(rng_of(99, index))
        found.setdefault(key_of(made, genome), genome)
        if len(found) == count:
            break
    return list(found.values())


def test_enas_children_are_the_same_tensors_and_cost_a_small_part_of_a_training(
    record_property: Callable[[str, object], None],
) -> None:
    one, other = genomes_of(CELLS, 2)
    steps = 115
    trial = EnasTrial(config(CELLS, one, steps), num_judged=4, **COMMON)
    first, second = (trial.supernet.child_modules(genome) for genome in (one, other))
    both = first.keys() & second.keys()
    assert {"stem", "head"} <= both
    assert all(first[name] is second[name] for name in both)
    pointers = {p.data_ptr() for name in both for p in first[name].parameters()}
    assert pointers <= {p.data_ptr() for p in trial.supernet.parameters()}

    with trial._judged_by:
        batch = trial._judged_by.at(0)
    before = {name: p.clone() for name, p in trial.supernet.named_parameters()}
    costs: list[tuple[int, float]] = []
    alone = TrainingTrial(config(CELLS, one, steps))
    for made in (lambda: trial.judge(one, batch), lambda: alone.advance(steps)):
        began_s = time.perf_counter()
        with FlopCounterMode(display=False) as counted:
            made()
        costs.append((counted.get_total_flops(), time.perf_counter() - began_s))
    assert all(torch.equal(before[name], p) for name, p in trial.supernet.named_parameters())
    (of_judging, judging_s), (of_training, training_s) = costs
    record_property("operations of a training from scratch, in evaluations", of_training / of_judging)
    record_property("seconds of a training from scratch, in evaluations", training_s / judging_s)
    assert of_training > 3 * steps * of_judging > 0, "a step is a pass forward and one backward of twice its operations"
