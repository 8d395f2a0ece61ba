"""Data and model parallelism, within a machine and across machines, in step and without waiting, on two machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from orchestray.trainers.saved.run import load_run
from support.cli import Running, read_lines
from support.machines import NUM_CPUS
from support.slow_digits import slowly

if TYPE_CHECKING:
    from support.machines import Machines

CONFIG = Path(__file__).parents[2] / "configs" / "train" / "digits-single.yaml"
APART = f"resources.cpus_per_worker={NUM_CPUS}"
"""A worker takes a machine, so that workers talk over the network."""


class Found(NamedTuple):
    """A run that has ended."""

    nodes: list[str]
    """Machine of each worker, in the order of ranks."""
    weights: dict[str, torch.Tensor]
    losses: list[float]


def trained(machines: Machines, folder: Path, name: str, *overrides: str) -> Found:
    slowed, slow = slowly(folder, quick=2)
    arguments = ["train", CONFIG, "train.epochs=4", *overrides, *slowed, "--runs-dir", folder, "--name", name]
    running = Running([*arguments, "--address", machines.gcs_address], folder / name, env=machines.token)
    running.until("a step", lambda: running.steps() >= 1)
    there, workers = machines.workers(), running.actors()
    slow.unlink()
    status, _, stderr = running.finish()
    assert status == 0, stderr
    losses = [line["loss"] for line in read_lines(folder / name / "metrics.jsonl") if "split" not in line]
    weights = load_run(folder / name).load_model().state_dict()
    return Found([there[workers[rank]] for rank in sorted(workers)], weights, losses)


@pytest.mark.slow
def test_data_and_model_parallelism_within_and_across_machines_are_one_training_in_step_and_learn_without(
    machines: Machines, tmp_path: Path
) -> None:
    data_within = trained(machines, tmp_path, "data-within", "strategy.network.data=2")
    data_across = trained(machines, tmp_path, "data-across", "strategy.network.data=2", APART)
    model_within = trained(machines, tmp_path, "model-within", "strategy.network.tensor=2")
    model_across = trained(machines, tmp_path, "model-across", "strategy.network.tensor=2", APART)
    both = "strategy.network={data: 2, tensor: 2}"
    together = trained(machines, tmp_path, "together", both)
    assert [len(set(each.nodes)) for each in (data_within, data_across, model_within, model_across)] == [1, 2, 1, 2]
    first, second = together.nodes[:2], together.nodes[2:]
    assert first[0] == first[1] != second[0] == second[1]  # each replica has a machine
    for each in (data_across, model_within, model_across, together):
        for name, weight in data_within.weights.items():
            torch.testing.assert_close(each.weights[name], weight, rtol=1e-3, atol=1e-4)
    servers = "strategy.exchange={type: parameter_server, consistency: asynchronous, shards: 2}"
    without_waiting = trained(machines, tmp_path, "without-waiting", both, servers)
    assert len(set(without_waiting.nodes)) == 2
    for each in (data_within, without_waiting):
        assert sum(each.losses[-10:]) < 0.5 * sum(each.losses[:10])
