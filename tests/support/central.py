"""Parameter servers and their workers as threads, over channels between threads, with data in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.channel import (
    Channel,
    ChannelClosedError,
    FaultScript,
    SharedMemoryListener,
    connect_shared_memory,
    thread_pair,
)
from orchestray.platform.comm.channel.blocks import SharedBlock, room_for
from orchestray.platform.data.order import window_order
from orchestray.platform.process import gc_control
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, Finish, Order, Save, Validate
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from orchestray.trainers.ps.server.server import Follower, ShardServer
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.worker.client import ShardClient
from orchestray.trainers.ps.worker.push_handle import PushResult
from support.patience import PATIENCE_S

NUM_SAMPLES = 40
SEED = 3
JOIN_S = PATIENCE_S


def make_model(batch_norm: bool = False) -> nn.Module:
    """Make a small network in float64, the same each time; it is large enough to be cut into five shards."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(4, 128), *([nn.BatchNorm1d(128)] if batch_norm else []), nn.Tanh(), nn.Linear(128, 1)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs.sum(1, keepdim=True))


def share_loss(model: nn.Module, order: Compute) -> float:
    """Compute the gradients of a share, and return its part of the batch's mean loss."""
    inputs, targets = make_data()
    samples = window_order([NUM_SAMPLES], seed=SEED, epoch=order.epoch)
    total = 0.0
    for start, stop in order.pieces:
        rows = torch.from_numpy(samples[start:stop])
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows]) * (stop - start) / order.batch_samples
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@dataclass
class Plan:
    """Settings of the servers and workers of a run."""

    consistency: str = "asynchronous"
    staleness: int = 0
    num_workers: int = 1
    shards: int = 1
    steps: int = 7
    batch_size: int = 12
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"type": "sgd", "momentum": 0.9})
    lr: float = 0.05
    schedule: Mapping[str, Any] = field(default_factory=dict)
    batch_norm: bool = False
    compression: Mapping[str, Any] | None = None
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    shard: Mapping[str, Any] = field(default_factory=dict)
    lends: bool = False
    """True if servers see the workers' memory."""
    clock: Callable[[], float] = time.monotonic
    """Clock of the servers."""

    def compressor(self, worker: int) -> Any:
        if self.compression is None:
            return None
        return make_compressor(**self.compression, seed=0, worker=worker, num_workers=self.num_workers)

    def machine(self, shard: int) -> Machine:
        model = make_model(self.batch_norm)
        values = FlatModel(model).values
        partition = Partition.of(model, self.shards)
        made = Shard(
            partition.slices(shard),
            partition.cut(values)[shard].clone(),
            make_optimizer(**self.optimizer),
            Rates(self.lr, self.schedule, self.steps),
            consistency=self.consistency,  # type: ignore[arg-type]
            buffers=Buffers.of(model) if shard == 0 and self.batch_norm else None,
            **self.shard,
        )
        return Machine(made, Coordinator(self.settings) if shard == 0 else None, self.compressor(0))

    @property
    def settings(self) -> CoordinatorSettings:
        given = {"num_shares": self.num_workers, "validate_every_steps": 1000, **self.coordinator}
        return CoordinatorSettings(
            num_samples=NUM_SAMPLES,
            num_validation_samples=8,
            batch_size=self.batch_size,
            consistency=self.consistency,  # type: ignore[arg-type]
            staleness=self.staleness,
            total_steps=self.steps,
            **given,
        )


class Servers:
    """The shards of a plan; workers connect at any time."""

    def __init__(self, plan: Plan, machines: Sequence[Machine] | None = None) -> None:
        self.plan = plan
        self.events: list[dict[str, Any]] = []
        self.machines = list(machines or (plan.machine(shard) for shard in range(plan.shards)))
        self.servers = [
            ShardServer(machine, listener=self.events.append, clock=plan.clock) for machine in self.machines
        ]
        self.threads: list[threading.Thread] = []

    def follow(self, shard: int, follower: Follower) -> None:
        self.servers[shard].follow(follower)

    def channel(self, shard: int, worker: int, **faults: FaultScript) -> Channel:
        """Return a worker's end of a new connection.

        `left_faults` are the faults of what it sends, `right_faults` those of what the server sends.
        """
        ours: Channel
        theirs: Channel
        if self.plan.lends:
            with SharedMemoryListener() as listener:
                ours = connect_shared_memory(listener.address, name=f"worker {worker}", peer=f"shard {shard}")
                theirs = listener.accept(name=f"shard {shard}", peer=f"worker {worker}")
        else:
            ours, theirs = thread_pair(f"worker {worker}", f"shard {shard}", **faults)
        self.threads.append(spawn(lambda: self.servers[shard].serve(theirs)))
        return ours

    def channels(self, worker: int) -> list[Channel]:
        return [self.channel(shard, worker) for shard in range(self.plan.shards)]

    def values(self) -> Tensor:
        """Return all parameters after `plan.steps` steps."""
        return torch.cat([server.snapshot(self.plan.steps)["values"] for server in self.servers])

    def losses(self) -> list[float]:
        """Return the loss of each step, as the lead's coordinator reported it."""
        return [event["loss"] for event in self.events if event["event"] == "step"]

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for thread in self.threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()


class Worker:
    """A worker that does what its orders say."""

    def __init__(self, plan: Plan, number: int, channels: Sequence[Channel], **client: Any) -> None:
        self.plan = plan
        self.model = make_model(plan.batch_norm)
        self.flat = FlatModel(self.model)
        self.buffers = Buffers.of(self.model) if plan.batch_norm else None
        partition = Partition.of(self.model, plan.shards)
        if plan.lends:
            held = [] if self.buffers is None else [self.buffers.floats, self.buffers.integers]
            block = client["block"] = SharedBlock.create(room_for([self.flat.values] * 2 + held))
            self.flat.live_in(block.take)
            if self.buffers is not None:
                self.buffers.floats, self.buffers.integers = (block.take(tensor) for tensor in held)
        compressors = None
        if plan.compression is not None:
            compressors = [plan.compressor(number) for _ in range(plan.shards)]
        self.client = ShardClient(
            channels, partition, number, self.flat.values, buffers=self.buffers, compressors=compressors, **client
        )
        self.results: list[PushResult] = []
        self.applied: list[Compute] = []
        self.validations: list[dict[str, float]] = []
        self.saves: list[list[dict[str, Tensor]]] = []

    def run(self, until: Callable[[Order], bool] = lambda order: False) -> Order:
        """Work until there is nothing to do, or an order comes for which `until` holds."""
        self.client.hello()
        return self.go_on(self.client.next(), until)

    def go_on(self, order: Order, until: Callable[[Order], bool] = lambda order: False) -> Order:
        """Work from an order on, until the run ends or `until` holds for an order; return that order."""
        while not (isinstance(order, Finish) or until(order)):
            self.do(order)
            order = self.client.next()
        return order

    def do(self, order: Order) -> None:
        if isinstance(order, Compute):
            self.client.pull(order.min_version)
            loss_sum, push = self.compute(order)
            self.results.append(self.client.push([order], self.flat.gradient, loss_sums=[loss_sum], **push))
            if self.results[-1].counts:
                self.applied.append(order)
        elif isinstance(order, Validate):
            means = self.client.validated(order, {"loss": 1.0 * 8 / order.num_parts})
            self.validations += [means] if means is not None else []
        elif isinstance(order, Save):
            self.saves.append(self.client.snapshot(order.step))
            self.client.saved(order)

    def compute(self, order: Compute) -> tuple[float, dict[str, Any]]:
        if self.buffers is not None:
            self.buffers.write_to(self.model)
        self.flat.begin()
        loss_sum = share_loss(self.model, order)
        push: dict[str, Any] = {"unused": self.flat.unused()}
        if self.buffers is not None:
            push["buffers"] = self.buffers.change_of(self.model, order.num_samples / order.batch_samples)
        return loss_sum, push

    def run_until_cut(self) -> bool:
        """Work, and close the connections; return True if one of them was cut."""
        try:
            self.run()
        except ChannelClosedError:
            return True
        finally:
            self.client.close()
        return False


class Schedule:
    """A run in which one worker moves at a time, chosen at random; one of them a tenth as often."""

    def __init__(self, plan: Plan, seed: int, straggler: int) -> None:
        self.servers = Servers(plan)
        self.sent: list[Tensor] = []
        """The gradients that counted."""
        self.others_between: list[int] = []
        """Number of pushes between each push and the pull before it, as seen from here."""
        self.after = self.servers.values()
        self.workers = [Worker(plan, number, self.servers.channels(number)) for number in range(plan.num_workers)]
        self._generator = torch.Generator().manual_seed(seed)
        self._chances = torch.tensor([0.1 if number == straggler else 1.0 for number in range(plan.num_workers)])

    def run(self) -> list[int]:
        """Run all workers in random order, and return the staleness of each push that counted."""
        holding: dict[int, tuple[Order, float, int]] = {}
        staleness, finished = [], set[int]()
        for worker in self.workers:
            worker.client.hello()
        while len(finished) < len(self.workers):
            number = int(torch.multinomial(self._chances, 1, generator=self._generator))
            worker = self.workers[number]
            if number in holding:
                order, loss_sum, num_before = holding.pop(number)
                assert isinstance(order, Compute)
                done = worker.client.push([order], worker.flat.gradient, loss_sums=[loss_sum])
                self.others_between.append(len(staleness) - num_before)
                staleness.append(done.staleness)
                self.sent += [worker.flat.gradient.clone()] if done.counts else []
                continue
            order = worker.client.next(wait=False)
            if isinstance(order, Compute):
                worker.client.pull(order.min_version)
                holding[number] = (order, worker.compute(order)[0], len(staleness))
            elif isinstance(order, Finish):
                finished.add(number)
            else:
                worker.do(order)
        self.after = self.servers.values()
        self.servers.close()
        return staleness


def spawn(body: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


@gc_control.pause()  # see `in_threads`
def run_all(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each in a thread, and return all results; raise the error of any."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return [results[index] for index in range(len(bodies))]


def train_central(plan: Plan) -> tuple[Tensor, list[float], list[Worker]]:
    """Train by servers and workers; the parameters, the loss of each step, and the workers."""
    servers = Servers(plan)
    workers = [Worker(plan, number, servers.channels(number)) for number in range(plan.num_workers)]
    run_all([worker.run for worker in workers])
    values = servers.values()
    for worker in workers:
        worker.client.close()
    servers.close()
    return values, servers.losses(), workers


def train_plain(plan: Plan) -> tuple[Tensor, list[float], nn.Module]:
    """Train in one process that takes whole batches."""
    model = make_model(plan.batch_norm)
    flat = FlatModel(model)
    optimizer = make_optimizer(**plan.optimizer)
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    optimizer.init(named)
    rates = Rates(plan.lr, plan.schedule, plan.steps)
    settings, losses = plan.settings, []
    for step in range(1, plan.steps + 1):
        flat.begin()
        epoch, index = divmod(step - 1, settings.steps_per_epoch)
        samples = settings.batch_samples(step)
        _, pieces = settings.shares(step, 1)[0]
        order = Compute(0, step, epoch, index, 0, 1, pieces, samples, samples, settings.accumulate, 0)
        losses.append(share_loss(model, order))
        optimizer.step([p for _, p in named], [p.grad for p in model.parameters()], rates.at(step))
    return flat.values, losses, model
