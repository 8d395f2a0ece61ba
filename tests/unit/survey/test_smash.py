"""The ranking of SMASH: generated weights against training, over seeds, with what could explain it without them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.memory_bank import MemoryBank, MemoryBankCode
from orchestray.search.spaces.registry import make_space
from orchestray.search.spaces.searched_task import searched_task_section
from orchestray.search.trials.one_shot.smash import SmashTrial
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.schema import TrainConfig

torch.set_num_threads(1)

BANKS: dict[str, Any] = {"blocks": 1, "channels": [8], "max_ops": 4, "max_convolutions": 1, "kernels": [3]}
SPACE = cast(MemoryBank, make_space("memory_bank", **BANKS))
STEPS, SEARCH_STEPS = 100, 300
OF_EACH_DEPTH = 8
SIZES = range(1680, 1790)
"""Parameters of the networks that are compared."""


def config(genome: Any, steps: int, seed: int = 0) -> TrainConfig:
    section = searched_task_section({"type": "digits"}, {"space": "memory_bank", **BANKS}, genome)
    optimizer, schedule = {"type": "adam", "lr": 0.01}, {"type": "cosine"}
    train = {"batch_size": 64, "steps": steps, "optimizer": optimizer, "lr_schedule": schedule, "seed": seed}
    return TrainConfig.model_validate({"name": "smash", "task": section, "train": train})


def parameters(genome: Any) -> int:
    return sum(parameter.numel() for parameter in SPACE.build(genome, (64,), 10).parameters())


def of_equal_size() -> list[Any]:
    """Return different networks that fill three banks by two, three and four ops, eight each, of nearly one size.

    The fewer ops there are, the wider are their bottlenecks, and the more banks do they read.
    """
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for number in range(6000):
        genome = SPACE.sample(rng_of(99, number))
        (block,) = SPACE.blocks_of(genome)
        of_depth = found[len(block.ops)]
        if len(block.filled) == 3 and len(of_depth) < OF_EACH_DEPTH and parameters(genome) in SIZES:
            of_depth.setdefault(SPACE.key(genome), genome)
    return [genome for ops in (2, 3, 4) for genome in found[ops].values()]


def ranks(values: Any) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def correlation(a: Any, b: Any) -> float:
    """Return Spearman's rank correlation."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def given(size: Any, a: Any, b: Any) -> float:
    """Return the rank correlation that is left once the size has explained what it can of both."""
    left = [ranks(one) - np.polyval(np.polyfit(ranks(size), ranks(one), 1), ranks(size)) for one in (a, b)]
    return float(np.corrcoef(*left)[0, 1])


def scores(trial: SmashTrial, genomes: list[Any]) -> list[float]:
    with trial._judged_by:
        batches = [trial._cast(trial._judged_by.at(number)) for number in range(8)]
    return [sum(trial.judge(genome, batch) for batch in batches) for genome in genomes]


@pytest.mark.slow
def test_smash_ranks_networks_of_equal_size_as_training_does_and_without_their_codes_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    genomes, cache, code = of_equal_size(), TaskCache(), MemoryBank.code
    assert len(genomes) == 24
    losses = [
        [TrainingTrial(config(one, STEPS, seed), task_cache=cache).advance(STEPS).metrics["loss"] for one in genomes]
        for seed in (0, 1)
    ]
    trained = -np.mean(losses, axis=0)
    sizes = [parameters(genome) for genome in genomes]

    def of_none(space: MemoryBank, genome: Any) -> MemoryBankCode:
        described = code(space, genome)
        return replace(described, cells=0 * described.cells)

    def of_another(space: MemoryBank, genome: Any) -> MemoryBankCode:
        described = code(space, genome)
        cells = code(space, shuffled[str(genome)]).cells
        rows = np.arange(described.cells.shape[1]) % cells.shape[1]
        return replace(described, cells=np.ascontiguousarray(cells[:, rows]))

    by_code: list[float] = []
    beside_size: list[float] = []
    by_another: list[float] = []
    by_none: list[float] = []
    for seed in range(5):
        monkeypatch.setattr(MemoryBank, "code", code)
        common = {"seed": seed, "finalists": 1, "architecture_part": 0.5, "num_judged": 1, "num_perturbed": 0}
        trial = SmashTrial(config(genomes[0], SEARCH_STEPS, seed), **common)
        trial.advance(SEARCH_STEPS)
        order = np.random.default_rng(seed).permutation(len(genomes))
        shuffled = {str(genome): genomes[other] for genome, other in zip(genomes, order, strict=True)}
        for found, coded in ((by_code, code), (by_another, of_another), (by_none, of_none)):
            monkeypatch.setattr(MemoryBank, "code", coded)
            found.append(correlation(judged := scores(trial, genomes), trained))
            if coded is code:
                beside_size.append(given(sizes, judged, trained))
    print(f"Spearman over 24 networks: {by_code}, beside the size {beside_size}; by size {correlation(sizes, trained)}")
    print(f"by the codes of others {by_another}, by none {by_none}")
    for found in (by_code, beside_size):
        assert min(found) > 0.352, "one-sided significance of 5 % for 24 networks and their size"
        assert np.mean(found) > 0.487, "of 1 %"
    assert np.mean(by_another) < 0.6 * np.mean(by_code)
    assert max(by_none) < 0.0, "what is left ranks them the wrong way round"
