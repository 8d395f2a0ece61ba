"""PipeDream's stages update without waiting for each other, exactly as the paper says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.stream import MicroBatch, Share
from orchestray.platform.errors import ConfigError
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.parallel.pipeline.layers import Tied
from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork, StreamStep
from orchestray.trainers.parallel.pipeline.schedules import make_programs
from support.pipelines import Regression, make_network, mlp, points, share_of, sliced
from support.threads import run_replicas

torch.set_num_threads(1)
LR = 0.05
State = dict[str, Tensor]


class Run:
    """Results of one worker."""

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
    lr: float = LR,
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
        rule.init([(name, p) for name, p in network.model.named_parameters() if p.requires_grad])

        def update(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], step: int, number: int) -> None:
            rule.step(tensors, gradients, lr)

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
    """Do PipeDream's updates one after the other, by hand, in one process: every version of every stage is kept."""
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


@pytest.mark.parametrize(
    ("num_workers", "optimizer"),
    [(1, {"type": "adam"}), (2, {"type": "sgd", "momentum": 0.9}), (3, {"type": "adam"}), (4, {"type": "sgd"})],
    ids=lambda value: value["type"] if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("vertical_sync", [False, True])
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


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_layers_that_autograd_keeps_the_weights_of_go_back_by_the_stashed_ones(vertical_sync: bool) -> None:
    # Of a linear layer a view of the weights is kept, of a normalisation the parameter itself.
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.LayerNorm(5), nn.Linear(5, 5), nn.PReLU(5))]
    model = nn.Sequential(*layers).double()
    expected, _ = emulated(model, [batches(3)], 3, vertical_sync=vertical_sync)
    assert same_bits(together(stream(model, [batches(3)], 3, vertical_sync=vertical_sync)), expected)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_a_backward_pass_that_reads_the_parameters_themselves_finds_those_of_its_forward_pass(
    vertical_sync: bool,
) -> None:
    """Train layers whose backward pass has kept no view of their weights, as that of `nn.Linear` has."""
    model = mlp(9)
    for index in range(1, 9, 2):
        model[index] = nn.LayerNorm(5).double()
    segments = [batches(3), batches(2, (4,))]
    expected, losses = emulated(model, segments, 3, vertical_sync=vertical_sync)
    runs = stream(model, segments, 3, vertical_sync=vertical_sync)
    assert same_bits(together(runs), expected)
    assert [loss for step in runs[-1].steps for loss in step.losses.values()] == losses


@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_staleness_and_versions_are_those_of_the_paper(num_workers: int, vertical_sync: bool) -> None:
    runs = stream(mlp(9), [batches(4), batches(1)], num_workers, vertical_sync=vertical_sync)
    for stage, run in enumerate(runs):
        late = num_workers - 1 - (0 if vertical_sync else stage)
        assert [s for step in run.steps[:4] for s in step.staleness] == [min(late, n) for n in range(12)]
        assert run.steps[4].staleness == [min(late, n) for n in range(3)], "a flush leaves nothing stale"
        held = num_workers if vertical_sync else num_workers - stage
        assert run.network.versions.peak_held == held
        assert run.network.versions.num_held == 1
        runner = run.network._runners[stage]
        assert runner.peak_live == num_workers - stage
        assert runner.num_live == 0


def test_a_flush_leaves_all_stages_at_the_same_version_in_the_memory_of_the_parameters() -> None:
    model, segments = mlp(9), [batches(2), batches(1, (1,)), batches(3)]
    runs = stream(model, segments, 3)
    for run in runs:
        assert [version for version, _ in run.at_flush] == [6, 7, 16]
    for number in range(1, len(segments) + 1):
        expected, _ = emulated(model, segments[:number], 3)
        found = {name: value for run in runs for name, value in run.at_flush[number - 1][1].items()}
        assert same_bits(found, expected), "what a checkpoint would hold"


def test_a_stream_goes_on_over_batches_without_a_flush() -> None:
    model = mlp(9)
    in_one, _ = emulated(model, [batches(4)], 3)
    flushed, _ = emulated(model, [batches(4)[:2], batches(4)[2:]], 3)
    assert not same_bits(in_one, flushed)
    assert same_bits(together(stream(model, [batches(4)], 3)), in_one)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_replicas_of_a_stage_add_up_the_gradients_of_each_micro_batch(vertical_sync: bool) -> None:
    model, whole = mlp(9), batches(3, (3, 2, 1))

    def half(segment: Sequence[Share], replica: int) -> list[Share]:
        """Return two samples of each micro-batch for the first replica, and the rest for the second.

        Of the last micro-batch of two nothing is left for the second.
        """
        shares = []
        for share in segment:
            parts = []
            for part in share.micro_batches:
                rows = {name: value[:2] if replica == 0 else value[2:] for name, value in part.batch.items()}
                if count := len(rows["inputs"]):
                    parts.append(MicroBatch(rows, count, part.sample_ids[:count]))
            shares.append(Share(0, share.batch_samples, tuple(parts), share.num_micro_batches))
        return shares

    runs = stream(model, [whole], 2, data=2, shares_of=half, vertical_sync=vertical_sync)
    expected, losses = emulated(model, [whole], 2, vertical_sync=vertical_sync)
    for replica in (runs[:2], runs[2:]):
        found = together(replica)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-12)
    assert same_bits(together(runs[:2]), together(runs[2:])), "replicas have the same bits"
    total = sum(step.loss_sum for run in runs for step in run.steps)
    assert total == pytest.approx(sum(losses), rel=1e-12)
    assert [step.loss_sum for run in (runs[0], runs[2]) for step in run.steps] == [0.0] * 6, "known on the last stage"


def test_a_parameter_without_a_gradient_is_not_updated() -> None:
    model = mlp(5)
    model[2].bias.requires_grad_(False)
    runs = stream(model, [batches(2)], 2, optimizer={"type": "sgd", "weight_decay": 0.1})
    found = together(runs)
    assert torch.equal(found["2.bias"], model[2].bias)
    assert not torch.equal(found["2.weight"], model[2].weight)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_a_convex_problem_is_solved_in_spite_of_the_delay(vertical_sync: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.randn(5, 5, generator=generator, dtype=torch.float64)
    shares = [share_of([16] * 4, lambda _: {"inputs": inputs, "targets": targets}) for _ in range(40)]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
    for layer in list(model)[1:]:  # linear in what is learned
        assert isinstance(layer, nn.Linear)
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        layer.weight.requires_grad_(False)
    runs = stream(model, [shares], 3, vertical_sync=vertical_sync, optimizer={"type": "sgd", "momentum": 0.5}, lr=0.5)
    losses = [step.loss_sum for step in runs[-1].steps]
    assert losses[-1] < 1e-3 * losses[0]


def test_usage_of_a_stream_tells_its_actions_in_the_order_of_the_schedule() -> None:
    runs = stream(mlp(9), [batches(1, (1, 1, 1, 1))], 2)
    programs = make_programs("pipedream", 2, 1, 4)
    for run, program in zip(runs, programs, strict=True):
        usage = run.network.usage()
        done = [(entry["stage"], entry["kind"], entry["micro_batch"]) for entry in usage.timeline]
        assert done == [(action.stage, str(action.kind), action.micro_batch) for action in program]
        assert 0 < usage.busy_s <= usage.span_s


def test_what_cannot_be_updated_stage_by_stage_is_refused() -> None:
    groups: Any = None
    with pytest.raises(ConfigError, match="one stage a worker"):
        PipeDreamNetwork(Regression(), nn.Module(), {}, placement=[(0, 1)], groups=groups, draw=groups)
    tied = [Tied("0.weight", ((0, "0.weight"), (1, "2.weight")))]
    with pytest.raises(ConfigError, match=r"'0\.weight' lives in several stages.*1f1b"):
        PipeDreamNetwork(Regression(), nn.Module(), {}, placement=[(0,), (1,)], groups=groups, draw=groups, tied=tied)
