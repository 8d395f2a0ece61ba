"""A parameter of several stages has one gradient: the sum of what its workers computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.core.exchange import OptimizedTensor
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.parallel.pipeline.layers import Tied
from orchestray.trainers.parallel.pipeline.tied import add_up
from support.pipelines import (
    Backwards,
    make_network,
    one_process,
    pipelined,
    points,
    share_of,
    sliced,
)
from support.threads import run_replicas

torch.set_num_threads(1)

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
STAGES = {"interleaved_1f1b": 2, "zbv": 2, "dual_pipe_v": 2}
CLOSE: Any = {"atol": 1e-12, "rtol": 1e-12}


class Bound(nn.Sequential):
    """A sequence whose last layer has the weights of the first."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self[-1].weight = self[0].weight


def bound() -> Bound:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5, bias=False) if index % 2 == 0 else nn.Tanh() for index in range(9)]
    return Bound(*layers).double()


def combined(network: Any) -> list[Tensor | None]:
    named = [(name, p) for name, p in network.model.named_parameters() if p.requires_grad]
    updates = [OptimizedTensor(name, parameter, network.pieces[name]) for name, parameter in named]
    gradients = [None if p.grad is None else p.grad.clone() for _, p in named]
    network.combine(updates, gradients)
    return gradients


@pytest.mark.parametrize(("schedule", "num_workers"), [("1f1b", 2), ("zero_bubble", 3), ("interleaved_1f1b", 2)])
def test_gradients_of_tied_parameters_are_added_up_over_their_workers(schedule: str, num_workers: int) -> None:
    per_worker = STAGES.get(schedule, 1)
    last = num_workers * per_worker - 1
    model, shares = bound(), [share_of([2, 2, 1], points(5))]
    plain = one_process(model, shares)
    totals: dict[int, dict[str, Tensor | None]] = {}
    exchange = Backwards()
    copies = [copy.deepcopy(model) for _ in range(num_workers)]

    def worker(collective: Collective) -> Any:
        own = copies[collective.rank]
        network = make_network(
            own,
            sliced(own, last + 1),
            schedule,
            Groups(Layout(pipeline=num_workers), collective),
            stages_per_worker=per_worker,
            tied=[Tied("0.weight", ((0, "0.weight"), (last, "8.weight")))],
        )
        network.backward(shares[0], exchange, step=1)
        names = [name for name, _ in network.model.named_parameters()]
        totals[collective.rank] = dict(zip(names, combined(network), strict=True))
        collective.barrier()
        network.close()
        return network.pieces

    pieces = run_replicas(num_workers, worker)
    tied = totals[0]["0.weight"]
    expected = plain.gradients[0]["0.weight"]
    torch.testing.assert_close(tied, expected, **CLOSE)
    other = totals[num_workers - 1]["8.weight"]
    assert other is not None
    assert tied is not None
    assert torch.equal(tied, other), "the same bits on every worker"
    named = [piece for worker_pieces in pieces for piece in worker_pieces.values() if piece.name == "0.weight"]
    assert [piece.is_counted for piece in named] == [True, False]


def test_a_tied_parameter_that_one_worker_did_not_use_gets_the_other_ones_gradient() -> None:
    def worker(collective: Collective) -> Any:
        own = bound()
        network = make_network(
            own,
            sliced(own, 2),
            "1f1b",
            Groups(Layout(pipeline=2), collective),
            tied=[Tied("0.weight", ((0, "0.weight"), (1, "8.weight")))],
        )
        parameter = dict(network.model.named_parameters())["0.weight" if collective.rank == 0 else "8.weight"]
        if collective.rank == 0:
            parameter.grad = torch.full_like(parameter, 3.0)
        found = combined(network)
        collective.barrier()
        network.close()
        return found

    for found in run_replicas(2, worker):
        (tied,) = [gradient for gradient in found if gradient is not None]
        assert torch.equal(tied, torch.full((5, 5), 3.0, dtype=torch.float64))


def test_sums_are_of_complex_and_conjugated_gradients_too_and_none_where_nobody_has_one() -> None:
    tensors = [torch.zeros(2, dtype=torch.cdouble), torch.zeros(3), torch.zeros(1)]

    def run(group: Collective) -> list[Tensor | None]:
        mine = torch.full((2,), 1 + 2j, dtype=torch.cdouble).conj()  # as autograd gives it for `weight.conj()`
        gradients = [mine, None if group.rank else torch.ones(3), None]
        add_up(group, tensors, gradients, [0, 1, 2])
        return gradients

    for conjugated, real, unused in run_replicas(2, run):
        assert conjugated is not None
        assert real is not None
        assert conjugated.tolist() == [2 - 4j] * 2
        assert real.tolist() == [1.0] * 3
        assert unused is None


@pytest.mark.parametrize("schedule", ["zbv", "dual_pipe_v"])
def test_a_parameter_tied_between_stages_of_one_worker_is_whole_in_the_last_pass_alone(schedule: str) -> None:
    model, shares = bound(), [share_of([2, 2, 1, 1], points(5))]
    plain = one_process(model, shares)
    tied = [Tied("0.weight", ((0, "0.weight"), (3, "8.weight")))]
    results = pipelined(model, shares, schedule, 2, 2, tied=tied)
    for result in results:
        for name, gradient in result.gradients[0].items():
            torch.testing.assert_close(gradient, plain.gradients[0][name], **CLOSE)
    assert sum(results[0].told) == 1
    assert results[0].network.pieces["8.weight"].name == "0.weight"
