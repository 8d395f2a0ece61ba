"""The base of processes that work for servers: task, data, and connections that end and are replaced."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from orchestray.platform.comm.channel.base import ChannelClosedError
from orchestray.platform.data.source import Source, open_source, reading
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.trainers.ps.protocol.host_bases import ReroutedHost, dial

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.ps.protocol.address import Address


class EmployedHost(ReroutedHost):
    """The base of the hosts in the gang of workers. Its public methods are for the driver, in parallel to the work."""

    def __init__(self, settings: ReplicaSettings, task: Task, device: torch.device) -> None:
        super().__init__()
        self._settings = settings
        self._task = task
        self._device = device
        self._sources: dict[str, Source] = {}
        self._writer: CheckpointWriter | None = None
        self._channels: list[Channel] = []
        self._closing = threading.Lock()
        self._number, self._leaves = 0, False

    def abort(self) -> None:
        """End every wait for the servers."""
        super().abort()
        self._hang_up()

    def leave(self) -> None:
        """Stop this worker's present and later work: the run continues without it."""
        self._leaves = True
        self.abort()

    def _forget_earlier(self, servers: Sequence[Address]) -> None:
        """Forget replacements of servers that are older than `servers`, with which this call of `train` begins."""
        newest = max((server.number for server in servers), default=0)
        with self._moved:
            self._servers = {shard: one for shard, one in self._servers.items() if one.number > newest}

    def close(self) -> None:
        """Close the connections and the checkpoint writer."""
        self._hang_up()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _connect(self, server: Address, shard: int) -> Channel:
        channel = dial(server, f"worker {self._number}", f"parameter server {shard}")
        with self._closing:
            self._channels.append(channel)
        if self._leaves:
            self._hang_up()
            raise ChannelClosedError(f"worker {self._number} leaves the run")
        return channel

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
