"""Group G: population-based training. Copies are exact, the lineage is valid, and a moving optimum is followed."""

from __future__ import annotations

import torch

from orchestray.search.methods.base import Exploit, Proposal
from orchestray.search.methods.population.pbt import PopulationBasedTraining
from orchestray.search.replay import config_at
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Dimension, Uniform
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from support.population_toy import NUM_STEPS

LR = "train.optimizer.lr"
STEPS, INTERVAL = 24, 6


def test_a_clone_has_the_bytes_of_its_source_and_every_line_of_the_lineage_names_one() -> None:
    train = {"batch_size": 256, "steps": STEPS, "optimizer": {"type": "adam", "lr": 0.01}}
    base = load_train_config({"name": "population", "task": {"type": "digits", "hidden": [8]}, "train": train})
    trials: dict[int, TrainingTrial] = {}
    lineage: list[tuple[int, int, int]] = []

    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.trial not in trials:
            trials[proposal.trial] = TrainingTrial(config_at(base, proposal.changes))
        return trials[proposal.trial].advance(step).metrics["accuracy"]

    def become(trial: int, decision: Exploit) -> None:
        source = trials[decision.source]
        before = {name: value.clone() for name, value in source.state().tensors.items()}
        trials[trial] = TrainingTrial(config_at(base, decision.changes))
        trials[trial].load(source.state())
        copied = trials[trial].state()
        assert copied.tensors.keys() == before.keys()
        assert all(torch.equal(copied.tensors[name], value) for name, value in before.items())
        assert copied.position["step"] == source.step
        lineage.append((trial, decision.source, source.step))

    space: dict[str, Dimension] = {LR: Uniform(1e-4, 0.3, is_log=True)}
    method = PopulationBasedTraining(
        space=space, population=4, interval_steps=INTERVAL, steps_per_trial=STEPS, fraction=0.25, synchronous=True
    )
    found = simulate(method, evaluate, workers=2, on_become=become)
    assert len(lineage) == STEPS // INTERVAL - 1  # the worst of four, after every interval but the last
    for trial, source, step in lineage:
        assert trial != source
        assert step in dict(found.trials[source].reports)
        at = dict(found.trials[source].reports)[step], dict(found.trials[trial].reports)[step]
        assert at[0] >= at[1]


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
