"""Leaf servers between the workers and the shards of `support.central`, as threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from orchestray.platform.comm.channel import Channel, thread_pair
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.encoding import GradientDecoder
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.hierarchy.leaf import LeafServer
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Upstream
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import BatchCopy, GroupCopy, LocalCopy
from orchestray.trainers.ps.variants.hierarchy.root_server import RootMachine, RootServer
from support.central import JOIN_S, Plan, Servers, Worker, make_model, run_all, spawn


def root_machine(plan: Plan, shard: int) -> RootMachine:
    made: Machine = plan.machine(shard)
    return RootMachine(made.shard, Coordinator(plan.settings) if shard == 0 else None)


class Tree(Servers):
    """Root shards and leaves; workers connect to leaves."""

    def __init__(self, plan: Plan, leaves: int, *, significance: float = 0.0, compute_groups: bool = False) -> None:
        self.plan, self.significance, self.compute_groups = plan, significance, compute_groups
        self.events: list[dict[str, Any]] = []
        self.machines = [root_machine(plan, shard) for shard in range(plan.shards)]
        self.servers = [RootServer(machine, listener=self.events.append) for machine in self.machines]
        self.threads: list[threading.Thread] = []
        self.requests = [0] * plan.shards
        self.leaves = [self.leaf(number) for number in range(leaves)]

    def leaf(self, number: int) -> Leaf:
        """Start a new leaf, connected."""
        plan = self.plan
        model = make_model(plan.batch_norm)
        values, partition = FlatModel(model).values, Partition.of(model, plan.shards)
        channels = []
        for shard in range(plan.shards):
            ours, theirs = thread_pair(f"leaf {number}", f"shard {shard}")
            self.threads.append(spawn(lambda theirs=theirs, shard=shard: self.servers[shard].serve(theirs)))
            channels.append(ours)
        upstream = Upstream(number, channels, partition, values)
        upstream.hello()
        copy: BatchCopy | LocalCopy
        if self.compute_groups:
            copy = GroupCopy(upstream)
        elif plan.consistency == "asynchronous":
            shard = Shard(
                Partition.of(model).slices(0),
                values.clone(),
                make_optimizer(**plan.optimizer),
                Rates(plan.lr, plan.schedule, plan.steps),
                buffers=Buffers.of(model) if plan.batch_norm else None,
            )
            copy = LocalCopy(upstream, shard, self.significance)
        else:
            copy = BatchCopy(upstream, always_newest=plan.consistency == "stale")
        decoder = GradientDecoder(Partition.of(model).slices(0), values, plan.compressor(0))
        sums = self.compute_groups or plan.consistency == "synchronous"
        server = LeafServer(upstream, copy, decoder, sums_whole_batches=sums)
        leaf = Leaf(upstream, copy, server, channels)
        leaf.thread = spawn(leaf.run)
        return leaf

    def connect(self, leaf: Leaf, number: int) -> Worker:
        ours, theirs = thread_pair(f"worker {number}", "leaf")
        self.threads.append(spawn(lambda: leaf.server.serve(theirs)))
        return Worker(replace(self.plan, shards=1), number, [ours])

    def close(self) -> None:
        for leaf in self.leaves:
            leaf.server.close()
        super().close()
        for leaf in self.leaves:
            assert leaf.thread is not None
            leaf.thread.join(JOIN_S)
            assert not leaf.thread.is_alive()


@dataclass
class Leaf:
    upstream: Upstream
    copy: BatchCopy | LocalCopy
    server: LeafServer
    channels: list[Channel]
    thread: threading.Thread | None = None
    error: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:  # noqa: BLE001 - for the test
            self.error.append(error)


@dataclass
class Grown:
    """Results of a run with leaves."""

    values: Tensor
    losses: list[float]
    workers: list[Worker]
    tree: Tree


def train_tree(plan: Plan, leaves: int, **rest: Any) -> Grown:
    """Train with `plan.num_workers` workers under `leaves` leaves, which share them as evenly as can be."""
    tree = Tree(plan, leaves, **rest)
    workers = [tree.connect(tree.leaves[number % leaves], number) for number in range(plan.num_workers)]
    run_all([worker.run for worker in workers])
    values = tree.values()
    for worker in workers:
        worker.client.close()
    tree.close()
    for leaf in tree.leaves:
        if leaf.error:
            raise leaf.error[0]
    return Grown(values, tree.losses(), workers, tree)


def same(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> bool:
    return float((left - right).abs().max()) <= tolerance
