"""A pipeline of workers is the one process, bit for bit, by every schedule."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.stream import MicroBatch, Share
from orchestray.trainers.core.batch_norm import synchronize
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.parallel.pipeline.schedules import make_programs
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program
from orchestray.trainers.sync.factory import make_exchange
from support.pipelines import (
    Regression,
    Result,
    gradients_of,
    make_network,
    mlp,
    one_process,
    pipelined,
    points,
    same_gradients,
    share_of,
    sliced,
)
from support.threads import run_replicas

torch.set_num_threads(1)

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
STAGES = {"interleaved_1f1b": 2, "zbv": 2, "dual_pipe_v": 2}
CLOSE: Any = {"atol": 1e-12, "rtol": 1e-12}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_one_process_bit_for_bit(schedule: str, num_workers: int) -> None:
    model, make = mlp(13), points(5)
    # Uneven micro-batches, then fewer than there are stages, then one alone.
    shares = [share_of([3, 3, 2, 2, 2, 2], make), share_of([2, 1], make), share_of([1], make)]
    plain = one_process(model, shares)
    results = pipelined(model, shares, schedule, num_workers, STAGES.get(schedule, 1))
    reporting = [result for result in results if result.network.is_reporting]
    assert [result.losses for result in reporting] == [plain.losses]
    assert [result.metrics for result in results if result.metrics] == [plain.metrics]
    assert same_gradients(results, plain)
    for result in results:
        held = len(result.network._runners)
        assert sum(result.told) == len(shares) * held, "a stage's gradients are whole once a step"
        assert result.told[-1]


def test_several_stages_a_worker_go_through_gpipe_too() -> None:
    model, shares = mlp(13), [share_of([2] * 5, points(5))]
    assert same_gradients(pipelined(model, shares, "gpipe", 2, 3), one_process(model, shares))


def test_a_share_without_samples_does_nothing() -> None:
    model, empty = mlp(5), share_of([], points(5), batch_samples=3)
    results = pipelined(model, [empty], "1f1b", 2)
    assert [result.losses for result in results] == [[0.0], [0.0]]
    assert all(gradient is None for result in results for gradient in result.gradients[0].values())


def test_ends_that_disagree_on_the_order_of_micro_batches_do_not_deadlock() -> None:
    model, shares = mlp(6), [share_of([2] * 3, points(5))]
    orders = {0: ((0, 1, 2), (0, 1, 2)), 1: ((2, 0, 1), (1, 2, 0))}

    def program(worker: int) -> Program:
        forward, backward = orders[worker]
        return [
            *(Action(worker, Kind.FORWARD, number) for number in forward),
            *(Action(worker, Kind.BACKWARD, number) for number in backward),
        ]

    def disorder(network: Any, collective: Collective) -> None:
        network._program = lambda _number: program(collective.rank)

    plain = one_process(model, shares)
    results = pipelined(model, shares, "gpipe", 2, watch=disorder)
    for result in results:
        for name, gradient in result.gradients[0].items():
            torch.testing.assert_close(gradient, plain.gradients[0][name], **CLOSE)


# -- data replicas of a pipeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_batch_normalisation_over_replicas_of_a_pipeline_is_that_of_one_process(schedule: str) -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())]
    model, per_worker = nn.Sequential(*layers).double(), STAGES.get(schedule, 1)
    whole = share_of([3, 3, 2, 2], points(5))
    plain = one_process(model, [whole])

    def share(replica: int) -> Share:
        """Return the first two samples of each micro-batch, or what is left: of the later ones nothing."""
        made = []
        for part in whole.micro_batches:
            rows = {name: value[:2] if replica == 0 else value[2:] for name, value in part.batch.items()}
            if count := len(rows["inputs"]):
                made.append(MicroBatch(rows, count, part.sample_ids[:count]))
        return Share(0, whole.batch_samples, tuple(made), whole.num_micro_batches)

    layout = Layout(data=2, pipeline=2)
    copies = [copy.deepcopy(model) for _ in range(layout.size)]

    def worker(collective: Collective) -> Result:
        groups = Groups(layout, collective)
        own = copies[collective.rank]
        synchronize(own, lambda: groups.data)
        network = make_network(
            own,
            sliced(own, 2 * per_worker),
            schedule,
            groups,
            stages_per_worker=per_worker,
            one_sample=lambda: {name: value[:1] for name, value in whole.micro_batches[0].batch.items()},
        )
        exchange = make_exchange(type="allreduce")
        exchange.attach(network.model, groups.data, network.pieces)
        exchange.before_step(1)
        loss = network.backward(share(groups.coordinate.data), exchange, step=1)
        (total,) = exchange.finish([loss])
        result = Result([total], [gradients_of(network.model)], {}, {}, network)
        result.buffers = {name: buffer.clone() for name, buffer in network.model.named_buffers()}
        collective.barrier()
        network.close()
        return result

    assert [len(share(replica).micro_batches) for replica in range(2)] == [4, 2]
    results = run_replicas(layout.size, worker)
    reporting = [result for result in results if result.network.is_reporting]
    for result in reporting:
        torch.testing.assert_close(result.losses, plain.losses, **CLOSE)
    for result in results:
        for name, gradient in result.gradients[0].items():
            torch.testing.assert_close(gradient, plain.gradients[0][name], **CLOSE)
        for name, buffer in result.buffers.items():
            torch.testing.assert_close(buffer, plain.buffers[name], **CLOSE)


# -- what is held, and what is reported ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_worker_holds_as_many_micro_batches_as_its_program_promises(schedule: str) -> None:
    num_workers, per_worker, num_micro_batches = 2, STAGES.get(schedule, 1), 6
    results = pipelined(mlp(13), [share_of([1] * num_micro_batches, points(5))], schedule, num_workers, per_worker)
    programs = make_programs(schedule, num_workers, per_worker, num_micro_batches)
    for result, program in zip(results, programs, strict=True):
        for stage, runner in result.network._runners.items():
            live = peak = 0
            for action in program:
                if action.stage == stage:
                    live += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
                    peak = max(peak, live)
            assert runner.peak_live == runner.run_report()["most_held"] == peak
            assert runner.num_live == 0
    if schedule == "1f1b":
        assert [result.network._runners[k].peak_live for k, result in enumerate(results)] == [2, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_usage_tells_links_actions_and_how_busy_the_steps_before_the_last_were(schedule: str) -> None:
    per_worker = STAGES.get(schedule, 1)
    share = share_of([3, 2], points(5))
    told: dict[int, list[Any]] = {0: [], 1: []}

    def look(network: Any, collective: Collective) -> None:
        backward = network.backward

        def noting(*arguments: Any, **options: Any) -> float:
            loss: float = backward(*arguments, **options)
            told[collective.rank].append(network.usage())
            return loss

        network.backward = noting

    pipelined(mlp(8), [share] * 3, schedule, 2, per_worker, watch=look)
    programs = make_programs(schedule, 2, per_worker, 2)
    crossing = [(s, s + 1) for s in range(2 * per_worker - 1) if schedule == "1f1b" or s != 1]
    expected = {f"stage {a} -> stage {b}" for a, b in [*crossing, *((b, a) for a, b in crossing)]}
    assert {link for worker in told.values() for link in worker[0].bytes_by_link} == expected
    for rank, usages in told.items():
        for step, usage in enumerate(usages, start=1):
            assert set(usage.bytes_by_link.values()) == {5 * 5 * 8}, "a value, five samples, eight bytes"
            made = [Action(e["stage"], Kind(e["kind"]), e["micro_batch"]) for e in usage.timeline]
            assert made == programs[rank] * min(step, 2)
            assert [e["step"] for e in usage.timeline][-1] == step
            assert all(e["rank"] == rank and e["begin_s"] <= e["end_s"] for e in usage.timeline)
            ends = [e["end_s"] for e in usage.timeline]
            assert ends == sorted(ends)
        assert (usages[0].busy_s, usages[0].span_s) == (0.0, 0.0)
        assert all(0 < usage.busy_s <= usage.span_s for usage in usages[1:])
    spans = {rank: [usage.span_s for usage in usages] for rank, usages in told.items()}
    assert spans[0] == spans[1], "of all workers, so the same on each"
    for step in (1, 2):
        entries = [e for usages in told.values() for e in usages[step].timeline if e["step"] == step]
        whole = max(e["end_s"] for e in entries) - min(e["begin_s"] for e in entries)
        assert spans[0][step] == whole


def test_metrics_are_known_where_the_last_stage_is_and_nothing_is_held_after() -> None:
    model, share = mlp(8), share_of([3, 2, 1], points(5))
    plain = one_process(model, [share])
    results = pipelined(model, [share], "interleaved_1f1b", 2, 2)
    assert [result.metrics for result in results] == [{}, plain.metrics]
    assert list(plain.metrics) == ["loss", "absolute"]
    assert [result.network.is_reporting for result in results] == [False, True]


def test_tasks_are_called_on_the_last_stage_alone() -> None:
    calls: list[str] = []

    class Noted(Regression):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            calls.append(threading.current_thread().name)
            return super().loss(outputs, batch)

    pipelined(mlp(8), [share_of([3, 2], points(5))], "1f1b", 3, task=Noted())
    assert set(calls) == {"replica-2"}
