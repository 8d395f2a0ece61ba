"""One training for all networks: ENAS, DARTS, SMASH, and a network that grows in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.base import key_of
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot.enas import EnasTrial
from orchestray.search.trials.one_shot.smash import SmashTrial
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.schema import TrainConfig

torch.set_num_threads(1)

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5}
CELLS = {"space": "cell", "nodes": 2, "operations": ["identity", "conv_3x3"], "channels": 4, "reductions": 0}
DENSE = {"space": "chain", "layers": ["dense"], "widths": [2, 6, 32], "max_depth": 3, "max_dense": 3}


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


def test_smash_ranks_networks_as_training_does() -> None:
    genomes = genomes_of(DENSE, 24)
    task_cache = TaskCache()
    trials = [TrainingTrial(config(DENSE, genome, 60), task_cache=task_cache) for genome in genomes]
    trained = [-trial.advance(60).metrics["loss"] for trial in trials]
    trial = SmashTrial(config(DENSE, genomes[0], 300), **{**COMMON, "num_judged": 4})
    trial.advance(300)
    with trial._judged_by:
        batches = [trial._judged_by.at(index) for index in range(4)]
    written = [sum(trial.judge(genome, batch) for batch in batches) for genome in genomes]
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = [trial._build(genome).train() for genome in genomes]
        own = [-sum(float(trial._task.loss(one(batch["inputs"]), batch)) for batch in batches) for one in drawn]
    assert all(one > before for one, before in zip(written, own, strict=True)), "better than weights at random"
    ranks = [np.argsort(np.argsort(values)) for values in (written, trained)]
    correlation = float(np.corrcoef(*ranks)[0, 1])
    print(f"Spearman's rank correlation over {len(genomes)} networks {correlation:.2f}")
    assert correlation > 0.485, "one-sided significance of 1 % for 24 networks"
