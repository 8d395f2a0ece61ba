"""Fully sharded replicas: losses of one, cuts within cuts, units and turns, what is refused, and processes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.zero.fsdp_units import unit_modules
from orchestray.trainers.sync.zero.fully_sharded import FullySharded
from orchestray.trainers.sync.zero.uneven_calls import Turns
from orchestray.trainers.tasks.transformer import Block, Embedding
from support.forked import Forked
from support.fully_sharded import STEPS, Stack
from support.sharding import Training, assert_equal, awkward, put_together, trained_alone
from support.threads import make_gloo_threads, run_replicas

PROCESS = Path(__file__).parents[4] / "support" / "sharding_process.py"


@pytest.mark.parametrize("moment", ["forward", "backward", "finish"])
def test_a_replica_that_is_lost_raises_peer_lost_and_the_model_can_be_used_again(moment: str) -> None:
    original = awkward()
    second = make_gloo_threads(2)

    class Leaves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, leave: Any) -> Tensor:
            ctx.leave = leave
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            ctx.leave()
            return gradient, None

    def replica(collective: Collective) -> dict[str, Any]:
        model = copy.deepcopy(original)
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)

        def fail() -> None:
            exchange.before_step(1)
            x = torch.ones(2, 6, dtype=torch.float64)
            if collective.rank == 1 and moment == "forward":
                model.hidden.register_forward_pre_hook(lambda *_: collective.abort())
            y = model(x)
            if collective.rank == 1 and moment == "backward":
                y = Leaves.apply(y, collective.abort)
            exchange.begin_backward(True)
            y.sum().backward()
            if collective.rank == 1:
                collective.abort()
            exchange.finish([])

        with pytest.raises(PeerLostError):
            fail()
        training = Training(model, exchange, second[collective.rank], "adam")
        for step in (1, 2):
            training.step(step)
        return training.parts()

    try:
        results = run_replicas(2, replica)
    finally:
        for member in second:
            member.close()
    expected, _ = trained_alone(original, "adam", 2)
    assert_equal(put_together(results), expected)


def test_shards_compose_with_an_earlier_cut_and_are_the_chunks_of_torch() -> None:
    plain = torch.arange(48.0).view(8, 6)
    held = TensorSlice.whole("weight", (8, 6)).chunk(1, 1, 2).narrow(0, (1, 3), (5, 8))

    def replica(collective: Collective) -> tuple[TensorSlice, Tensor]:
        model = nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            model.weight.copy_(held.take(plain))
        exchange = FullySharded()
        exchange.attach(model, collective, {"weight": held})
        (update,) = exchange.updates()
        assert exchange.held()["weight"].piece == update.piece
        return update.piece, update.tensor

    found = torch.full((8, 6), -1.0)
    results = run_replicas(2, replica)
    for (piece, tensor), chunk in zip(results, held.take(plain).chunk(2), strict=True):
        assert torch.equal(tensor, chunk)
        piece.put(found, tensor)
    expected = torch.full((8, 6), -1.0)
    held.put(expected, held.take(plain))
    assert torch.equal(found, expected)


def test_loading_into_what_is_held_changes_what_the_model_computes() -> None:
    torch.manual_seed(0)
    original, loaded = Stack().double(), Stack().double()
    plain = loaded.state_dict()

    def replica(collective: Collective) -> Tensor:
        model = copy.deepcopy(original)
        exchange = FullySharded(smallest_unit_bytes=0)
        exchange.attach(model, collective)
        with torch.no_grad():
            model(torch.ones(1, 24, dtype=torch.float64))
            exchange.rest()
            for name, held in exchange.held().items():
                held.tensor.copy_(held.piece.take(plain[name]))
            return model(torch.ones(1, 24, dtype=torch.float64))

    for result in run_replicas(2, replica):
        torch.testing.assert_close(result, loaded(torch.ones(1, 24, dtype=torch.float64)), atol=1e-15, rtol=1e-15)


def test_units_are_the_repeated_blocks_and_what_is_tied_stays_with_the_root() -> None:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(20, 8, 16, 0.0)
            self.blocks = nn.ModuleList([Block(16, 2, 0.0) for _ in range(3)])
            self.head = nn.Linear(16, 20)

    model = Transformer()
    assert unit_modules(model, 0) == [model.embedding, *model.blocks, model.head]
    assert unit_modules(model, 4000) == list(model.blocks)
    model.head.weight = model.embedding.tokens.weight
    assert unit_modules(model, 0) == list(model.blocks)
    wrapped = nn.Sequential(model)
    assert unit_modules(wrapped, 0) == list(model.blocks)
    perceptron = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert unit_modules(perceptron, 0) == [perceptron[0], perceptron[2][0], perceptron[2][1]]  # type: ignore[index]
    assert unit_modules(nn.Linear(2, 2), 0) == []


def test_turns_serve_the_lowest_rank_first_and_rest_when_all_rest() -> None:
    wanted = [[5, 7], [7, 5, 9], []]

    def replica(collective: Collective) -> tuple[list[int], list[int]]:
        done: list[int] = []
        served: list[int] = []
        turns = Turns(collective, served.append)
        for code in wanted[collective.rank]:
            turns.take(code, lambda code=code: done.append(code))
        turns.rest()
        return done, served

    results = run_replicas(3, replica)
    assert [done for done, _ in results] == wanted
    # In order: 5 (rank 0), 7 (both), then 5 and 9 of rank 1.
    assert [served for _, served in results] == [[5, 9], [5], [5, 7, 5, 9]]


def test_what_cannot_be_sharded_is_refused_with_a_sentence() -> None:
    def replica(collective: Collective) -> None:
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        FullySharded(smallest_unit_bytes=0).attach(mixed, collective)  # a unit each: fine
        with pytest.raises(TrainingError, match=r"one Sequential trains must be of one dtype; it has '0.weight' in fl"):
            FullySharded().attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), collective)
        model = nn.Linear(2, 2)
        exchange = FullySharded()
        exchange.attach(model, collective)
        with pytest.raises(TrainingError, match="build it anew"):
            exchange.attach(model, SoloCollective())

    run_replicas(2, replica)
    with pytest.raises(TrainingError, match="not attached"):
        FullySharded().finish([])
    exchange = FullySharded()
    exchange.attach(nn.Linear(1, 1), SoloCollective())
    with pytest.raises(ValueError, match="At most 8"):
        exchange.finish([0.0] * 9)
    assert exchange.state() == {}
    assert exchange.wanted() == {}
    assert isinstance(make_exchange(shard="parameters", bucket_mb=25.0, overlap=True), FullySharded)


def test_a_model_without_parameters_to_shard_trains() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def replica(collective: Collective) -> float:
        model = Scaled()
        exchange = FullySharded()
        exchange.attach(model, collective)
        exchange.before_step(1)
        exchange.begin_backward(True)
        model(torch.tensor(float(collective.rank + 1))).backward()
        exchange.finish([])
        (gradient,) = exchange.gradients()
        assert gradient is not None
        return float(gradient)

    assert run_replicas(2, replica) == [3.0, 3.0]


def test_data_groups_of_a_larger_world_shard_each_on_its_own() -> None:
    """Shard two copies of a model in two parts: ranks count the other axis fastest."""
    models = [awkward(), awkward()]
    with torch.no_grad():
        models[1].scale.add_(1.0)

    def worker(world: Collective) -> tuple[int, dict[str, Any]]:
        groups = Groups(Layout(data=2, tensor=2), world)
        part = groups.coordinate.tensor
        exchange = FullySharded(smallest_unit_bytes=0)
        training = Training(copy.deepcopy(models[part]), exchange, groups.data, "adam")
        for step in range(1, STEPS + 1):
            training.step(step)
        return part, training.parts()

    results = run_replicas(4, worker)
    for part, model in enumerate(models):
        expected, _ = trained_alone(model, "adam")
        assert_equal(put_together([parts for at, parts in results if at == part]), expected)


def test_processes_in_the_default_group_of_torch_distributed_shard_the_model(tmp_path: Path) -> None:
    with Forked(PROCESS, str(tmp_path), "0") as one, Forked(PROCESS, str(tmp_path), "1") as two:
        for process in (one, two):
            assert process.wait() == 0, process.printed()
    apart = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert max(apart) <= 1e-12
