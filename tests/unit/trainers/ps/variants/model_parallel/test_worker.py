"""Replicas in stages under servers of each stage's own parameters, stages as threads over real connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from orchestray.platform.comm.channel import thread_pair
from orchestray.platform.comm.channel.base import Channel, ChannelClosedError
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.rng import seed_everything
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.address import StagePlan
from orchestray.trainers.ps.protocol.assignments import Compute, Order
from orchestray.trainers.ps.protocol.encoding import GradientEncoder
from orchestray.trainers.ps.protocol.partition import FlatModel
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.model_parallel.plan import part_of_stage, plan_stages
from orchestray.trainers.ps.variants.model_parallel.worker import StagedWorker
from support.central import run_all, spawn
from support.layouts import layout_settings, seeding_alone, train_laid_out
from support.other_rows import Divided, turned
from support.patience import PATIENCE_S
from support.staged_run import staged_settings, train_staged
from support.threads import run_replicas
from support.training import digits, few_digits, furthest

JOIN_S = PATIENCE_S


@pytest.fixture(autouse=True)
def _stages_that_train_leave_those_that_build_alone() -> Iterator[None]:
    with seeding_alone():
        yield


def task() -> Any:
    return few_digits()


@dataclass
class Belief:
    """Servers of two stages, and replicas that come and go."""

    settings: ReplicaSettings
    shards: int = 1
    replicas: int = 1
    events: list[dict[str, Any]] = field(default_factory=list)
    shares: list[tuple[int, int]] = field(default_factory=list)
    """Shares of each replica, in the order they were pushed."""

    def __post_init__(self) -> None:
        self.task = task()
        self.source = open_source(self.task.dataset("train"), split="train")
        self.servers: list[list[ShardServer]] = []
        self.threads: list[threading.Thread] = []
        self.building = threading.Lock()
        self.plan: StagePlan | None = None

    def stream(self, split: str, part: int, num_parts: int) -> SampleStream:
        training = split == "train"
        return SampleStream(
            open_source(self.task.dataset(split), split=split),
            self.task.to_batch,
            batch_size=self.settings.batch_size,
            rank=part,
            num_replicas=num_parts,
            accumulate=self.settings.accumulate if training else 1,
            seed=self.settings.seed,
            shuffle=training,
        )

    def coordinator(self) -> Coordinator:
        settings = self.settings
        return Coordinator(
            CoordinatorSettings(
                num_samples=self.source.num_rows,
                num_validation_samples=open_source(self.task.dataset("validation"), split="validation").num_rows,
                batch_size=settings.batch_size,
                num_shares=self.replicas,
                consistency="asynchronous",
                accumulate=settings.accumulate,
                total_steps=settings.steps,
                validate_every_steps=settings.validate_every_steps,
                checkpoint_every_steps=settings.checkpoint_every_steps,
            )
        )

    def serve(self, names_of_stages: list[list[str]]) -> None:
        """Start the servers of each stage."""
        seed_everything(self.settings.seed)
        model = self.task.build_model().double()
        for stage, names in enumerate(names_of_stages):
            partition, values = part_of_stage(model, names, self.shards)
            servers = []
            for shard, (first, last) in enumerate(partition.bounds):
                made = Shard(
                    partition.slices(shard),
                    values[first:last].clone(),
                    make_optimizer(**self.settings.optimizer),
                    Rates(self.settings.optimizer["lr"], self.settings.lr_schedule, self.settings.steps),
                )
                leads = stage == shard == 0
                machine = Machine(made, self.coordinator() if leads else None)
                servers.append(ShardServer(machine, listener=self.events.append))
            self.servers.append(servers)

    def channels(self, stage: int, replica: int) -> list[Channel]:
        found: list[Channel] = []
        for server in self.servers[stage]:
            ours, theirs = thread_pair(f"replica {replica} stage {stage}", "server")
            self.threads.append(spawn(lambda server=server, theirs=theirs: server.serve(theirs)))
            found.append(ours)
        return found

    def replica(
        self,
        number: int,
        *,
        writer: CheckpointWriter | None = None,
        on_share: Callable[[int, Compute], None] | None = None,
    ) -> dict[str, Tensor]:
        """Run a replica of two stages to the end; return the trained model."""
        met = threading.Barrier(2)
        with self.building:
            if self.plan is None:  # once: what the servers of a stage hold is what every replica's stage has
                self.plan = plan_stages(self.task, self.settings, self.stream)
        bounds = list(self.plan.bounds)

        def stage(world: Collective) -> dict[str, Tensor]:
            worker = StagedWorker(
                self.task, self.settings, self.stream, self.source, world, num_shards=self.shards, bounds=bounds
            )
            names = [name for name, _ in worker.partition.parameters]
            told = _gather(world, names)
            if world.rank == 0:
                with self.building:
                    if not self.servers:
                        self.serve(told)
            met.wait(JOIN_S)
            if on_share is not None:
                computed = worker._compute

                def compute(order: Compute, reader: Any) -> list[Order]:
                    on_share(world.rank, order)
                    return computed(order, reader)

                worker._compute = compute  # type: ignore[method-assign]
            worker.run(self.channels(world.rank, number), number, writer=writer if world.rank == 0 else None)
            trained = worker.trained_model()
            worker.client.close()
            return trained

        return run_replicas(2, stage)[0]

    @property
    def ledger_now(self) -> Coordinator:
        return self.servers[0][0].machine.lead

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == "step"]

    def close(self) -> None:
        for servers in self.servers:
            for server in servers:
                server.close()
        for thread in self.threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()


def _gather(world: Collective, names: list[str]) -> list[list[str]]:
    from orchestray.platform.comm.objects import gather_json

    return gather_json(world, names)


def two_stages(**train: Any) -> ReplicaSettings:
    return layout_settings({"pipeline": 2}, **train)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "optimizer", [{"type": "sgd", "lr": 0.1, "momentum": 0.9}, {"type": "adam", "lr": 0.01}], ids=["momentum", "adam"]
)
def test_one_replica_of_two_stages_is_the_pipeline_and_the_single_process(
    shards: int, optimizer: dict[str, Any]
) -> None:
    settings = two_stages(steps=6, optimizer=optimizer)
    belief = Belief(settings, shards)
    found = belief.replica(0)
    belief.close()
    for network in ({"pipeline": 2}, {}):
        wanted = train_laid_out(task, layout_settings(network, steps=6, optimizer=optimizer))
        assert furthest(found, wanted.weights) <= 1e-12
        losses = [event["loss"] for event in belief.events if event["event"] == "step"]
        assert losses == pytest.approx(wanted.losses, rel=0, abs=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_every_schedule_of_the_stages_gives_the_same(schedule: str) -> None:
    settings = layout_settings({"pipeline": 2, "schedule": schedule}, steps=3)
    belief = Belief(settings)
    found = belief.replica(0)
    belief.close()
    assert furthest(found, train_laid_out(task, layout_settings(steps=3)).weights) <= 1e-12


def test_no_stage_talks_to_the_servers_of_another() -> None:
    belief = Belief(two_stages(steps=2), shards=2)
    belief.replica(0)
    held = [{piece.name for server in servers for piece in server.machine.shard.slices} for servers in belief.servers]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name, _ in task().build_model().named_parameters()}
    assert [server.machine.coordinator is not None for servers in belief.servers for server in servers] == [True] + [
        False
    ] * 3
    belief.close()


def test_two_replicas_use_every_sample_once_and_learn() -> None:
    settings = two_stages(steps=16, batch_size=48, optimizer={"type": "sgd", "lr": 0.5})
    belief = Belief(settings, replicas=2)
    models = run_all([lambda: belief.replica(0), lambda: belief.replica(1)])
    assert belief.steps == list(range(1, 17))
    progress = belief.ledger_now.progress
    assert progress.num_pushes == 32
    assert sum(progress.samples_by_worker.values()) == 16 * 48
    assert [server.version for servers in belief.servers for server in servers] == [32, 32]
    losses = [event["loss"] for event in belief.events if event["event"] == "step"]
    assert sum(losses[-3:]) < sum(losses[:3])
    belief.close()
    assert models


@pytest.mark.parametrize("lost_stage", [0, 1])
def test_a_lost_stage_ends_its_replica_alone_and_its_share_is_done_by_another(lost_stage: int) -> None:
    settings = two_stages(steps=6, batch_size=24, optimizer={"type": "sgd", "lr": 0.1})
    belief = Belief(settings, replicas=2)
    dies_at = 3
    died = threading.Event()

    def die(rank: int, order: Compute) -> None:
        if rank == lost_stage and order.step >= dies_at:
            died.set()
            raise ChannelClosedError("killed")

    def leave_it_a_share(_rank: int, order: Compute) -> None:
        if order.step >= dies_at:
            assert died.wait(PATIENCE_S)

    def replica_that_is_lost() -> dict[str, Tensor]:
        with pytest.raises((ChannelClosedError, PeerLostError)):
            belief.replica(0, on_share=die)
        return belief.replica(0)  # formed again

    run_all([replica_that_is_lost, lambda: belief.replica(1, on_share=leave_it_a_share)])
    assert belief.steps == [1, 2, 3, 4, 5, 6]
    assert belief.ledger_now.progress.num_pushes == 12
    assert [server.version for servers in belief.servers for server in servers] == [12, 12]
    belief.close()


def test_a_checkpoint_is_the_plain_models_whatever_the_stages(tmp_path: Path) -> None:
    settings = two_stages(steps=4, optimizer={"type": "adam", "lr": 0.01})
    settings = replace(settings, checkpoint_every_steps=4, checkpoint_storage=str(tmp_path))
    belief = Belief(settings, shards=2)
    with CheckpointWriter(tmp_path, keep=1) as writer:
        found = belief.replica(0, writer=writer)
    belief.close()
    checkpoint = latest_good(tmp_path)[0]
    assert checkpoint is not None
    from orchestray.trainers.loop.checkpoint_source import Loaded

    tensors, slots = Loaded(checkpoint).model().tensors, Loaded(checkpoint).optimizer()
    assert furthest(tensors, found) == 0.0
    names = {name for name, _ in task().build_model().named_parameters()}
    assert {key.rpartition(".")[0] for key in slots} == names


def test_large_gradients_of_a_stage_are_sent_from_where_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, set[int]]] = []
    made: dict[int, list[Tensor]] = {}
    gradients, encoded = FlatModel.gradients, GradientEncoder.encode

    def noted(self: FlatModel) -> list[Tensor]:
        found: list[Tensor] = gradients.fget(self)  # type: ignore[attr-defined]
        made[threading.get_ident()] = found
        return found

    def looked(self: GradientEncoder, shard: int, gradient: Any, step: int) -> tuple[str, list[Tensor]]:
        encoding, tensors = encoded(self, shard, gradient, step)
        own = {one.untyped_storage().data_ptr() for one in made[threading.get_ident()]}
        sent.append((len(tensors), {one.untyped_storage().data_ptr() for one in tensors} - own))
        return encoding, tensors

    monkeypatch.setattr(FlatModel, "gradients", property(noted))
    monkeypatch.setattr(GradientEncoder, "encode", looked)
    network = {"data": 1, "pipeline": 2, "split": ["2"]}  # a large layer in each stage, whatever was measured
    settings = staged_settings(network, {"consistency": "asynchronous"}, steps=3)
    found = train_staged(lambda: digits(hidden=[1024, 256]), settings, tmp_path)
    wanted = train_laid_out(lambda: digits(hidden=[1024, 256]), layout_settings(steps=3))
    assert furthest(found.weights, wanted.weights) <= 1e-12
    assert len(sent) == 2 * 3
    assert not any(elsewhere for _, elsewhere in sent)
    assert max(number for number, _ in sent) > 1  # several parameters, each of its own


def test_stages_with_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Workers 1 and 0 have not the same train data"):
        train_staged(lambda: Divided(turned), staged_settings({"data": 1, "pipeline": 2}, steps=1), tmp_path)
