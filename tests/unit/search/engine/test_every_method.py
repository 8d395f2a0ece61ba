"""Every config of configs/search, shortened: through the engine without Ray, to a best run that does what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import orchestray
from orchestray.platform.run.metrics import read_lines
from orchestray.search.config.gangs import most_workers
from orchestray.search.config.load import dump_search_yaml, load_search_config
from orchestray.search.config.schema import SearchConfig
from orchestray.search.registry.methods import METHODS
from orchestray.search.results.run import SearchRun
from orchestray.search.results.writer import SearchRecords
from support.search_loop import loop_of

CONFIGS = Path(__file__).parents[4] / "configs" / "search"
FILES = {file.stem.removeprefix("digits-"): file for file in sorted(CONFIGS.glob("*.yaml"))}
STEPS, PARALLEL = 4, 2
MAY_STOP = {"asha", "learning_curve", "median_stopping", "omnivore"}
"""Methods that may end a trial before its last step."""
UNTRAINED = {"neat"}
"""Methods whose networks come with their weights."""
OF_GANGS = {"omnivore-groups", "omnivore-staleness"}
"""Each of its trials is a gang of actors, for which there has to be a cluster: tests/cluster/test_search_nested.py."""

SMALL_CELL = [
    "search.architecture.nodes=2",
    "search.architecture.channels=4",
    "search.architecture.operations=[identity, conv_1x1, max_3x3]",
]
SMALL_SHARED = [
    *SMALL_CELL,
    "search.architecture.reductions=0",
    "search.method.search_steps=4",
    "base.train.batch_size=128",
]

SHORTER: dict[str, tuple[int, list[str]]] = {
    "architecture": (
        4,
        [
            "search.method.proposals.population=2",
            "search.method.proposals.sample_size=2",
            "search.method.grace_steps=2",
            "search.method.every_steps=2",
            "search.method.min_trials=1",
            "search.architecture.channels=[4]",
            "search.architecture.max_depth=3",
        ],
    ),
    "architectures-bayesian": (3, ["search.method.initial=2", "search.architecture.max_depth=2"]),
    "architectures-random": (2, []),
    "asha": (4, ["search.method.eta=2", "search.method.grace_steps=1"]),
    "bayesian": (3, ["search.method.initial=2"]),
    "boxes-hyperneat": (6, ["search.method.population=3"]),
    "conditional": (5, ["search.method.initial=2"]),
    "constraint": (4, ["search.method.initial=2"]),
    "blocks": (3, ["search.architecture.most_layers=2", "search.architecture.channels=4"]),
    "codeepneat": (
        4,
        [
            "search.method.population=2",
            "search.method.modules=2",
            "search.method.networks=2",
            "search.method.species=1",
            "search.architecture.channels=[4]",
        ],
    ),
    "darts": (2, SMALL_SHARED),
    "enas": (
        3,
        [
            *SMALL_SHARED,
            "search.method.controller_every=2",
            "search.method.controller_steps=1",
            "search.method.children=2",
            "search.method.num_judged=2",
        ],
    ),
    "evolution": (4, ["search.method.population=2", "search.method.sample_size=2"]),
    "evolution-cells": (4, ["search.method.population=2", "search.method.sample_size=2", *SMALL_CELL]),
    "genetic-cnn": (4, ["search.method.population=2", "search.architecture.channels=[4, 4]"]),
    "grid": (4, ["search.method.points={train.optimizer.lr: 2}", "search.space.task.hidden.values=[[8], [4, 4]]"]),
    "hierarchical-evolution": (
        4,
        [
            "search.method.population=2",
            "search.method.initial_mutations=3",
            "search.architecture.motifs=[3]",
            "search.architecture.nodes=[3, 3]",
            "search.architecture.channels=2",
        ],
    ),
    "large-scale-evolution": (4, ["search.method.population=2"]),
    "learning-curve": (4, ["search.method.grace_steps=2", "search.method.every_steps=1"]),
    "median-stopping": (
        4,
        ["search.method.grace_steps=2", "search.method.every_steps=1", "search.method.min_trials=1"],
    ),
    "neat": (6, ["search.method.population=3"]),
    "omnivore": (
        4,
        [
            "search.method.every_steps=2",
            "search.method.probe_steps=1",
            "search.space.train.optimizer.momentum.values=[0.0, 0.9]",
        ],
    ),
    "own-space": (2, []),
    "particle-swarm": (4, ["search.method.population=2"]),
    "pbt": (2, ["search.method.population=2", "search.method.interval_steps=2", "search.method.fraction=0.5"]),
    "pbt-packed": (2, ["search.method.population=2", "search.method.interval_steps=2", "search.method.fraction=0.5"]),
    "progressive": (4, ["search.method.beam=2", "search.method.candidates=8", *SMALL_CELL]),
    "q-learning": (3, []),
    "random": (2, []),
    "reinforce": (4, ["search.method.children=2"]),
    "smash": (
        3,
        [
            *("search.method.num_judged=2", "search.method.num_perturbed=1", "search.method.hidden=4"),
            *("search.architecture.channels=[4]", "search.method.search_steps=4", "base.train.batch_size=128"),
        ],
    ),
    "sobol": (2, []),
    "spectral": (6, ["search.method.samples=4", "search.method.stages=1", "search.method.degree=1"]),
    "steady-state": (4, ["search.method.population=2", "search.method.sample_size=2"]),
    "tpe": (3, ["search.method.initial=2"]),
}
"""By the name of a config: how many trials, and what else makes it short."""


def shortened(name: str) -> SearchConfig:
    """Return a config of a few trials of a few steps."""
    num_trials, overrides = SHORTER[name]
    config = load_search_config(FILES[name], [*overrides, f"search.parallel={PARALLEL}"])
    is_one = config.search.method.type in UNTRAINED or config.unit != "steps"
    budget = {f"{config.unit}_per_trial": 1 if is_one else STEPS}
    if config.search.budget.trials is not None:
        budget["trials"] = num_trials
    return load_search_config(config.model_dump(mode="json"), [f"search.budget.{key}={n}" for key, n in budget.items()])


def searched(config: SearchConfig, runs: Path, *, killed_after: Sequence[int] = ()) -> SearchRun:
    """Search in this process.

    `orchestray.search` then only makes the calls of the journal again, writes the best run, and ends.

    Args:
        config: of the search.
        runs: where its directory is made.
        killed_after: number of answers of trials before each kill; the search then goes on from its directory.
    """
    with SearchRecords.create(runs, config.name) as records:
        records.write_config(dump_search_yaml(config))
    for num_answers in (*killed_after, None):
        with SearchRecords.open_existing(runs, config.name) as records:
            loop = loop_of(config, records)
            if num_answers is None:
                loop.run()
            else:
                assert all(loop.step() for _ in range(num_answers))
            loop.close()
    return orchestray.search(config, runs_dir=runs, resume=True)


def measured(run: Any, metric: str) -> float:
    """Return a metric of the saved weights on the validation data, all at once."""
    task, model = run.load_task(), run.load_model().eval()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        outputs = model(batch["inputs"])
        return float({"loss": task.loss(outputs, batch), **task.metrics(outputs, batch)}[metric])


def test_every_config_and_so_every_method_is_gone_through() -> None:
    names = set(FILES)
    assert set(SHORTER) | OF_GANGS == names
    of_gangs = {name for name in names if (c := load_search_config(FILES[name])) and gangs(c)}
    assert of_gangs == OF_GANGS
    assert {shortened(name).search.method.type for name in SHORTER} == set(METHODS)


def gangs(config: SearchConfig) -> int:
    return most_workers(config.base, config.search.space)


@pytest.mark.parametrize("name", SHORTER)
def test_the_best_run_of_every_method_scores_what_the_search_has_reported(name: str, tmp_path: Path) -> None:
    config = shortened(name)
    search = searched(config, tmp_path)
    lines, result, goal = search.lines(), search.result, config.search.objective[0]
    num_trials = SHORTER[name][0]
    assert sorted(line["trial"] for line in lines) == list(range(num_trials))
    method = config.search.method.type
    assert {line["status"] for line in lines} <= ({"succeeded", "stopped"} if method in MAY_STOP else {"succeeded"})
    steps = 0 if method in UNTRAINED else config.steps_per_trial
    assert all(line["steps"] == steps for line in lines if line["status"] == "succeeded")
    assert (result["status"], result["trials"], result["error"]) == ("succeeded", num_trials, None)

    best = result["best"]
    assert best["objective"] == (max if goal.mode == "max" else min)(
        line["objective"] for line in lines if line.get("feasible", True)
    )
    run = orchestray.load_run(search.path / "best")
    assert run.result["status"] == "succeeded"
    assert run.result["final"]["validation"][goal.metric] == pytest.approx(best["objective"], rel=1e-6)
    assert measured(run, goal.metric) == pytest.approx(best["objective"], rel=1e-5)


ONE_SHOT = ["darts", "enas", "smash"]


@pytest.mark.parametrize("name", ONE_SHOT)
def test_shared_weights_come_first_and_the_networks_found_with_them_go_on_from_them_though_killed(
    name: str, tmp_path: Path
) -> None:
    config = inheriting(name, "true")
    whole, alone = searched(config, tmp_path / "whole"), searched(inheriting(name, "false"), tmp_path / "alone")
    num_finalists = SHORTER[name][0] - 1
    lines = sorted(whole.lines(), key=lambda line: line["trial"])
    assert [line["parent"] for line in lines] == [None] + [0] * num_finalists
    assert [trial for trial, *_ in reports(whole)] == [0] * STEPS + list(range(1, 1 + num_finalists))
    assert reports(whole)[:STEPS] == reports(alone)[:STEPS]
    for (_, _, loss), (_, _, loss_alone) in zip(reports(whole)[STEPS:], reports(alone)[STEPS:], strict=True):
        assert loss != loss_alone, "the same networks, from other weights"
    # Twice: in the midst of the shared weights; between them and the networks found.
    again = searched(config, tmp_path / "killed", killed_after=(2, STEPS - 2))
    assert [but_for_time(line) for line in again.lines()] == [but_for_time(line) for line in whole.lines()]
    assert but_for_time(again.result["best"]) == but_for_time(whole.result["best"])
    assert weights(again) == weights(whole)


def inheriting(name: str, inherit: str) -> SearchConfig:
    short = shortened(name).model_dump(mode="json")
    return load_search_config(short, [f"search.method.inherit={inherit}", "search.parallel=1"])


def reports(search: SearchRun) -> list[tuple[int, int, float]]:
    """Return (trial, step, loss of the training) of each report."""
    lines = read_lines(search.path / "reports.jsonl")
    return [(line["trial"], line["step"], line["metrics"]["train_loss"]) for line in lines]


def but_for_time(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("seconds", "latency_ms")}


def weights(search: SearchRun) -> bytes:
    return (search.path / "best" / "model" / "model.safetensors").read_bytes()
