"""What a process that works for servers has around what computes: task, data, connections that end and are replaced."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from orchestray.platform.channel.base import ChannelClosedError
from orchestray.platform.channel.nearest import connect
from orchestray.platform.data.source import Source, open_source, reading
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.run.checkpoint import CheckpointWriter

if TYPE_CHECKING:
    from orchestray.platform.channel.base import Channel
    from orchestray.platform.task import Task
    from orchestray.trainers.central.address import Address
    from orchestray.trainers.replica.settings import ReplicaSettings

_CONNECT_TIMEOUT_S = 60.0
_TAKEOVER_TIMEOUT_S = 60.0


class EmployedHost:
    """The base of what members of the gang of workers host. Public methods are for the driver, beside the work."""

    def __init__(self, settings: ReplicaSettings, task: Task, device: torch.device) -> None:
        self._settings = settings
        self._task = task
        self._device = device
        self._sources: dict[str, Source] = {}
        self._writer: CheckpointWriter | None = None
        self._channels: list[Channel] = []
        self._closing = threading.Lock()
        self._moved = threading.Condition()
        self._servers: dict[int, Address] = {}
        """Those that took shards over, and were not met yet."""
        self._number, self._aborted, self._leaves = 0, False, False

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

    def _forget_earlier(self, servers: Sequence[Address]) -> None:
        """Servers that took shards over before this employment are not waited for: it begins with those of now."""
        newest = max((server.number for server in servers), default=0)
        with self._moved:
            self._servers = {shard: one for shard, one in self._servers.items() if one.number > newest}

    def close(self) -> None:
        """Give back what is held."""
        self._hang_up()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _connect(self, server: Address, shard: int) -> Channel:
        channel = connect(
            server.host,
            server.port,
            server.name,
            1,
            name=f"worker {self._number}",
            peer=f"parameter server {shard}",
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )
        with self._closing:
            self._channels.append(channel)
        if self._leaves:
            self._hang_up()
            raise ChannelClosedError(f"worker {self._number} leaves the run")
        return channel

    def _await_server(self, shard: int, error: Exception) -> Channel:
        """A channel to whoever has taken the place of a shard's lost server."""
        with self._moved:
            there = self._moved.wait_for(lambda: shard in self._servers or self._aborted, _TAKEOVER_TIMEOUT_S)
            if self._aborted or not there:
                raise ChannelClosedError(f"nobody took the place of parameter server {shard}: {error}")
            server = self._servers.pop(shard)
        return self._connect(server, shard)

    def _prepare_checkpoints(self) -> CheckpointWriter | None:
        storage = self._settings.checkpoint_storage
        if storage is not None and self._writer is None:
            self._writer = CheckpointWriter(storage, keep=self._settings.checkpoint_keep)
        return self._writer

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
