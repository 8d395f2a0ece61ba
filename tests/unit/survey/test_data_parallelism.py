"""Groups A, C and D: replicas that agree by all-reduce are the single process, and how they get there."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.parts import parts_of
from support import ddp_peer
from support.forked import Forked
from support.threads import run_replicas
from support.training import Rows, digits, furthest, regression, same_bits, settings_for, stream_of, train

MOMENTUM = {"type": "sgd", "lr": 0.1, "momentum": 0.9}
WIDE = 512
"""512 x 512 float32 weights are a megabyte: a bucket of their own."""


def wide_task() -> Rows:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, WIDE)).astype(np.float32)

    def model() -> nn.Module:
        layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), nn.Linear(WIDE, 1))

    return Rows(inputs, rng.normal(size=64).astype(np.float32), model)


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_values", [1, 5, 1000, 4099])
def test_allreduce_collective_gives_every_rank_the_same_sum(size: int, num_values: int) -> None:
    rng = np.random.default_rng(size * num_values)
    whole = rng.integers(-(2**40), 2**40, size=(size, num_values))
    floats = rng.normal(size=(size, num_values)).astype(np.float32)

    def combine(collective: Collective) -> tuple[np.ndarray, np.ndarray]:
        integers, reals = torch.tensor(whole[collective.rank]), torch.tensor(floats[collective.rank])
        collective.all_reduce(integers)
        collective.all_reduce(reals)
        return integers.numpy(), reals.numpy()

    results = run_replicas(size, combine)
    assert all(np.array_equal(integers, whole.sum(axis=0)) for integers, _ in results)
    assert len({reals.tobytes() for _, reals in results}) == 1
    # P - 1 additions, each off by at most half a unit in the last place of the sum of magnitudes.
    bound = (size - 1) * np.spacing(np.abs(floats).sum(axis=0))
    assert np.all(np.abs(results[0][1] - floats.astype(np.float64).sum(axis=0)) <= bound)


def hooked(events: list[str]) -> Any:
    """Note on rank 0 when a large layer has its gradient, and when a large bucket is sent and waited for."""

    def prepare(replica: Any, collective: Collective, calls: list[tuple[str, int]]) -> None:
        if collective.rank:
            return
        for name, layer in replica.model.named_children():
            if isinstance(layer, nn.Linear) and layer.out_features == WIDE:
                layer.weight.register_hook(lambda _, name=name: events.append(f"gradient {name}"))  # type: ignore[no-untyped-call]
        start = collective.start_all_reduce

        def noting(tensor: torch.Tensor, *rest: Any) -> Any:
            if tensor.numel() >= WIDE * WIDE:
                events.append("send")
            return Noting(start(tensor, *rest), events if tensor.numel() >= WIDE * WIDE else [])

        collective.start_all_reduce = noting  # type: ignore[assignment, method-assign]

    return prepare


class Noting:
    """An operation under way that says when it is waited for."""

    def __init__(self, pending: Any, events: list[str]) -> None:
        self._pending, self._events = pending, events

    def wait(self) -> None:
        self._events.append("wait")
        self._pending.wait()


def test_nonblocking_allreduce_overlap_sends_early_and_changes_no_bit() -> None:
    events: dict[bool, list[str]] = {True: [], False: []}
    runs = {
        overlap: train(
            wide_task(),
            2,
            steps=3,
            precision="float32",
            optimizer=MOMENTUM,
            exchange={"overlap": overlap, "bucket_mb": 1},
            prepare=hooked(events[overlap]),
        )
        for overlap in (True, False)
    }
    assert all(same_bits(runs[True][0].weights[k], runs[False][0].weights[k]) for k in range(3))
    step = events[True][: len(events[True]) // 3]
    first_layer = step.index("gradient 0")
    assert "send" in step[:first_layer]
    assert "wait" not in step[:first_layer]
    plain = events[False][: len(events[False]) // 3]
    assert "send" not in plain[: plain.index("gradient 0")]
    counted = {overlap: run[0].outcome.summary["exchange"] for overlap, run in runs.items()}
    assert counted == {True: {"buckets": 3, "early": 2}, False: {"buckets": 3, "early": 0}}


class Delayed:
    """A link of one replica in virtual time: each message occupies it for a while, one after the other."""

    def __init__(self, compute_s: float, message_s: float) -> None:
        self.now_s, self._free_s = 0.0, 0.0
        self._compute_s, self._message_s = compute_s, message_s

    def prepare(self, replica: Any, collective: Collective, calls: list[tuple[str, int]]) -> None:
        """Let the gradient of each large layer, and the messages of each large bucket, take their time on rank 0."""
        if collective.rank:
            return
        for layer in replica.model.children():
            if isinstance(layer, nn.Linear) and layer.out_features == WIDE:
                layer.weight.register_hook(self._compute)  # type: ignore[no-untyped-call]
        start = collective.start_all_reduce

        def delayed(tensor: torch.Tensor, *rest: Any) -> Any:
            pending = start(tensor, *rest)
            return Arriving(pending, self, self._send()) if tensor.numel() >= WIDE * WIDE else pending

        collective.start_all_reduce = delayed  # type: ignore[assignment, method-assign]

    def _compute(self, _: object) -> None:
        self.now_s += self._compute_s

    def _send(self) -> float:
        self._free_s = max(self.now_s, self._free_s) + self._message_s
        return self._free_s


class Arriving:
    """An operation under way whose last byte arrives at a virtual time."""

    def __init__(self, pending: Any, link: Delayed, at_s: float) -> None:
        self._pending, self._link, self._at_s = pending, link, at_s

    def wait(self) -> None:
        self._pending.wait()
        self._link.now_s = max(self._link.now_s, self._at_s)


@pytest.mark.parametrize(("compute_s", "message_s"), [(2.0, 1.0), (1.0, 3.0), (1.0, 1.0)])
def test_nonblocking_allreduce_overlap_takes_the_longer_of_computing_and_a_delayed_link_and_not_their_sum(
    compute_s: float, message_s: float
) -> None:
    steps, layers = 2, 3
    taken_s = {}
    for overlap in (True, False):
        link = Delayed(compute_s, message_s)
        exchange = {"overlap": overlap, "bucket_mb": 1}
        train(wide_task(), 2, steps=steps, precision="float32", exchange=exchange, prepare=link.prepare)
        taken_s[overlap] = link.now_s / steps
    assert taken_s[False] == layers * (compute_s + message_s)
    # But for the first gradient, before which there is nothing to send, or the last, after which nothing is computed.
    assert taken_s[True] == layers * max(compute_s, message_s) + min(compute_s, message_s)


def test_fine_grained_data_parallelism_sends_layer_by_layer() -> None:
    events: list[str] = []
    options: dict[str, Any] = {"precision": "float32", "optimizer": MOMENTUM, "steps": 1}
    layered = train(wide_task(), 2, exchange={"bucket_mb": 1}, prepare=hooked(events), **options)
    assert [event for event in events if event != "wait"][:5] == [
        "gradient 4",
        "send",
        "gradient 2",
        "send",
        "gradient 0",
    ]
    assert layered[0].outcome.summary["exchange"]["buckets"] == 3
    at_once = train(wide_task(), 2, exchange={"bucket_mb": 25, "overlap": False}, **options)
    assert same_bits(layered[0].after, at_once[0].after)


# -- the single process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_data_parallelism_equals_one_process_adding_shards_bit_for_bit(precision: str) -> None:
    options: dict[str, Any] = {"steps": 30, "batch_size": 50, "optimizer": MOMENTUM, "precision": precision}
    single = train(digits(), accumulate=2, **options)[0]
    for run in train(digits(), 2, **options):
        assert all(same_bits(one, other) for one, other in zip(run.weights, single.weights, strict=True))


def test_batch_splitting_recipe_sums_four_times_64_to_the_gradient_of_256() -> None:
    task = digits()
    options: dict[str, Any] = {"steps": 1, "batch_size": 256, "optimizer": {"type": "sgd", "lr": 1.0}}
    stream = stream_of(task, settings_for(4, **options))
    for rank in range(4):
        with stream("train", rank).epoch(0) as shares:
            (sub_batch,) = next(iter(shares)).micro_batches
            assert (sub_batch.num_samples, len(sub_batch.batch["inputs"])) == (64, 64)
    whole = train(task, **options)[0]
    runs = train(task, 4, **options)
    assert all(same_bits(run.before, whole.before) for run in runs)  # 1: each device has a copy of the parameters
    assert max(furthest(run.gradient, whole.gradient) for run in runs) <= 1e-12
    assert all(same_bits(run.after, runs[0].after) for run in runs)  # 6: each has made the same update


def test_spmd_every_rank_runs_the_same_program_from_the_same_settings() -> None:
    assert not any("rank" in field.name for field in dataclasses.fields(ReplicaSettings))
    task = digits(model="cnn", hidden=[4, 8])
    loss, seen = task.loss, defaultdict[int, list[torch.Tensor]](list)

    def noting(outputs: Any, batch: Any) -> Any:
        seen[threading.get_ident()].append(batch["inputs"].flatten(1))
        return loss(outputs, batch)

    task.loss = noting
    runs = train(task, 3, steps=4, batch_size=32)
    # One program: the same operations, by objects of the same classes, with settings that no rank has changed ...
    assert len(runs[0].calls) > 8
    assert all(run.calls == runs[0].calls for run in runs)
    parts = [parts_of(run.replica) for run in runs]
    assert "trainers.sync.allreduce.AllReduce" in parts[0]
    assert parts[1:] == parts[:-1]
    assert all(run.replica.settings == runs[0].replica.settings for run in runs)
    # ... and data of its own on each: together they are the batch.
    assert len(seen) == 3
    assert sorted(len(of_rank[0]) for of_rank in seen.values()) == [10, 11, 11]
    assert len(torch.cat([of_rank[0] for of_rank in seen.values()]).unique(dim=0)) == 32


def test_one_line_of_config_makes_training_synchronous_data_parallel() -> None:
    config: dict[str, Any] = {
        "name": "mirrored",
        "task": {"type": "digits"},
        "train": {"batch_size": 64, "steps": 5, "optimizer": MOMENTUM, "precision": "float64"},
    }
    one, two = (load_train_config(config, overrides=[f"strategy.network.data={data}"]) for data in (1, 2))
    differing = [key for key in type(one).model_fields if getattr(one, key) != getattr(two, key)]
    assert differing == ["strategy"]
    results = []
    for loaded in (one, two):
        keys = {key: getattr(loaded.train, key) for key in ("batch_size", "steps", "precision")}
        data = loaded.strategy.network.data
        results.append(train(digits(), data, optimizer=loaded.train.optimizer.model_dump(), **keys)[0])
    assert furthest(results[0].after, results[1].after) <= 1e-10


# -- consistency -------------------------------------------------------------------------------------------------------


def test_synchronous_sgd_has_the_same_weights_on_all_ranks_at_every_step() -> None:
    options: dict[str, Any] = {"steps": 25, "batch_size": 50, "precision": "float32", "optimizer": MOMENTUM}
    runs = train(digits(), 3, **options)
    for step in range(25):
        assert all(same_bits(run.weights[step], runs[0].weights[step]) for run in runs)
    assert all(not same_bits(runs[0].weights[k], runs[0].weights[k + 1]) for k in range(24))
    pair = train(digits(), 2, **options)
    in_order = train(digits(), accumulate=2, **options)[0]
    assert all(same_bits(a, b) for a, b in zip(pair[0].weights, in_order.weights, strict=True))


def of_halves() -> nn.Linear:
    layer = nn.Linear(3, 1)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    return layer


def test_synchronous_sgd_of_four_ranks_is_one_process_that_sums_the_same_shards_bit_for_bit() -> None:
    """Train on whole numbers: no sum is rounded, so that the order in which four ranks sum does not matter."""
    rng = np.random.default_rng(0)
    exact = Rows(rng.integers(-3, 4, (16, 3)).astype(float), rng.integers(-3, 4, 16).astype(float), of_halves)
    options: dict[str, Any] = {
        "steps": 4,
        "batch_size": 8,
        "precision": "float64",
        "optimizer": {"type": "sgd", "lr": 0.125, "momentum": 0.5},
    }
    in_order = train(exact, accumulate=4, **options)[0]
    for run in train(exact, 4, **options):
        assert all(same_bits(a, b) for a, b in zip(run.weights, in_order.weights, strict=True))


def test_decentralised_allreduce_keeps_every_rank_s_own_optimizer_the_same() -> None:
    runs = train(digits(), 3, steps=25, batch_size=50, precision="float32", optimizer={"type": "adam", "lr": 0.01})
    for step in range(25):
        for run in runs[1:]:
            assert same_bits(run.weights[step], runs[0].weights[step])
            assert same_bits(run.optimizer[step], runs[0].optimizer[step])
    states = [run.replica.optimizer.state_tensors() for run in runs]
    assert len(states[0]) == 3 * len(list(runs[0].replica.model.parameters()))
    assert len({state[name].data_ptr() for state in states for name in state}) == 3 * len(states[0])
    # Nobody collects for the others: all that is as large as the model is one all-reduce a step.
    num_weights = sum(parameter.numel() for parameter in runs[0].replica.model.parameters())
    for run in runs:
        large = [kind for kind, numel in run.calls if numel >= num_weights]
        assert large == ["all_reduce"] * 25


def test_distributed_data_parallel_of_torch_reaches_the_same_weights(tmp_path: Path) -> None:
    ours = train(regression(), 2, **ddp_peer.OPTIONS)[0]
    with Forked(Path(ddp_peer.__file__), str(tmp_path), "regression") as peers:
        assert peers.wait() == 0, peers.printed()
    for rank in range(2):
        assert furthest(load_file(tmp_path / f"rank-{rank}.safetensors"), ours.after) <= 1e-12
