"""The driver's view of the gang of workers: replicas of one process, or of several stages that start and end together.

It imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import TrainingError

if TYPE_CHECKING:
    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.driver.servers.leaf_group import Leaves
    from orchestray.trainers.driver.servers.server_group import ServerGroup
    from orchestray.trainers.ps.protocol.address import StagePlan

_SETTLE_TIMEOUT_S = 120.0
"""Seconds that the workers of a replica that is to stop have to answer."""
_MOST_TIMES_IN_VAIN = 5
_LONGEST_IN_VAIN_S = 60.0
"""Seconds of futile reconnections that are tolerated, because Ray may report a server's death late."""
WORKER_HOST = "orchestray.trainers.ps.hosts.worker_host:WorkerHost"
STAGE_HOST = "orchestray.trainers.ps.variants.model_parallel.host:StageHost"


class WorkerGroup:
    """The workers of a run.

    Attributes:
        gang: gang of all workers; those of replica n have the ranks from n * size on, in the order of stages.
        size: number of workers of a replica.
        working: ranks of working workers, by the Ray references of their answers.
        primaries: servers that they work for.
        plan: plan of replicas in stages, known before they are employed; None: replicas of one process.
    """

    def __init__(
        self,
        gang: Gang,
        size: int,
        primaries: ServerGroup,
        leaves: Leaves | None,
        *,
        attempt: Callable[[int], int],
    ) -> None:
        """
        Args:
            gang: gang of the workers.
            size: number of workers of a replica.
            primaries: servers that they work for.
            leaves: leaf servers that they are connected to instead; None: they are connected to the servers.
            attempt: returns the number of times that the process of a rank was killed on purpose before.
        """
        self.gang = gang
        self.size = size
        self.working: dict[Any, int] = {}
        self.plan: StagePlan | None = None
        self.primaries = primaries
        self._leaves = leaves
        self._attempt = attempt
        self._settle_by_s: dict[int, float] = {}
        """Time until which the workers of a replica that is to stop have to answer."""
        self._meetings: dict[int, str] = {}
        """Name of the last meeting of each replica."""
        self._num_meetings = 0
        self._lost_touch: dict[int, tuple[int, int, float]] = {}
        """Step at which a worker last lost touch with its servers, number of futile reconnections, and time of the
        first.
        """

    @property
    def num_replicas(self) -> int:
        """Number of replicas for which there are processes."""
        return len(self.gang.slots) // self.size

    def employ(self, replica: int) -> None:
        """Connect a replica to its servers, and set it to work.

        Raises:
            MemberLostError: its leaf server is lost.
        """
        self._settle_by_s.pop(replica, None)
        name = self._new_name(replica)
        self._meetings[replica] = name
        if self.size == 1:
            leaves = self._leaves
            if leaves is None:
                servers = self.primaries.expect(replica, name)
            else:
                servers = [leaves.expect(replica, name, self.gang.whereabouts())]
            reference = self.gang.call_one(replica, "train", replica, self._attempt(replica), servers)
            self.working[reference] = replica
            return
        meeting = self.primaries.meeting(f"meeting-{name}")
        for stage, rank in enumerate(self._ranks(replica)):
            servers = self.primaries.expect(replica, name, self._shards_of(stage))
            arguments = (rank, self._attempt(rank), servers, meeting, self.plan)
            self.working[self.gang.call_one(rank, "train", *arguments)] = rank

    # -- lost replicas -------------------------------------------------------------------------------------------------

    def call_off(self, replica: int) -> None:
        """Have the workers of a replica stop what they wait for, because one of them has stopped.

        They have some time to answer; see `overdue`.
        """
        self._settle_by_s[replica] = time.monotonic() + _SETTLE_TIMEOUT_S
        if self.size == 1:
            return
        name = f"meeting-{self._meetings[replica]}"
        self.primaries.ask_lead("call_off", name)
        for rank in self._ranks(replica):
            if rank in self.working.values():
                self.gang.control_one(rank, "call_off", name)

    def overdue(self) -> list[int]:
        """Give up replicas that were to stop and stay silent, and return them; no answers of theirs are expected."""
        late = [replica for replica, by_s in self._settle_by_s.items() if time.monotonic() > by_s]
        for replica in late:
            del self._settle_by_s[replica]
        self.working = {answer: rank for answer, rank in self.working.items() if rank // self.size not in late}
        return late

    def forget(self) -> None:
        """Expect no answers of any worker any more."""
        self._settle_by_s.clear()
        self.working.clear()

    def forget_from(self, rank: int) -> None:
        """Expect no answers of workers from this rank on any more."""
        self.working = {answer: of for answer, of in self.working.items() if of < rank}

    def lost_touch(self, rank: int, step: int, *, is_explained: bool) -> None:
        """Record that a worker reports a lost server.

        Args:
            rank: rank of the worker.
            step: last step of the run.
            is_explained: True if a server has died.

        Raises:
            TrainingError: the worker reports it again and again, and no step was made meanwhile.
        """
        now_s = time.monotonic()
        at, times, since_s = self._lost_touch.get(rank, (-1, 0, now_s))
        times, since_s = (0, now_s) if is_explained or at != step else (times + 1, since_s)
        self._lost_touch[rank] = step, times, since_s
        if times >= _MOST_TIMES_IN_VAIN and now_s - since_s > _LONGEST_IN_VAIN_S:
            raise TrainingError(
                f"Worker {rank} loses its connection to the parameter servers again and again, and none of them has "
                "died. See that its node reaches those of the servers, on any port."
            )

    def reroute(self, shard: int, server: int) -> None:
        """Send all workers of a shard the address of the server that has taken it over.

        Args:
            shard: index of the shard.
            server: rank of the server.
        """
        if self._leaves is not None:
            self._leaves.reroute(shard, partial(self.primaries.expect_at, server))
            return
        stage, local = divmod(shard, self.primaries.num_shards // self.size)
        for replica in range(self.num_replicas):
            address = self.primaries.expect_at(server, replica, self._new_name(replica))
            self.gang.control_one(self._ranks(replica)[stage], "reroute", local, address)

    def abort(self, replicas: Iterable[int]) -> None:
        """Have the workers of all these replicas stop waiting; they have some time to answer, as in `call_off`."""
        self._settle_by_s = dict.fromkeys(replicas, time.monotonic() + _SETTLE_TIMEOUT_S)
        for name in self._meetings.values() if self.size > 1 else ():
            self.primaries.ask_lead("call_off", f"meeting-{name}")
        self.gang.control("abort")

    def save_model(self, step: int) -> None:
        """Have a replica write the trained model."""
        self.gang.gather([self.gang.call_one(rank, "save_model", step) for rank in self._ranks(0)])

    def place_of(self, rank: int) -> dict[str, int]:
        """Return replica and stage of a worker, for the result; empty where a replica is one worker."""
        replica, stage = divmod(rank, self.size)
        return {"replica": replica, "stage": stage} if self.size > 1 else {}

    def _ranks(self, replica: int) -> range:
        return range(replica * self.size, (replica + 1) * self.size)

    def _shards_of(self, stage: int) -> range:
        each = self.primaries.num_shards // self.size
        return range(stage * each, (stage + 1) * each)

    def _new_name(self, replica: int) -> str:
        self._num_meetings += 1
        return f"worker-{replica}-{self._num_meetings}"
