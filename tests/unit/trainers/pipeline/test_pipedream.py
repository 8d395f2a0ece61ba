"""PipeDream's stages update without waiting for each other, exactly as the paper says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.platform.data.stream import Share
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.optimizers import make_optimizer
from orchestray.trainers.pipeline.pipedream import PipeDreamNetwork, StreamStep
from support.pipelines import Regression, make_network, mlp, points, share_of, sliced
from support.threads import run_replicas

torch.set_num_threads(1)
LR = 0.05
State = dict[str, Tensor]


class Run:
    """What one worker did."""

    def __init__(self) -> None:
        self.steps: list[StreamStep] = []
        self.weights: State = {}
        self.network: Any = None
        self.at_flush: list[tuple[int, State]] = []


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def stream(
    model: nn.Sequential,
    segments: Sequence[Sequence[Share]],
    num_workers: int,
    *,
    data: int = 1,
    shares_of: Any = None,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> list[Run]:
    """Train by PipeDream, workers as threads."""
    layout = Layout(data=data, pipeline=num_workers)
    copies = [copy.deepcopy(model) for _ in range(layout.size)]

    def worker(collective: Collective) -> Run:
        groups = Groups(layout, collective)
        own = copies[collective.rank]
        network = make_network(own, sliced(own, num_workers), "pipedream", groups, kind=PipeDreamNetwork, **options)
        run = Run()
        run.network = network
        rule = make_optimizer(**(optimizer or {"type": "sgd"}))
        rule.init(list(network.model.named_parameters()))

        def update(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], step: int, number: int) -> None:
            rule.step(tensors, gradients, LR)

        step = 1
        try:
            for segment in segments:
                mine = segment if shares_of is None else shares_of(segment, groups.coordinate.data)
                done = list(network.run_segment(mine, update, first_step=step))
                assert [found.step for found in done] == list(range(step, step + len(segment)))
                step += len(segment)
                run.steps += done
                run.at_flush.append((network.versions.newest, state_of(network.model)))
            collective.barrier()
        finally:
            network.close()
        run.weights = state_of(network.model)
        return run

    return run_replicas(layout.size, worker)


def emulated(
    model: nn.Sequential,
    segments: Sequence[Sequence[Share]],
    num_stages: int,
    *,
    vertical_sync: bool = False,
    optimizer: dict[str, Any] | None = None,
) -> tuple[State, list[float]]:
    """One process that does PipeDream's updates one after the other, by hand: every version of every stage is kept."""
    model = copy.deepcopy(model)
    stages = sliced(model, num_stages)
    rules = []
    for stage in stages.values():
        rule = make_optimizer(**(optimizer or {"type": "sgd"}))
        rule.init(list(stage.named_parameters()))
        rules.append(rule)
    versions = [[[p.detach().clone() for p in stage.parameters()]] for stage in stages.values()]
    losses = []
    for segment in segments:
        first = len(versions[0]) - 1  # updates before this segment
        batches = [(share, part) for share in segment for part in share.micro_batches]
        for number, (share, part) in enumerate(batches):
            chosen = []
            for k, stage in stages.items():
                late = num_stages - 1 - (0 if vertical_sync else k)
                weights = versions[k][first + max(0, number - late)]
                for parameter, value in zip(stage.parameters(), weights, strict=True):
                    parameter.data = value.clone()
                chosen.append(list(stage.parameters()))
            model.zero_grad()
            loss = Regression().loss(model(part.batch["inputs"]), part.batch)
            weight = part.num_samples / share.batch_samples
            (loss * weight).backward()
            losses.append(float(loss.detach()) * weight)
            for k, rule in enumerate(rules):
                newest = [value.clone() for value in versions[k][-1]]
                rule.step(newest, [parameter.grad for parameter in chosen[k]], LR)
                versions[k].append(newest)
    for k, stage in stages.items():
        for parameter, value in zip(stage.parameters(), versions[k][-1], strict=True):
            parameter.data = value
    return state_of(model), losses


def batches(num: int, sizes: Sequence[int] = (3, 2, 2)) -> list[Share]:
    return [share_of(sizes, points(5, seed)) for seed in range(num)]


def together(runs: Sequence[Run]) -> State:
    return {name: value for run in runs for name, value in run.weights.items()}


def same_bits(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}], ids=lambda o: o["type"])
@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_weights_are_those_of_the_updates_done_one_by_one_with_stashed_versions(
    num_workers: int, vertical_sync: bool, optimizer: dict[str, Any]
) -> None:
    model = mlp(9)
    segments = [batches(3), batches(2, (4,)), [*batches(1, (1,)), *batches(2)]]
    expected, losses = emulated(model, segments, num_workers, vertical_sync=vertical_sync, optimizer=optimizer)
    runs = stream(model, segments, num_workers, vertical_sync=vertical_sync, optimizer=optimizer)
    assert same_bits(together(runs), expected)
    told = [loss for step in runs[-1].steps for loss in step.losses.values()]
    assert told == losses
    one_process, _ = emulated(model, segments, 1, optimizer=optimizer)
    assert same_bits(expected, one_process) == (num_workers == 1), "the delay is real"
