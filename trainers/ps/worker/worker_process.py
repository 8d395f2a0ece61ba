"""The base of processes that work for servers: connections that end and are replaced."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.comm.channel.base import ChannelClosedError, ChannelError
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.data.retries import READS
from orchestray.trainers.core.faults import FaultPlan, Faults
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.core.parts import parts_of, reports_of
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.core.task_calls import refuse
from orchestray.trainers.loop.checkpoint_source import exported
from orchestray.trainers.loop.task_host import TaskHost
from orchestray.trainers.ps.protocol.address import SERVER_LOST
from orchestray.trainers.ps.protocol.assignments import LEFT
from orchestray.trainers.ps.protocol.host_bases import ReroutedHost, dial
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.trained_model import write_model

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.ps.protocol.address import Address


class EmployedHost(TaskHost, ReroutedHost):
    """The base of the hosts in the gang of workers. Its public methods are for the driver, in parallel to the work."""

    def __init__(self, settings: ReplicaSettings) -> None:
        TaskHost.__init__(self, settings)
        refuse(
            self._task,
            ("weight", "final_metrics", "gather"),
            "parameter servers, whose workers do not meet",
            "set strategy.exchange.type: allreduce",
        )
        ReroutedHost.__init__(self)
        self._channels: list[Channel] = []
        self._closing = threading.Lock()
        self._number, self._leaves = 0, False

    def abort(self) -> None:
        """End every wait for the servers."""
        super().abort()
        self._hang_up()

    @abstractmethod
    def _counts(self) -> Mapping[str, float]:
        """Return the counters of `OrderLoop.counts`."""

    def usage(self) -> dict[str, Any]:
        """Return this worker's counters and the peak of its memory."""
        counts = {name: round(count, 6) for name, count in self._counts().items()}
        memory = peak_memory_bytes(self._device)
        found = {"parts": parts_of(self), "reports": reports_of(self)}
        return {"memory": memory, **counts, "read_retries": READS.num_retries, **found}

    def leave(self) -> None:
        """Stop this worker's present and later work: the run continues without it."""
        self._leaves = True
        self.abort()

    def _employ(
        self, rank: int, attempt: int, servers: Sequence[Address], work: Callable[[list[Channel], Faults], str]
    ) -> str:
        """Have `work` run with channels to the servers and the faults of this rank; return what `train` returns."""
        newest = max((server.number for server in servers), default=0)
        with self._moved:  # replacements of earlier servers than these are forgotten
            self._servers = {shard: one for shard, one in self._servers.items() if one.number > newest}
        faults, seed = self._settings.faults, self._settings.seed
        plan = FaultPlan.of(faults, "worker", rank, attempt=attempt, is_alone=True, seed=seed)
        try:
            answer = work([self._connect(server, shard) for shard, server in enumerate(servers)], Faults(plan))
        except PeerLostError:
            return PEER_LOST
        except ChannelError:
            return SERVER_LOST
        except BaseException:
            self._dissolve()  # the lead hands out again what this worker held, and its peers see at once that it left
            raise
        if answer == LEFT:
            self._dissolve()  # the others' next checkpoint must not wait for it
        return answer

    def _dissolve(self) -> None:
        """End the connections of the work that has ended."""
        self._hang_up()

    def _write_model(self, tensors: dict[str, Tensor]) -> None:
        """Write the trained model to the run's directory."""
        directory = self._settings.model_directory
        if directory:
            described = describe_model(self._settings, self._task)
            row = self._source("train").first_row
            write_model(directory, exported(self._settings, ModelState(tensors)), described, self._task, row)

    def close(self) -> None:
        """Close the connections and the checkpoint writer."""
        self._hang_up()
        self._close_checkpoints()

    def _connect(self, server: Address, shard: int) -> Channel:
        channel = dial(server, f"worker {self._number}", f"parameter server {shard}")
        with self._closing:
            self._channels.append(channel)
        if self._leaves:
            self._hang_up()
            raise ChannelClosedError(f"worker {self._number} leaves the run")
        return channel

    def _hang_up(self) -> None:
        with self._closing:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
