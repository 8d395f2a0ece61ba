"""A leaf server's process: what a member of the gang of leaf servers hosts."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from orchestray.platform.channel.base import ChannelClosedError, ChannelError
from orchestray.platform.channel.nearest import connect
from orchestray.trainers import tasks
from orchestray.trainers.central.buffers import Buffers
from orchestray.trainers.central.leaf import LeafServer
from orchestray.trainers.central.leaf_copies import BatchCopy, LocalCopy
from orchestray.trainers.central.partition import Partition, flatten_parameters
from orchestray.trainers.central.pushed import Decode
from orchestray.trainers.central.settings import CentralSettings
from orchestray.trainers.central.shard import Rates, Shard
from orchestray.trainers.central.state import slots_of_shard
from orchestray.trainers.central.upstream import Upstream
from orchestray.trainers.checkpoint_source import newest
from orchestray.trainers.compression import make_compressor
from orchestray.trainers.memory.process import peak_memory_bytes
from orchestray.trainers.optimizers import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from orchestray.platform.channel.base import Channel
    from orchestray.trainers.central.address import Address
    from orchestray.trainers.replica.settings import ReplicaSettings, Start

_CONNECT_TIMEOUT_S = 60.0
_TAKEOVER_TIMEOUT_S = 60.0


class LeafHost:
    """One leaf of a run."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._central = CentralSettings.of(settings)
        self._task = tasks.build(settings.task)
        self._server: LeafServer | None = None
        self._upstream: Upstream | None = None
        self._store: dist.TCPStore | None = None
        self._rank, self._address = 0, ""
        self._threads: list[threading.Thread] = []
        self._channels: list[Channel] = []
        """To workers, and to the shards."""
        self._moved = threading.Condition()
        self._servers: dict[int, Address] = {}
        """Those that took shards over, and were not met yet."""
        self._aborted = False
        self._bytes_of_earlier = self._saved_of_earlier = 0
        self._across_of_earlier = (0, 0)

    # -- in the working thread -----------------------------------------------------------------------------

    def begin(
        self, rank: int, incarnation: int, start: Start, address: str, servers: list[Address], total_steps: int | None
    ) -> int:
        """Connect with the shards, and serve; returns the port where workers meet this leaf. May be called again.

        Args:
            rank: of this leaf.
            incarnation: another number at each call of one rank in a run.
            start: of the run.
            address: of this node, by which others reach it.
            servers: the primaries, in the order of shards.
            total_steps: of the run, for its learning rates.

        Raises:
            ChannelError: a shard's server cannot be reached.
        """
        self.close()
        self._rank, self._address, self._aborted = rank, address, False
        settings, central = self._settings, self._central
        model = self._task.build_model()
        if settings.precision == "float64":
            model = model.double()
        partition = Partition.of(model, central.shards)
        values = flatten_parameters(model)
        channels = [self._connect(server, shard) for shard, server in enumerate(servers)]
        replace = self._await_server if central.replicas > 1 else None
        upstream = Upstream(rank, channels, partition, values, incarnation=incarnation, replace=replace)
        upstream.hello()
        whole = Partition.of(model)
        buffers = Buffers.of(model) if upstream.buffer_values else None
        copy: BatchCopy | LocalCopy
        if central.consistency == "asynchronous":
            loaded = newest(settings.checkpoint_storage, start.checkpoint)
            state = {} if loaded is None else loaded.tensors()[1]
            shard = self._shard(whole, values, state, buffers, total_steps)
            copy = LocalCopy(upstream, shard, float(settings.exchange["significance"]))
        else:
            copy = BatchCopy(upstream, always_newest=central.consistency == "stale")
        decoder = None
        if settings.compression.get("type", "none") != "none":
            decoder = make_compressor(
                **settings.compression, seed=settings.seed, worker=0, num_workers=settings.layout.data
            )
        decode = Decode(whole, values, has_buffers=buffers is not None, decoder=decoder)
        server = LeafServer(upstream, copy, decode, sums_whole_batches=central.consistency == "synchronous")
        self._server, self._upstream = server, upstream
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - workers of other nodes must reach it

        def run() -> None:
            with contextlib.suppress(ChannelClosedError):  # its workers see that it has closed
                server.run()

        self._start(run, f"leaf server {rank}")
        return int(self._store.port)

    def _shard(
        self,
        whole: Partition,
        values: Tensor,
        state: Mapping[str, Tensor],
        buffers: Buffers | None,
        total_steps: int | None,
    ) -> Shard:
        settings = self._settings
        optimizer = make_optimizer(**{key: value for key, value in settings.optimizer.items() if key != "lr"})
        shard = Shard(
            whole.slices(0),
            values.clone(),
            optimizer,
            Rates(settings.optimizer["lr"], settings.lr_schedule, total_steps),
            scale_by_staleness=self._central.scale_by_staleness,
            grad_clip=settings.grad_clip,
            buffers=buffers,
        )
        if state:
            shard.load_optimizer(slots_of_shard(shard.slices, state))
        return shard

    # -- beside it, from the driver ------------------------------------------------------------------------

    def accept(self, worker: int, name: str) -> None:
        """Expect a worker under this name; serves it in a thread of its own."""
        store, server = self._store, self._server
        assert store is not None
        assert server is not None

        def meet() -> None:
            with contextlib.suppress(ChannelError):  # it never came
                channel = connect(
                    self._address,
                    store.port,
                    name,
                    0,
                    name=f"leaf server {self._rank}",
                    peer=f"worker {worker}",
                    connect_timeout_s=_CONNECT_TIMEOUT_S,
                    local_host=self._address,
                )
                self._channels.append(channel)
                server.serve(channel)

        self._start(meet, f"serve {name}")

    def reroute(self, shard: int, server: Address) -> None:
        """Another server has taken a shard over."""
        with self._moved:
            self._servers[shard] = server
            self._moved.notify_all()

    def usage(self) -> dict[str, Any]:
        """Bytes between this leaf and its workers (those to the shards are counted there); those saved between it and
        the shards; and those that went there, both ways, and would have, had all values been sent each time.
        """
        across, dense = self._across()
        workers = sum(c.bytes_sent + c.bytes_received for c in list(self._channels))
        return {
            "bytes": self._bytes_of_earlier + workers,
            "saved_bytes": self._saved_of_earlier + self._saved_bytes(),
            "across_bytes": across,
            "across_dense_bytes": dense,
            "memory": peak_memory_bytes(torch.device("cpu")),
        }

    def abort(self) -> None:
        """Give up whatever is waited for: every connection ends."""
        with self._moved:
            self._aborted = True
            self._moved.notify_all()
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End every connection."""
        self.abort()
        for channel in list(self._channels):
            channel.close()
        for thread in self._threads:
            thread.join(_CONNECT_TIMEOUT_S)
        used = self.usage()
        self._bytes_of_earlier, self._saved_of_earlier = used["bytes"], used["saved_bytes"]
        self._across_of_earlier = (used["across_bytes"], used["across_dense_bytes"])
        self._threads, self._channels = [], []
        self._server = self._upstream = self._store = None

    def _saved_bytes(self) -> int:
        upstream = self._upstream
        if upstream is None or self._central.consistency != "asynchronous":
            return 0
        return max(0, upstream.bytes_dense - upstream.bytes_moved)

    def _across(self) -> tuple[int, int]:
        """Bytes between this leaf and the shards, and those had none been kept back."""
        (moved, dense), upstream = self._across_of_earlier, self._upstream
        return (moved, dense) if upstream is None else (moved + upstream.bytes_moved, dense + upstream.bytes_dense)

    def _connect(self, server: Address, shard: int) -> Channel:
        return connect(
            server.host,
            server.port,
            server.name,
            1,
            name=f"leaf server {self._rank}",
            peer=f"parameter server {shard}",
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )

    def _await_server(self, shard: int, error: Exception) -> Channel:
        """A channel to whoever has taken the place of a shard's lost server."""
        with self._moved:
            there = self._moved.wait_for(lambda: shard in self._servers or self._aborted, _TAKEOVER_TIMEOUT_S)
            if self._aborted or not there:
                raise ChannelClosedError(f"nobody took the place of parameter server {shard}: {error}")
            server = self._servers.pop(shard)
        return self._connect(server, shard)

    def _start(self, body: Any, name: str) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
