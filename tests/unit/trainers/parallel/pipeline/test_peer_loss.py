"""A worker that is gone, in the middle of whatever it did, is a PeerLostError on every other, and nothing hangs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import TrainingError
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork
from support.forked import Forked
from support.pipelines import (
    Backwards,
    make_network,
    mlp,
    one_process,
    pipelined,
    points,
    share_of,
    sliced,
)
from support.threads import run_replicas

torch.set_num_threads(1)
SIZES = [2, 2, 1, 1]


class DiedError(Exception):
    """An error by which a worker ends here."""


def die_in(network: Any, method: str, after: int = 1) -> None:
    """Make the worker die in its second action of a kind."""
    calls = [0]
    for runner in network._runners.values():
        real = getattr(runner, method)

        def dying(*arguments: Any, real: Any = real, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise DiedError
            return real(*arguments, **named)

        setattr(runner, method, dying)


def fates(
    schedule: str, num_workers: int, per_worker: int, victim: int, method: str, *, evaluate: bool = False
) -> list[str]:
    model, share = mlp(13), share_of(SIZES, points(5))
    copies = [copy.deepcopy(model) for _ in range(num_workers)]

    def worker(collective: Collective) -> str:
        own = copies[collective.rank]
        groups = Groups(Layout(pipeline=num_workers), collective)
        network = make_network(
            own, sliced(own, num_workers * per_worker), schedule, groups, stages_per_worker=per_worker
        )
        if collective.rank == victim:
            die_in(network, method)
        try:
            if evaluate:
                with torch.no_grad():
                    network.evaluate(share)
            else:
                network.backward(share, Backwards(), step=1)
            collective.barrier()
        except (PeerLostError, DiedError) as error:
            groups.abort()
            network.close()
            network.close()
            assert all(runner.num_live == 0 for runner in network._runners.values())
            return type(error).__name__
        return "done"

    return run_replicas(num_workers, worker)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        ("1f1b", "forward"),
        ("1f1b", "backward"),
        ("zero_bubble", "backward_input"),
        ("zero_bubble", "backward_weight"),
    ],
)
def test_a_worker_lost_in_any_kind_of_action_is_a_lost_peer_to_all_others(
    schedule: str, method: str, victim: int
) -> None:
    expected = ["PeerLostError"] * 3
    expected[victim] = "DiedError"
    assert fates(schedule, 3, 1, victim, method) == expected


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_a_worker_with_several_stages_that_is_lost_is_a_lost_peer_too(schedule: str) -> None:
    assert fates(schedule, 2, 2, 1, "backward" if schedule != "zbv" else "backward_input") == [
        "PeerLostError",
        "DiedError",
    ]


def test_a_worker_lost_in_validation_is_a_lost_peer() -> None:
    assert fates("1f1b", 3, 1, 1, "evaluate", evaluate=True) == ["PeerLostError", "DiedError", "PeerLostError"]


def test_after_a_loss_another_network_of_the_same_model_computes_as_before() -> None:
    model, share = mlp(13), share_of(SIZES, points(5))
    copies = [copy.deepcopy(model) for _ in range(2)]

    def worker(collective: Collective) -> bool:
        own = copies[collective.rank]
        network = make_network(own, sliced(own, 2), "1f1b", Groups(Layout(pipeline=2), collective))
        if collective.rank == 1:
            die_in(network, "backward")
        with pytest.raises((PeerLostError, DiedError)):
            network.backward(share, Backwards(), step=1)
        network.model.zero_grad()
        return True

    assert run_replicas(2, worker) == [True, True]

    def again(collective: Collective) -> dict[str, Tensor | None]:
        own = copies[collective.rank]
        network = make_network(own, sliced(own, 2), "1f1b", Groups(Layout(pipeline=2), collective))
        network.backward(share, Backwards(), step=1)
        collective.barrier()
        network.close()
        return {name: parameter.grad for name, parameter in network.model.named_parameters()}

    found = {name: gradient for worker in run_replicas(2, again) for name, gradient in worker.items()}
    expected = one_process(model, [share]).gradients[0]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.equal(gradient, found[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_the_model_ends_all_workers_and_is_the_one_that_is_told(stage: int) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the model is wrong")

    model = nn.Sequential(*(Wrong() if index == stage else nn.Linear(5, 5) for index in range(3))).double()
    with pytest.raises(TrainingError, match=f"failed at step 1 on worker {stage}: ValueError: the model is wrong"):
        pipelined(model, [share_of(SIZES, points(5))], "1f1b", 3)


def test_a_loss_that_is_no_number_names_the_samples() -> None:
    share = share_of(SIZES, points(5))
    share.micro_batches[2].batch["inputs"][0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"The loss became nan at step 1 on worker 1, .* in sample\(s\) 4"):
        pipelined(mlp(5), [share], "1f1b", 2)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_worker_lost_in_a_stream_is_a_lost_peer_and_weights_stay_in_their_place(method: str, victim: int) -> None:
    model, shares = mlp(9), [share_of(SIZES, points(5))] * 3
    copies = [copy.deepcopy(model) for _ in range(3)]

    def worker(collective: Collective) -> str:
        own = copies[collective.rank]
        groups = Groups(Layout(pipeline=3), collective)
        network = make_network(own, sliced(own, 3), "pipedream", groups, kind=PipeDreamNetwork)
        places = [parameter.data_ptr() for parameter in network.model.parameters()]
        if collective.rank == victim:
            die_in(network, method, after=4)

        def update(tensors: Any, gradients: Any, _step: int, _number: int) -> None:
            torch._foreach_add_(tensors, gradients, alpha=-0.1)

        try:
            for _ in network.run_segment(shares, update):
                pass
        except (PeerLostError, DiedError) as error:
            groups.abort()
            network.close()
            assert [parameter.data_ptr() for parameter in network.model.parameters()] == places
            return type(error).__name__
        return "done"

    expected = ["PeerLostError"] * 3
    expected[victim] = "DiedError"
    assert run_replicas(3, worker) == expected


_PROCESSES = """
import os, signal, sys
import torch
from torch._C._distributed_c10d import FileStore
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from support.pipelines import Backwards, make_network, mlp, points, share_of, sliced

torch.set_num_threads(1)
size, workers = 3, []
for rank in range(size):  # one import of torch, then a process for every rank
    workers.append(os.fork())
    if not workers[-1]:
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers], flush=True)
    os._exit(0)
groups = Groups(Layout(pipeline=size), Collective.gloo(FileStore(sys.argv[1], size), rank, size, 60.0))
model = mlp(6)
network = make_network(model, sliced(model, size), "1f1b", groups)
share = share_of([2, 2, 1, 1], points(5))
network.backward(share, Backwards(), step=1)
if rank == 2:
    real, calls = network._runners[2].backward, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    network._runners[2].backward = dying
try:
    network.backward(share, Backwards(), step=2)
except PeerLostError as error:
    print(f"lost on {rank}: {error}", flush=True)
    groups.abort()
    network.close()
    os._exit(0)
"""


def test_a_killed_process_is_a_lost_peer_to_its_neighbour_and_to_those_beyond(tmp_path: Path) -> None:
    with Forked(_PROCESSES, str(tmp_path / "store")) as processes:
        assert processes.wait() == 0
        printed = processes.printed()
    # The processes share an output, where the end of a line may come after the begin of another's.
    assert sorted(re.findall(r"lost on \d", printed)) == ["lost on 0", "lost on 1"], printed
    assert "[0, 0, -9]" in printed
