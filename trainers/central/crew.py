"""The driver's end of the gang of workers: replicas of one process, or of several stages that live and die together.

It imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import TrainingError
from orchestray.trainers.central.address import PEER_LOST, SERVER_LOST

if TYPE_CHECKING:
    from orchestray.platform.gang.gang import Gang
    from orchestray.trainers.central.address import StagePlan
    from orchestray.trainers.central.leaf_driver import Leaves
    from orchestray.trainers.central.primaries import Primaries

_MOST_TIMES_IN_VAIN = 5
_LONGEST_IN_VAIN_S = 60.0
"""Of a server that died Ray may tell late."""
WORKER_HOST = "orchestray.trainers.central.worker_host:WorkerHost"
STAGE_HOST = "orchestray.trainers.central.stage_host:StageHost"


class Crew:
    """Who works.

    Attributes:
        gang: of all workers; those of replica n have the ranks from n * size on, in the order of stages.
        size: workers of a replica.
        working: their ranks, by the Ray references of their answers.
        plan: of replicas in stages; known before they are employed.
    """

    def __init__(
        self,
        gang: Gang,
        size: int,
        primaries: Primaries,
        leaves: Leaves | None,
        *,
        attempt: Callable[[int], int],
    ) -> None:
        """
        Args:
            gang: of the workers.
            size: workers of a replica.
            primaries: whom they work for.
            leaves: whom they are connected with in their place; None: with the servers themselves.
            attempt: how often the process of a rank was killed on purpose before.
        """
        self.gang = gang
        self.size = size
        self.working: dict[Any, int] = {}
        self.plan: StagePlan | None = None
        self._primaries = primaries
        self._leaves = leaves
        self._attempt = attempt
        self._meetings: dict[int, str] = {}
        """The last one of each replica."""
        self._broken: dict[int, bool] = {}
        """Replicas that do not work any more, or not all of them; and whether it is known what was lost."""
        self._num_meetings = 0
        self._lost_touch: dict[int, tuple[int, int, float]] = {}
        """Of a worker the step at which it last lost touch with its servers, and how often in vain."""

    @property
    def num_replicas(self) -> int:
        """As many as there are processes for."""
        return len(self.gang.seats) // self.size

    def begin(self) -> None:
        """Set all to work."""
        self.working.clear()
        self._broken.clear()
        for replica in range(self.num_replicas):
            self.employ(replica)

    def employ(self, replica: int) -> None:
        """Connect a replica with its servers, and set it to work."""
        name = self._new_name(replica)
        self._meetings[replica] = name
        if self.size == 1:
            leaves = self._leaves
            if leaves is None:
                servers = self._primaries.expect(replica, name)
            else:
                servers = [leaves.expect(replica, name, self.gang.whereabouts())]
            reference = self.gang.call_one(replica, "train", replica, self._attempt(replica), servers)
            self.working[reference] = replica
            return
        meeting = self._primaries.meeting(f"meeting-{name}")
        for stage, rank in enumerate(self._ranks(replica)):
            servers = self._primaries.expect(replica, name, self._shards_of(stage))
            arguments = (rank, self._attempt(rank), servers, meeting, self.plan)
            self.working[self.gang.call_one(rank, "train", *arguments)] = rank

    # -- replicas that are lost ----------------------------------------------------------------------------------------

    def stopped(self, rank: int, answer: str | None) -> None:
        """A worker has stopped before its time: have the others of its replica stop, too.

        Args:
            rank: of the worker.
            answer: what it said; None: it was lost, and there is another one in its place.
        """
        replica = rank // self.size
        first = replica not in self._broken
        self._broken[replica] = self._broken.get(replica, False) or answer != PEER_LOST
        if not first or self.size == 1:
            return
        name = f"meeting-{self._meetings[replica]}"
        self._primaries.ask_lead("call_off", name)
        for other in self._ranks(replica):
            if other in self.working.values():
                self.gang.control_one(other, "call_off", name)

    def lost_touch(self, rank: int, step: int, *, is_explained: bool) -> None:
        """A worker says that it has lost a server.

        Args:
            rank: of the worker.
            step: the last one of the run.
            is_explained: a server has died.

        Raises:
            TrainingError: it says so again and again, and no step was made meanwhile.
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

    def to_mend(self) -> dict[int, bool]:
        """The replicas to be employed again, none of which works any more; and whether it is known what was lost.

        They count as mended from then on.
        """
        busy = {rank // self.size for rank in self.working.values()}
        found = {replica: known for replica, known in self._broken.items() if replica not in busy}
        for replica in found:
            del self._broken[replica]
        return {replica: known for replica, known in found.items() if replica < self.num_replicas}

    def reroute(self, shard: int, server: int) -> None:
        """Tell everybody who talked to a shard which server has taken it over."""
        if self._leaves is not None:
            self._leaves.reroute(shard, partial(self._primaries.expect_at, server))
            return
        stage, local = divmod(shard, self._primaries.num_shards // self.size)
        for replica in range(self.num_replicas):
            address = self._primaries.expect_at(server, replica, self._new_name(replica))
            self.gang.control_one(self._ranks(replica)[stage], "reroute", local, address)

    def abort(self) -> None:
        """Have everybody give up what they wait for."""
        for name in self._meetings.values() if self.size > 1 else ():
            self._primaries.ask_lead("call_off", f"meeting-{name}")
        self.gang.control("abort")

    def save_model(self, step: int) -> None:
        """Have a replica write the trained model."""
        self.gang.gather([self.gang.call_one(rank, "save_model", step) for rank in self._ranks(0)])

    def place_of(self, rank: int) -> dict[str, int]:
        """Where a worker stands, for the result; nothing where a replica is one worker."""
        replica, stage = divmod(rank, self.size)
        return {"replica": replica, "stage": stage} if self.size > 1 else {}

    def _ranks(self, replica: int) -> range:
        return range(replica * self.size, (replica + 1) * self.size)

    def _shards_of(self, stage: int) -> range:
        each = self._primaries.num_shards // self.size
        return range(stage * each, (stage + 1) * each)

    def _new_name(self, replica: int) -> str:
        self._num_meetings += 1
        return f"worker-{replica}-{self._num_meetings}"


def stopped_early(answer: str | None) -> bool:
    """Whether a worker, by what it answered (None: it was lost), is to be employed again."""
    return answer in (None, PEER_LOST, SERVER_LOST)
