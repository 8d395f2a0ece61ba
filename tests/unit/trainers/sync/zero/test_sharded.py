"""Sharding the optimizer's state and the gradients (ZeRO 1 and 2) changes nothing but the memory."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError, ring_bytes
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.survey.zero_memory import held_bytes
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from orchestray.trainers.sync.factory import make_exchange
from orchestray.trainers.sync.zero.row_sharding import cut_rows
from orchestray.trainers.sync.zero.sharded import Sharded
from support.sharding import (
    OPTIMIZERS,
    Training,
    assert_equal,
    awkward,
    backward,
    batch,
    bits_of,
    micro_batches,
    put_together,
    trained_alone,
)
from support.threads import make_gloo_threads, run_replicas

STEPS = 5
SMALL_BUCKETS = 0.0005
STAGES = ("optimizer", "gradients")


def trained(size: int, exchange: dict[str, Any], optimizer: str) -> tuple[dict[str, Tensor], list[Training]]:
    model = awkward()

    def replica(collective: Collective) -> tuple[Training, dict[str, Any]]:
        training = Training(copy.deepcopy(model), Sharded(**exchange), collective, optimizer)
        for step in range(1, STEPS + 1):
            training.step(step)
        return training, training.parts()

    found = run_replicas(size, replica)
    return put_together([parts for _, parts in found]), [training for training, _ in found]


# The stages differ in when gradients are freed, which no optimizer sees; lars needs norms of whole parameters.
@pytest.mark.parametrize(
    ("size", "shard", "optimizer"),
    [
        *((3, STAGES[1], name) for name in OPTIMIZERS),
        *((3, STAGES[0], name) for name in ("adam", "lars")),
        *((2, stage, "adam") for stage in STAGES),
    ],
)
def test_weights_and_optimizer_state_equal_those_of_one_process(size: int, shard: Any, optimizer: str) -> None:
    expected, losses = trained_alone(awkward(), optimizer)
    found, trainings = trained(size, {"shard": shard, "bucket_mb": SMALL_BUCKETS}, optimizer)
    assert_equal(found, expected)
    for training in trainings:
        assert training.losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_replica_holds_the_same_bits_with_overlap_on_or_off_and_in_either_stage(size: int) -> None:
    states = []
    for shard in STAGES:
        for overlap in (True, False):
            _, trainings = trained(size, {"shard": shard, "bucket_mb": SMALL_BUCKETS, "overlap": overlap}, "adam")
            states += [training.model.state_dict() for training in trainings]
    for state in states:
        for name, value in state.items():
            assert torch.equal(value, states[0][name]), name


def test_on_two_replicas_the_weights_are_those_of_the_all_reduce_but_for_the_last_rounding() -> None:
    model = awkward()

    def replica(collective: Collective) -> dict[str, Tensor]:
        training = Training(copy.deepcopy(model), AllReduce(), collective, "adam")
        for step in range(1, STEPS + 1):
            training.step(step)
        return training.model.state_dict()

    expected = run_replicas(2, replica)[0]
    _, trainings = trained(2, {"shard": "gradients"}, "adam")
    for name, value in trainings[0].model.state_dict().items():
        if name != "scale":  # summed in double precision among the extras
            assert torch.allclose(value, expected[name], rtol=1e-15, atol=1e-16), name


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("shard", STAGES)
def test_on_two_replicas_whose_rows_fill_registers_all_bits_are_those_of_the_all_reduce(
    shard: Any, optimizer: str
) -> None:
    expected = bits_of(AllReduce, optimizer)
    assert_equal(bits_of(lambda: Sharded(shard, bucket_mb=SMALL_BUCKETS), optimizer), expected, 0.0)


@pytest.mark.parametrize("shard", STAGES)
def test_a_parameter_no_replica_used_has_no_gradient_and_one_that_some_used_has_their_sum(shard: Any) -> None:
    model = awkward()

    def replica(collective: Collective) -> dict[str, bool]:
        own = copy.deepcopy(model)
        exchange = Sharded(shard)
        exchange.attach(own, collective)
        has = {}
        for step in (3, 4):  # in the one a sample uses `rare`, in the other none
            exchange.before_step(step)
            backward(own, exchange, micro_batches(step, collective.rank, 2), len(batch(step)[0]))
            exchange.finish([])
            gradients = dict(zip([u.name for u in exchange.updates()], exchange.gradients(), strict=True))
            assert all(parameter.grad is None for parameter in own.parameters())
            has[f"rare {step}"] = gradients["rare.weight"] is not None
            has[f"never {step}"] = gradients["never"] is not None
            has[f"first {step}"] = gradients["first.weight"] is not None
            exchange.after_step(step)
        return has

    expected = {"rare 3": True, "never 3": False, "first 3": True, "rare 4": False, "never 4": False, "first 4": True}
    assert run_replicas(2, replica) == [expected, expected]


class Even(nn.Module):
    """A model whose first dimensions are multiples of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def one_step(exchange: Sharded | AllReduce, model: nn.Module, step: int = 1) -> None:
    exchange.before_step(step)
    exchange.begin_backward(True)
    model(torch.ones(2, 24)).sum().backward()
    exchange.finish([1.0])


@pytest.mark.parametrize("shard", STAGES)
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_sent_per_step_are_those_of_an_all_reduce_of_the_parameters(size: int, shard: Any) -> None:
    def replica(collective: Collective) -> tuple[int, int]:
        model = Even()
        exchange = Sharded(shard, bucket_mb=0.002)
        exchange.attach(model, collective)
        for step in (1, 2, 3):
            before = collective.bytes_sent
            one_step(exchange, model, step)
            exchange.after_step(step)
        assert exchange.bytes_saved == 0
        return collective.bytes_sent - before, collective.bytes_sent

    parameters = list(Even().parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    extras = ring_bytes(torch.zeros(len(parameters) + size * MAX_EXTRAS, dtype=torch.float64), size)
    expected = 2 * numel * (size - 1) // size * 4 + extras
    assert run_replicas(size, replica) == [(expected, 3 * expected)] * size


def test_no_padding_is_sent_where_rows_do_not_divide() -> None:
    model = awkward()

    def replica(collective: Collective) -> int:
        exchange = Sharded("gradients", bucket_mb=SMALL_BUCKETS)
        exchange.attach(copy.deepcopy(model), collective)
        exchange.before_step(1)
        exchange.finish([])
        exchange.after_step(1)
        return collective.bytes_sent

    trained_ones = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained_ones if parameter.dim())
    small = ring_bytes(torch.zeros(len(trained_ones) + 3 * MAX_EXTRAS + 1, dtype=torch.float64), 3)
    assert sum(run_replicas(3, replica)) == 2 * numel * (3 - 1) * 8 + 3 * small


@pytest.mark.parametrize("size", [2, 3])
def test_held_bytes_follow_the_formulas_of_the_paper(size: int) -> None:
    """Check ZeRO, section 3 and figure 1, with four bytes a number: parameters 4, gradients 4, Adam's state 8."""

    def replica(shard: str) -> Any:
        def held(collective: Collective) -> dict[str, int]:
            model = Even()
            exchange: Any = AllReduce() if shard == "none" else Sharded(shard, bucket_mb=0.002)  # type: ignore[arg-type]
            exchange.attach(model, collective)
            optimizer = make_optimizer("adam")
            optimizer.init((update.name, update.tensor) for update in exchange.updates())
            one_step(exchange, model)
            return held_bytes(exchange, optimizer)

        return run_replicas(size, held)

    psi = 4 * sum(parameter.numel() for parameter in Even().parameters())
    steps = 4 * len(list(Even().parameters()))  # Adam's counters, one a parameter
    for held in replica("optimizer"):
        assert held == {"parameters": psi, "gradients": psi, "optimizer": 2 * psi // size + steps}
    for held in replica("gradients"):
        assert held == {"parameters": psi, "gradients": psi // size, "optimizer": 2 * psi // size + steps}
    for held in replica("none"):
        assert held["parameters"] == psi
        assert psi <= held["gradients"] < 1.1 * psi
        assert held["optimizer"] == 2 * psi + steps


def test_whole_gradients_are_freed_during_the_backward_pass_in_stage_2_and_stay_in_stage_1() -> None:
    alive: dict[str, int] = {}

    def replica(collective: Collective) -> None:
        for shard in STAGES:
            model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(12)])
            exchange = Sharded(shard, bucket_mb=0.002)
            exchange.attach(model, collective)
            filling = exchange._filling
            assert filling is not None
            assert len(filling.buckets) == 12
            most = 0

            def count(*_: object, filling: Any = filling) -> None:
                nonlocal most
                most = max(most, sum(bucket._flat is not None for bucket in filling.buckets))

            model[0].weight.register_hook(count)
            model[6].weight.register_hook(count)
            exchange.before_step(1)
            exchange.begin_backward(True)
            model(torch.ones(2, 24)).sum().backward()
            if collective.rank == 0:
                alive[shard] = most
            exchange.finish([])

    run_replicas(2, replica)
    assert alive["optimizer"] == 12
    assert alive["gradients"] <= 3, "one bucket being filled, two being reduced"


def test_shards_compose_with_an_earlier_cut() -> None:
    plain = torch.arange(48.0).view(8, 6)
    held = TensorSlice.whole("weight", (8, 6)).chunk(1, 1, 2).narrow(0, (1, 3), (5, 8))

    def replica(collective: Collective) -> tuple[TensorSlice, Tensor]:
        model = nn.ParameterDict({"weight": nn.Parameter(held.take(plain))})
        exchange = Sharded("gradients")
        exchange.attach(model, collective, {"weight": held})
        (update,) = exchange.updates()
        return update.piece, update.tensor

    found = torch.full((8, 6), -1.0)
    results = run_replicas(2, replica)
    assert sorted(piece.local_shape for piece, _ in results) == [(2, 3), (3, 3)]
    for piece, tensor in results:
        piece.put(found, tensor)
    expected = torch.full((8, 6), -1.0)
    held.put(expected, held.take(plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 16])
def test_rows_are_cut_evenly_and_loads_differ_by_one_row_at_most(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    shapes = [torch.randint(1, 20, (2,), generator=generator).tolist() for _ in range(30)]
    parameters = [torch.empty(rows, row) for rows, row in shapes]
    loads = [0] * num_ranks
    for (num_rows, row), cuts in zip(shapes, cut_rows(parameters, num_ranks), strict=True):
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == num_rows
        counts = [stop - start for start, stop in cuts]
        assert max(counts) - min(counts) <= 1
        loads = [load + count * row for load, count in zip(loads, counts, strict=True)]
    assert max(loads) - min(loads) <= max(row for _, row in shapes)


@pytest.mark.parametrize("shard", STAGES)
def test_a_replica_that_is_lost_raises_peer_lost_and_the_others_go_on_in_a_new_group(shard: Any) -> None:
    model = awkward()
    second = make_gloo_threads(2)

    def broken_step(own: nn.Module, exchange: Sharded, rank: int) -> None:
        backward(own, exchange, micro_batches(1, rank, 3), 12)
        exchange.finish([])

    def replica(collective: Collective) -> list[Tensor | None]:
        own = copy.deepcopy(model)
        exchange = Sharded(shard, bucket_mb=SMALL_BUCKETS)
        exchange.attach(own, collective)
        exchange.before_step(1)
        if collective.rank == 2:
            collective.abort()
            return []
        with pytest.raises(PeerLostError, match="lost a peer"):
            broken_step(own, exchange, collective.rank)
        exchange.attach(own, second[collective.rank])
        exchange.before_step(1)
        backward(own, exchange, micro_batches(1, collective.rank, 2), 12)
        exchange.finish([])
        return exchange.gradients()

    alone = copy.deepcopy(model)
    exchange = AllReduce()
    exchange.attach(alone, SoloCollective())
    backward(alone, exchange, micro_batches(1, 0, 1), 12)
    try:
        results = run_replicas(3, replica)
    finally:
        for member in second:
            member.close()
    trained_ones = [(name, parameter) for name, parameter in alone.named_parameters() if parameter.requires_grad]
    for (name, parameter), *shards in zip(trained_ones, *results[:2], strict=True):
        if parameter.grad is None:
            assert shards == [None, None], name
        elif name != "scale":  # the one scalar is on every replica
            square = sum(float(shard.pow(2).sum()) for shard in shards if shard is not None)
            assert square == pytest.approx(float(parameter.grad.pow(2).sum()), rel=1e-12), name


def test_extras_are_summed_exactly_and_misuse_is_refused_with_a_sentence() -> None:
    def replica(collective: Collective) -> list[float]:
        exchange = Sharded("optimizer")
        exchange.attach(nn.Linear(2, 2), collective)
        exchange.before_step(1)
        return exchange.finish([1 / 3 + collective.rank, float(collective.rank)])

    for sums in run_replicas(3, replica):
        assert sums == [math.fsum([1 / 3, 4 / 3, 7 / 3]), 3.0]
    with pytest.raises(TrainingError, match="not attached"):
        Sharded().finish([])
    exchange = Sharded()
    exchange.attach(nn.Linear(1, 1), SoloCollective())
    with pytest.raises(ValueError, match="At most 8"):
        exchange.finish([0.0] * 9)
    assert exchange.state() == {}
    assert exchange.wanted() == {}


def test_a_sharded_exchange_is_made_from_the_keys_of_its_config_section() -> None:
    for shard in STAGES:
        assert isinstance(make_exchange(type="allreduce", shard=shard, bucket_mb=1, overlap=False), Sharded)
    with pytest.raises(ConfigError, match="'optimizer', 'gradients', 'parameters'"):
        make_exchange(shard="layers")
