"""The process of a leaf server, as a member of the gang of leaf servers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.comm.channel.base import ChannelClosedError
from orchestray.trainers import tasks
from orchestray.trainers.core.parts import parts_of, reports_of
from orchestray.trainers.core.plain_model import build_model
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.loop.checkpoint_source import newest
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.buffers import Buffers
from orchestray.trainers.ps.protocol.encoding import GradientDecoder, compressor_of
from orchestray.trainers.ps.protocol.host_bases import AcceptingHost, ReroutedHost, dial
from orchestray.trainers.ps.protocol.partition import Partition, flatten_parameters
from orchestray.trainers.ps.protocol.settings import CentralSettings
from orchestray.trainers.ps.protocol.state import slots_of_shard
from orchestray.trainers.ps.server.shard import Rates, Shard
from orchestray.trainers.ps.variants.hierarchy.leaf import LeafServer
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Upstream
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import BatchCopy, GroupCopy, LocalCopy
from orchestray.trainers.saved.initial_weights import with_initial_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.config.settings import ReplicaSettings, Start
    from orchestray.trainers.ps.protocol.address import Address


class LeafHost(AcceptingHost, ReroutedHost):
    """A host of one leaf of a run."""

    def __init__(self, settings: ReplicaSettings) -> None:
        AcceptingHost.__init__(self, "leaf server")
        ReroutedHost.__init__(self)
        self._settings = settings
        self._central = CentralSettings.of(settings)
        self._task = with_initial_weights(tasks.build(settings.task), settings.initial)
        self._server: LeafServer | None = None
        self._upstream: Upstream | None = None
        self._saved_of_earlier = 0
        self._across_of_earlier = (0, 0)

    # -- in the working thread -----------------------------------------------------------------------------

    def begin(self, rank: int, start: Start, address: str, servers: list[Address], total_steps: int | None) -> int:
        """Connect to the shards, and serve. May be called again.

        Args:
            rank: rank of this leaf.
            start: start of the run.
            address: address of this node, by which others reach it.
            servers: primaries, in the order of shards.
            total_steps: number of steps of the run, for its learning rates.

        Returns:
            The port at which workers connect to this leaf.

        Raises:
            ChannelError: a shard's server cannot be reached.
        """
        self.close()
        self._rank, self._address, self._aborted = rank, address, False
        settings, central = self._settings, self._central
        model = build_model(self._task)
        if settings.precision == "float64":
            model = model.double()
        partition = Partition.of(model, central.shards, unit=central.unit)
        values = flatten_parameters(model)
        channels = [self._connect(server, shard) for shard, server in enumerate(servers)]
        replace = self._await_server if central.replicas > 1 else None
        upstream = Upstream(rank, channels, partition, values, replace=replace)
        upstream.hello()
        whole = Partition.of(model)
        buffers = Buffers.of(model) if upstream.buffer_values else None
        copy: BatchCopy | LocalCopy
        if central.compute_groups:
            copy = GroupCopy(upstream)
        elif central.consistency == "asynchronous":
            loaded = newest(settings.checkpoint_storage, start.checkpoint)
            state = {} if loaded is None else loaded.optimizer()
            shard = self._shard(whole, values, state, buffers, total_steps)
            falls = settings.exchange["significance_decay"] == "sqrt"
            copy = LocalCopy(upstream, shard, float(settings.exchange["significance"]), falls=falls)
        else:
            copy = BatchCopy(upstream, always_newest=central.consistency == "stale")
        decoder = GradientDecoder(whole.slices(0), values, compressor_of(settings, 0))
        sums = central.compute_groups or central.consistency == "synchronous"
        server = LeafServer(upstream, copy, decoder, sums_whole_batches=sums)
        self._server, self._upstream = server, upstream
        store = self._listen()

        def run() -> None:
            with contextlib.suppress(ChannelClosedError):  # its workers see that it has closed
                server.run()

        self._start(run, f"leaf server {rank}")
        return int(store.port)

    def _shard(
        self,
        whole: Partition,
        values: Tensor,
        state: Mapping[str, Tensor],
        buffers: Buffers | None,
        total_steps: int | None,
    ) -> Shard:
        settings = self._settings
        optimizer = make_optimizer(**settings.optimizer)
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
        """Expect a worker under this name, and serve it in a thread of its own."""
        assert self._server is not None
        self._meet(name, f"worker {worker}", self._server.serve)

    def usage(self) -> dict[str, Any]:
        """Return this leaf's traffic in bytes, and the peak of its memory.

        `bytes` went between it and its workers; the shards count the rest. `saved_bytes` were saved between it and the
        shards. `across_bytes` went there, both ways; `across_dense_bytes` would have, had all values been sent each
        time.
        """
        across, dense = self._across()
        return {
            "bytes": self._bytes_moved(),
            "saved_bytes": self._saved_of_earlier + self._saved_bytes(),
            "across_bytes": across,
            "across_dense_bytes": dense,
            "memory": peak_memory_bytes(torch.device("cpu")),
            "parts": parts_of(self),
            "reports": reports_of(self),
        }

    def abort(self) -> None:
        """End every connection to workers and shards, and with it every wait."""
        super().abort()
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End every connection."""
        self._expect_nobody()
        self.abort()
        self._hang_up()
        self._saved_of_earlier += self._saved_bytes()
        self._across_of_earlier = self._across()
        self._server = self._upstream = None

    def _saved_bytes(self) -> int:
        upstream = self._upstream
        if upstream is None or self._central.compute_groups or self._central.consistency != "asynchronous":
            return 0
        return max(0, upstream.bytes_dense - upstream.bytes_moved)

    def _across(self) -> tuple[int, int]:
        """Return the bytes between this leaf and the shards, and those had none been kept back."""
        (moved, dense), upstream = self._across_of_earlier, self._upstream
        return (moved, dense) if upstream is None else (moved + upstream.bytes_moved, dense + upstream.bytes_dense)

    def _connect(self, server: Address, shard: int) -> Channel:
        return dial(server, f"leaf server {self._rank}", f"parameter server {shard}")
