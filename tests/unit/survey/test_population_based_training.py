"""Group G: population-based training. Copies are exact, the lineage is valid, and a moving optimum is followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.search.engine.messages import TrialTask
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.methods.base import Exploit, Proposal
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Dimension, Uniform
from orchestray.search.trials.program import Progress
from support.population_toy import NUM_STEPS
from support.search_loop import Loop

LR = "train.optimizer.lr"
STEPS, INTERVAL = 24, 6


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_clone_has_the_bytes_of_its_source_and_every_line_of_the_lineage_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: bool
) -> None:
    copied: list[tuple[int, int, int]] = []
    """Trial, source, and bytes of its state, of each order of the engine to take over another trial's state."""
    advance = TrialHost._advance

    def noting(host: TrialHost, order: TrialTask) -> Progress:
        if order.source is not None and order.source.trial != order.trial:
            _, held = host.checkpoint()
            source = host._files.read(order.source)
            assert held.tensors.keys() == source.tensors.keys()
            assert all(torch.equal(held.tensors[name], tensor) for name, tensor in source.tensors.items())
            assert held.position["step"] == source.position["step"]
            copied.append((order.trial, order.source.trial, sum(one.nbytes for one in source.tensors.values())))
        return advance(host, order)

    monkeypatch.setattr(TrialHost, "_advance", noting)
    space: dict[str, Dimension] = {LR: Uniform(1e-4, 0.3, is_log=True)}
    method = PopulationBasedTraining(
        space=space,
        population=4,
        interval_steps=INTERVAL,
        steps_per_trial=STEPS,
        fraction=0.25,
        synchronous=synchronous,
    )
    loop = Loop(method, tmp_path, parallel=2).run()
    loop.close()
    records = loop.records
    reported = {(trial, step): metrics["accuracy"] for trial, step, metrics in records.reports}
    made = [(trial, parent, step) for trial, parent, step, _ in records.nodes if parent is not None]
    assert made
    if synchronous:
        assert len(made) == STEPS // INTERVAL - 1  # the worst of four, after every interval but the last
    for trial, source, step in made:
        assert trial != source
        assert (source, step) in reported
        assert not synchronous or reported[source, step] >= reported[trial, step]
    assert [(trial, source) for trial, source, _ in copied] == [(trial, source) for trial, source, _ in made]
    lines = records.lines.values()
    assert sum(line.get("copies", 0) for line in lines) == len(copied)
    assert sum(line.get("copied_bytes", 0) for line in lines) == sum(size for _, _, size in copied) > 0


def test_a_schedule_is_found_where_the_best_value_moves_which_no_fixed_one_is() -> None:
    """Earn in a step 1 less how far the value is from one that rises from 0.1 to 0.9."""

    def gain(value: float, step: int) -> float:
        return 1.0 - 2.0 * abs(value - (0.1 + 0.8 * step / NUM_STEPS))

    states: dict[int, tuple[int, float]] = {}

    def evaluate(proposal: Proposal, step: int) -> float:
        done, total = states.get(proposal.trial, (0, 0.0))
        total += sum(gain(proposal.changes["value"], one) for one in range(done, step))
        states[proposal.trial] = step, total
        return total

    def become(trial: int, decision: Exploit) -> None:
        states[trial] = states[decision.source]

    fixed = max(sum(gain(value / 100, step) for step in range(NUM_STEPS)) for value in range(101))
    for seed in range(3):
        states.clear()
        method = PopulationBasedTraining(
            space={"value": Uniform(0.05, 1.0)},
            population=8,
            interval_steps=5,
            steps_per_trial=NUM_STEPS,
            fraction=0.3,
            seed=seed,
        )
        assert (simulate(method, evaluate, workers=4, on_become=become).best.score or 0.0) > fixed
