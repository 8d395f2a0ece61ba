"""Training by the all-reduces of the survey equals one process, whatever the algorithm and the number of replicas."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.comm.allreduce.measure import Fitted
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, num_rounds, sent_elements
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError
from orchestray.trainers.sync.allreduce import explicit_allreduce
from orchestray.trainers.sync.allreduce.explicit_allreduce import AlgorithmicAllReduce
from orchestray.trainers.sync.factory import make_exchange
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.threads import run_replicas
from support.training import few_digits, furthest, same_bits, train

EVERY = (*ALGORITHMS, "auto")
SMALL_BUCKETS = {"bucket_mb": 0.004}
_ONE: dict[str, LaidOut] = {}


def task() -> Any:
    return few_digits()


def one_process() -> LaidOut:
    return _ONE.setdefault("plain", train_laid_out(task, layout_settings(steps=3)))


# Sums of 2 to 5 ranks: tests/unit/platform/comm/allreduce/test_execute.py. Of 3, one rank is folded; of 4, none.
@pytest.mark.parametrize("data", [3, 4])
@pytest.mark.parametrize("algorithm", EVERY)
def test_loss_and_weights_are_those_of_one_process_at_every_step(algorithm: str, data: int) -> None:
    one = one_process()
    found = train_laid_out(task, layout_settings({"data": data}, {"algorithm": algorithm, **SMALL_BUCKETS}, steps=3))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize(("algorithm", "network"), [("tree", {"tensor": 2}), ("auto", {"pipeline": 2})])
def test_replicas_spread_over_several_workers_are_one_process_too(algorithm: str, network: dict[str, Any]) -> None:
    one = one_process()
    found = train_laid_out(task, layout_settings({"data": 2, **network}, {"algorithm": algorithm}, steps=3))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("data", [3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_hold_the_same_bits_after_every_step_and_overlap_changes_none(algorithm: str, data: int) -> None:
    runs = [
        train(
            few_digits(hidden=[16]),
            data,
            exchange={"algorithm": algorithm, "overlap": overlap, **SMALL_BUCKETS},
            steps=3,
            precision="float32",
        )
        for overlap in (True, False)
    ]
    for replicas in runs:
        for replica in replicas:
            for step, weights in enumerate(replica.weights):
                assert same_bits(weights, runs[0][0].weights[step])


@pytest.mark.parametrize("data", [3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_run_counts_what_all_replicas_together_have_sent(algorithm: str, data: int) -> None:
    replicas = train(few_digits(hidden=[16]), data, exchange={"algorithm": algorithm}, steps=2)
    exchanges = [replica.replica.exchange for replica in replicas]
    assert all(isinstance(exchange, AlgorithmicAllReduce) for exchange in exchanges)
    (bucket,) = exchanges[0].summary()["buckets"]  # type: ignore[attr-defined]
    sent = [8 * n for n in sent_elements(algorithm, data, bucket["num_bytes"] // 8)]
    for replica in replicas:
        assert [line["bytes_sent"] for line in replica.steps] == [sum(sent)] * 2
        assert replica.outcome.bytes_sent == replica.outcome.bytes_dense == 2 * sum(sent)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bucket_tells_what_the_busiest_replica_sends_beside_what_it_must(algorithm: str) -> None:
    size = 4
    replicas = train(few_digits(hidden=[16]), size, exchange={"algorithm": algorithm}, steps=1)
    (bucket,) = replicas[0].replica.exchange.summary()["buckets"]  # type: ignore[attr-defined]
    assert bucket["sent_bytes"] == 8 * max(sent_elements(algorithm, size, bucket["num_bytes"] // 8))
    assert bucket["least_bytes"] == 2 * bucket["num_bytes"] * (size - 1) / size
    spare = bucket["sent_bytes"] - bucket["least_bytes"]
    # Cuts of a bucket that four does not divide may be off by an element in each of two phases.
    assert -16 < spare < 16 if algorithm in ("ring", "rabenseifner") else spare > 0


def test_rounds_are_done_beside_the_backward_pass_and_no_hook_waits_for_a_peer() -> None:
    size = 2
    both_have_sent = threading.Barrier(size, timeout=PATIENCE_S)

    def replica(collective: Collective) -> list[bool]:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()
        exchange = AlgorithmicAllReduce("ring", bucket_mb=1e-4)
        exchange.attach(model, collective)
        exchange.before_step(1)
        exchange.begin_backward(last_micro_batch=True)
        if collective.rank == 1:
            # It sends nothing before the other has gone through its whole backward pass, and has not waited.
            both_have_sent.wait()
        model(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        filling = exchange._filling
        assert filling is not None
        sent = [bucket.is_sent for bucket in filling.buckets]
        if collective.rank == 0:
            both_have_sent.wait()
        exchange.finish([])
        return sent

    # The last bucket carries the sums of the step, and waits for the end; the others went during the pass.
    assert run_replicas(size, replica) == [[True, True, True, False]] * size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_replica_that_fails_raises_peer_lost_on_the_others_and_they_go_on_in_a_new_group(algorithm: str) -> None:
    size, failing = 3, 1
    torch.manual_seed(0)
    models = [nn.Linear(4, 3).double() for _ in range(size)]
    exchanges = [AlgorithmicAllReduce(algorithm) for _ in range(size)]

    def step(exchange: AlgorithmicAllReduce, model: nn.Module, size: int) -> Tensor:
        exchange.before_step(1)
        exchange.begin_backward(last_micro_batch=True)
        (model(torch.ones(1, 4, dtype=torch.float64)).sum() / size).backward()
        exchange.finish([])
        gradient = exchange.gradients()[0]
        assert gradient is not None
        return gradient.clone()

    def breaking(collective: Collective) -> bool:
        exchange, model = exchanges[collective.rank], models[collective.rank]
        exchange.attach(model, collective)
        if collective.rank == failing:
            collective.abort()
            return False
        try:
            step(exchange, model, size)
        except PeerLostError:
            return True
        return False

    assert run_replicas(size, breaking) == [True, False, True]
    survivors = [0, 2]

    def going_on(collective: Collective) -> Tensor:
        rank = survivors[collective.rank]
        exchanges[rank].attach(models[rank], collective)
        return step(exchanges[rank], models[rank], len(survivors))

    for gradient in run_replicas(len(survivors), going_on):
        torch.testing.assert_close(gradient, torch.ones(3, 4, dtype=torch.float64), rtol=0, atol=1e-12)


SLOW_NATIVE = AlphaBeta(1e9, 1.0)


@pytest.mark.parametrize(
    ("data", "message", "native", "chosen"),
    [
        (4, AlphaBeta(1.0, 1e-9), SLOW_NATIVE, {"butterfly"}),  # messages cost their latency
        (4, AlphaBeta(1e-3, 1.0), SLOW_NATIVE, {"rabenseifner"}),  # messages cost their bytes
        (3, AlphaBeta(1e-9, 1.0), SLOW_NATIVE, {"ring"}),
        (3, AlphaBeta(1e-3, 1e-6), AlphaBeta(1e-9, 1e-12), {"native"}),
        (4, AlphaBeta(1.0, 1 / 3000), SLOW_NATIVE, {"butterfly", "rabenseifner"}),  # they meet at 12,000 bytes
    ],
)
def test_auto_takes_for_each_bucket_what_the_formulas_say_is_cheapest_and_tells(
    data: int, message: AlphaBeta, native: AlphaBeta, chosen: set[str]
) -> None:
    fitted = Fitted(message, native, {4096: 0.5})
    with mock.patch.object(explicit_allreduce, "measure", return_value=fitted):
        replicas = train(few_digits(hidden=[32, 24]), data, exchange={"algorithm": "auto", **SMALL_BUCKETS}, steps=1)
    told = replicas[0].replica.exchange.summary()  # type: ignore[attr-defined]
    assert all(r.replica.exchange.summary() == told for r in replicas)  # type: ignore[attr-defined]
    assert told["algorithm"] == "auto"
    assert (told["alpha_s"], told["beta_s_per_byte"]) == (message.alpha_s, message.beta_s_per_byte)
    assert (told["native_alpha_s"], told["native_beta_s_per_byte"]) == (native.alpha_s, native.beta_s_per_byte)
    expected_s = message.alpha_s + 4096 * message.beta_s_per_byte
    (held_out,) = told["held_out"]
    assert held_out == {
        "num_bytes": 4096,
        "expected_s": pytest.approx(expected_s),
        "measured_s": 0.5,
        "error": pytest.approx(expected_s / 0.5 - 1),
    }
    assert {bucket["algorithm"] for bucket in told["buckets"]} == chosen
    for bucket in told["buckets"]:
        expected = bucket["expected_s"]
        assert set(expected) == {*ALGORITHMS, "native"}
        assert expected[bucket["algorithm"]] == min(expected.values())
        rounds = None if bucket["algorithm"] == "native" else num_rounds(bucket["algorithm"], data)
        assert bucket["rounds"] == rounds
    one = train(few_digits(hidden=[32, 24]), 1, steps=1)
    assert furthest(replicas[0].after, one[0].after) <= 1e-12


def test_replicas_of_one_node_take_places_side_by_side_and_the_gradients_stay_the_sum() -> None:
    nodes = ["a", "b", "a", "b"]

    def replica(collective: Collective) -> tuple[Any, Tensor]:
        model = nn.Linear(5, 3).double()
        exchange = AlgorithmicAllReduce("ring", node=nodes[collective.rank])
        exchange.attach(model, collective)
        exchange.before_step(1)
        exchange.begin_backward(last_micro_batch=True)
        model(torch.full((1, 5), float(collective.rank), dtype=torch.float64)).sum().backward()
        exchange.finish([])
        gradient = exchange.gradients()[0]
        assert gradient is not None
        return exchange.summary()["order"], gradient.clone()

    for order, gradient in run_replicas(4, replica):
        assert order == [0, 2, 1, 3]
        assert gradient.tolist() == [[6.0] * 5] * 3


def test_a_lone_replica_sends_nothing_and_tells_of_no_bucket() -> None:
    (replica,) = train(few_digits(hidden=[16]), 1, exchange={"algorithm": "ring"}, steps=1)
    assert replica.outcome.bytes_sent == 0
    assert replica.replica.exchange.summary()["buckets"] == []  # type: ignore[attr-defined]


def test_a_peer_lost_while_the_replicas_are_measured_is_peer_lost() -> None:
    def replica(collective: Collective) -> bool:
        collective.sibling("schedules")
        if collective.rank == 1:
            collective.abort()
            return True
        with pytest.raises(PeerLostError):
            AlgorithmicAllReduce("auto").attach(nn.Linear(2, 2), collective)
        return True

    assert run_replicas(2, replica) == [True, True]


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_an_all_reduce_by_a_schedule_shards_nothing(shard: str) -> None:
    with pytest.raises(ConfigError, match=f"ring is an all-reduce, and shard: {shard} has none; use algorithm: native"):
        make_exchange("allreduce", algorithm="ring", shard=shard)
