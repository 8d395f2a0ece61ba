"""One training for all networks: the children of ENAS."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot.enas import EnasTrial
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


def test_enas_children_are_the_same_tensors_and_cost_a_small_part_of_a_training() -> None:
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
    with FlopCounterMode(display=False) as judged:
        trial.judge(one, batch)
    assert all(torch.equal(before[name], p) for name, p in trial.supernet.named_parameters())
    with FlopCounterMode(display=False) as stepped:
        trial._task.loss(trial.supernet(batch["inputs"], one), batch).backward()
    ratio = stepped.get_total_flops() * steps / judged.get_total_flops()
    print(f"a training of {steps} steps from scratch costs {ratio:.0f} evaluations with shared weights")
    assert ratio > 2 * steps
