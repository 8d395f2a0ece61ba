"""A worker under parameter servers, and what it needs around it: what a member of the gang of workers hosts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.channel.base import ChannelClosedError, ChannelError
from orchestray.platform.channel.nearest import connect
from orchestray.platform.data.source import Source, open_source, reading
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.run.checkpoint import CheckpointWriter, save_model
from orchestray.trainers import tasks
from orchestray.trainers.central.address import SERVER_LOST, Address
from orchestray.trainers.central.hogwild import HogwildWorker, find_memory
from orchestray.trainers.central.settings import under_leaf
from orchestray.trainers.central.worker import CentralWorker
from orchestray.trainers.consolidation.distillation import learned_from
from orchestray.trainers.faults import FaultPlan, Faults
from orchestray.trainers.model_json import describe_model
from orchestray.trainers.replica import peak_memory_bytes

if TYPE_CHECKING:
    from orchestray.platform.channel.base import Channel
    from orchestray.trainers.settings import ReplicaSettings

_CONNECT_TIMEOUT_S = 60.0
_TAKEOVER_TIMEOUT_S = 60.0


class WorkerHost:
    """Builds task, data and model once, and works for the servers as often as it is told to."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        device = torch.device("cuda" if settings.use_gpu and torch.cuda.is_available() else "cpu")
        double = settings.precision == "float64"
        self._task = learned_from(tasks.build(settings.task), settings.distill, double=double, device=device)
        self._sources: dict[str, Source] = {}
        shares_memory = settings.exchange["transport"] == "shared_memory"
        make = HogwildWorker if shares_memory else CentralWorker
        self._worker = make(self._task, under_leaf(settings), self._stream, self._source("train"), device=device)
        self._writer: CheckpointWriter | None = None
        self._channels: list[Channel] = []
        self._closing = threading.Lock()
        self._moved = threading.Condition()
        self._servers: dict[int, Address] = {}
        """Those that took shards over, and were not met yet."""
        self._rank, self._aborted, self._leaves = 0, False, False

    def train(self, rank: int, attempt: int, servers: list[Address]) -> str:
        """Work until the lead says that there is nothing more to do; returns why, or `SERVER_LOST`.

        Args:
            rank: of this worker.
            attempt: how often it was killed on purpose before, see `FaultPlan.of`.
            servers: the primaries, in the order of shards; or this worker's leaf server.
        """
        self._hang_up()
        self._rank, self._aborted = rank, False
        storage = self._settings.checkpoint_storage
        if storage is not None and self._writer is None:
            self._writer = CheckpointWriter(storage, keep=self._settings.checkpoint_keep)
        plan = FaultPlan.of(
            self._settings.faults, "worker", rank, attempt=attempt, is_alone=True, seed=self._settings.seed
        )
        try:
            channels = [self._connect(server, rank, shard) for shard, server in enumerate(servers)]
            if isinstance(self._worker, HogwildWorker):
                find_memory(self._worker, servers[0], channels[0])
            return self._worker.run(
                channels,
                rank,
                writer=self._writer,
                faults=Faults(plan),
                replace=self._await_server if self._worker.central.replicas > 1 else None,
            )
        except ChannelError:
            return SERVER_LOST
        except BaseException:
            self._hang_up()  # what this worker held goes back
            raise

    def save_model(self, step: int) -> None:
        """Write the trained model, as the servers hold it after `step`, to the run's directory."""
        directory = self._settings.model_directory
        if directory:
            save_model(directory, self._worker.fetch(step), describe_model(self._settings, self._task))

    # -- beside it, from the driver ------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """What this worker did."""
        worker, client = self._worker, self._worker.client
        return {
            "memory": peak_memory_bytes(torch.device("cpu")),
            "shares": worker.num_shares,
            "busy_s": round(worker.busy_s, 6),
            "waited_s": round(client.waited_s, 6),
            "saved_bytes": client.bytes_saved,
        }

    def abort(self) -> None:
        """Give up whatever this worker waits for from the servers."""
        with self._moved:
            self._aborted = True
            self._moved.notify_all()
        self._hang_up()

    def leave(self) -> None:
        """Give up what this worker does, and all that it is told later: the run goes on without it."""
        self._leaves = True
        self.abort()

    def reroute(self, shard: int, server: Address) -> None:
        """Another server has taken a shard over."""
        with self._moved:
            self._servers[shard] = server
            self._moved.notify_all()

    def close(self) -> None:
        """Give back what is held."""
        self._hang_up()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _connect(self, server: Address, rank: int, shard: int) -> Channel:
        channel = connect(
            server.host,
            server.port,
            server.name,
            1,
            name=f"worker {rank}",
            peer=f"parameter server {shard}",
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        with self._closing:
            self._channels.append(channel)
        if self._leaves:
            self._hang_up()
            raise ChannelClosedError(f"worker {rank} leaves the run")
        return channel

    def _await_server(self, shard: int, error: Exception) -> Channel:
        """A channel to whoever has taken the place of a shard's lost server."""
        with self._moved:
            there = self._moved.wait_for(lambda: shard in self._servers or self._aborted, _TAKEOVER_TIMEOUT_S)
            if self._aborted or not there:
                raise ChannelClosedError(f"nobody took the place of parameter server {shard}: {error}")
            server = self._servers.pop(shard)
        return self._connect(server, self._rank, shard)

    def _hang_up(self) -> None:
        with self._closing:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _source(self, split: str) -> Source:
        if split not in self._sources:
            with reading(f"the {split} data"):
                self._sources[split] = open_source(self._task.dataset(split), split=split)
        return self._sources[split]

    def _stream(self, split: str, part: int, num_parts: int) -> SampleStream:
        training = split == "train"
        return SampleStream(
            self._source(split),
            self._task.to_batch,
            batch_size=self._settings.batch_size,
            rank=part,
            num_replicas=num_parts,
            accumulate=self._settings.accumulate if training else 1,
            seed=self._settings.seed,
            shuffle=training,
        )
