"""Gangs: N actors in a placement group, each with a role and a rank, that start, meet, die and are replaced."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestray.platform.cluster import Cluster
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.platform.member import Failure, Identity, Meeting, Member
from orchestray.platform.placement import Shape, place, share_cpus, that_share_a_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FLUSH_TIMEOUT_S = 0.5
_COLLECTIVE_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 2.0
_ALIVE_TIMEOUT_S = 5.0
_LOOK_S = 0.5


def silent(_text: str) -> None:
    """Nobody wants to be told."""


def _nothing() -> None:
    """Nothing to do meanwhile."""


@dataclass
class Seat:
    """One live actor of a gang, and the bundle of the placement group it sits in."""

    actor: Any
    bundle: int
    identifying: Any
    """Ray reference of its identity, asked for when it was started."""
    identity: Identity | None = None
    met: bool = False
    """Whether it has joined a generation: its imports are done."""
    end: Any = None
    """Of a seat that waits for its turn: a Ray reference that is ready once the actor is dead."""

    def answered(self) -> Identity | None:
        """Its identity, if it has answered; does not wait."""
        if self.identity is None and ray.wait([self.identifying], timeout=0)[0]:
            with contextlib.suppress(RayError):
                self.identity = ray.get(self.identifying)
        return self.identity

    @property
    def is_dead(self) -> bool:
        """Of a seat that waits for its turn; does not wait."""
        return self.end is not None and bool(ray.wait([self.end], timeout=0)[0])


class MemberLostError(OrchestrayError):
    """Members died while the gang was asked for something: why, by rank."""

    def __init__(self, lost: dict[int, str]) -> None:
        self.lost = lost
        super().__init__("; ".join(f"worker {rank} died: {cause}" for rank, cause in sorted(lost.items())))


class Gang:
    """N members that live in a placement group and meet in one process group.

    A lost member is replaced (by a warm spare where there is one) without touching the processes of the others; the
    gang then meets again, as the next generation.
    """

    def __init__(self, cluster: Cluster, shape: Shape, notify: Callable[[str], None] = silent) -> None:
        self.cluster = cluster
        self.shape = shape
        self.generation = 0
        self.while_waiting: Callable[[], None] = _nothing
        """Called about twice a second while the gang waits for its members."""
        self._hosted: tuple[Any, ...] | None = None
        self._vacant: list[int] = []
        """Bundles of the placement group that spares have left."""
        self._reserve: Seat | None = None
        """A process with its imports done and nothing else."""
        cpus, self._num_threads = share_cpus(cluster, shape, notify)
        self._resources = {"num_cpus": cpus, "num_gpus": shape.gpus_per_member}
        neighbours = that_share_a_node(cluster, shape, cpus, notify)
        self._placement = place(cluster, shape, neighbours, cpus)
        num_groups = shape.size // neighbours
        try:
            wrap: Any = ray.remote(concurrency_groups={"control": 5})  # type: ignore[call-overload]  # a documented option
            self._actor_class = wrap(Member)
            self.seats = [self._seat(rank // neighbours) for rank in range(shape.size)]
            self.spares = [_waiting(self._seat(num_groups + index)) for index in range(shape.spares)]
        except BaseException:
            self.close()
            raise

    def _seat(self, bundle: int) -> Seat:
        where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {**self._resources, "scheduling_strategy": where, "max_restarts": 0}
        actor = self._actor_class.options(**options).remote(self._num_threads)
        seat = Seat(actor, bundle, _beside(actor.identify).remote())
        if self._hosted is not None:
            # Not waited for: a failure shows in the first call, which queues behind this one.
            seat.actor.host.remote(*self._hosted)
        return seat

    def host(self, target: str, *arguments: Any) -> None:
        """Have every member, spares too, build the object named by `target`; the same for later replacements.

        Raises:
            OrchestrayError: what the first member to fail says.
            MemberLostError: a member died.
        """
        self.gather(self.begin_host(target, *arguments))

    def begin_host(self, target: str, *arguments: Any) -> list[Any]:
        """As `host`, without waiting: returns what `gather` is to be given."""
        self._hosted = (target, *arguments)
        for seat in self.spares:
            seat.actor.host.remote(*self._hosted)
        return [seat.actor.host.remote(*self._hosted) for seat in self.seats]

    def identify(self) -> list[tuple[str, int, Identity]]:
        """(role, rank, identity) of each member and spare that has answered so far; never waits."""
        return [
            (role, rank, identity)
            for role, seats in self._by_role()
            for rank, seat in enumerate(seats)
            if (identity := seat.answered()) is not None
        ]

    def _by_role(self) -> list[tuple[str, list[Seat]]]:
        reserve = [self._reserve] if self._reserve is not None else []
        return [(self.shape.role, self.seats), ("spare", self.spares), ("reserve", reserve)]

    def meet(self) -> None:
        """Bring the members together in a new process group, whatever became of the one before."""
        self.generation += 1
        opener = next((seat for seat in self.seats if seat.met), self.seats[0])
        rank = self.seats.index(opener)
        try:
            host, port = ray.get(opener.actor.open_store.remote())
        except RayActorError as error:
            raise MemberLostError({rank: cause_of(error)}) from error
        meeting = Meeting(self.generation, host, port, self.shape.size, _COLLECTIVE_TIMEOUT_S)
        lost: dict[int, str] = {}
        try:
            came = self.gather([seat.actor.join.remote(meeting, rank) for rank, seat in enumerate(self.seats)])
        except MemberLostError as error:
            lost, came = error.lost, [False]
        if not all(came):
            for seat in self.seats:
                _beside(seat.actor.abandon).remote(self.generation)
            raise MemberLostError({**self._dead(), **lost})
        for seat in self.seats:
            seat.met = True

    def _dead(self) -> dict[int, str]:
        """Why members are dead, by rank."""
        dead = {}
        for rank, seat in enumerate(self.seats):
            try:
                ray.get(_beside(seat.actor.identify).remote(), timeout=_ANSWER_TIMEOUT_S)
            except GetTimeoutError:
                continue  # slow, or still starting
            except RayActorError as error:
                dead[rank] = cause_of(error)
        return dead

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Start a method of every member's hosted object; returns one Ray reference a rank."""
        return [self.call_one(rank, method, *arguments) for rank in range(len(self.seats))]

    def call_one(self, rank: int, method: str, *arguments: Any) -> Any:
        """As `call`, of one member; returns its Ray reference."""
        return self.seats[rank].actor.call.remote(method, *arguments)

    def control(self, method: str, *arguments: Any) -> list[Any]:
        """As `call`, beside the working thread of each member."""
        return [self.control_one(rank, method, *arguments) for rank in range(len(self.seats))]

    def control_one(self, rank: int, method: str, *arguments: Any) -> Any:
        """As `control`, of one member; returns its Ray reference."""
        return _beside(self.seats[rank].actor.control).remote(method, *arguments)

    def nodes(self) -> list[str]:
        """The address of each member's node, in the order of ranks; waits until all have answered.

        Raises:
            MemberLostError: a member died.
        """
        return [identity.node for identity in self.gather([seat.identifying for seat in self.seats])]

    def watch(self) -> list[Any]:
        """Of each member a Ray reference that is ready, with an error, once its process is dead."""
        for seat in self.seats:
            if seat.end is None:
                _waiting(seat)
        return [seat.end for seat in self.seats]

    def gather(self, references: Sequence[Any]) -> list[Any]:
        """Wait for one answer a rank; a death or a failure is raised as soon as it is seen."""
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        answers: list[Any] = [None] * len(references)
        waiting = list(references)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_LOOK_S)
            self.while_waiting()
            for reference in ready:
                answers[rank_of[reference]] = self._answer(rank_of[reference], reference)
        return answers

    def gather_one(self, reference: Any, rank: int) -> Any:
        """Wait for the answer of one member.

        Raises:
            MemberLostError, OrchestrayError: as `gather`.
        """
        while not ray.wait([reference], num_returns=1, timeout=_LOOK_S)[0]:
            self.while_waiting()
        return self._answer(rank, reference)

    def _answer(self, rank: int, reference: Any) -> Any:
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            raise MemberLostError({rank: cause_of(error)}) from error
        except RayError as error:
            raise ClusterError(
                f"Worker {rank} could not be started: {_last_line(error)} If its machine lacks orchestray or the "
                "packages of the task, install them there, or let `orchestray submit` bring them."
            ) from error
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def replace(self, rank: int) -> bool:
        """Put a new process in the place of a lost member; returns whether a warm spare stepped in."""
        lost = self.seats[rank]
        with contextlib.suppress(RayError):
            ray.kill(lost.actor)  # it may only look dead: two members of one rank must never meet
        while self.spares:
            spare = self.spares.pop(0)
            try:
                ray.get(_beside(spare.actor.identify).remote(), timeout=_ANSWER_TIMEOUT_S)
            except RayError:
                self._vacant.append(spare.bundle)
                continue
            self.seats[rank] = spare
            self._vacant.append(lost.bundle)
            return True
        self.seats[rank] = self._called_up(lost.bundle) or self._seat(lost.bundle)
        return False

    def keep_reserve(self) -> None:
        """Start a process that does a member's imports and waits, if there is none and nothing better.

        Most of the time until a new process can stand in for a lost one goes into its imports. The reserve holds no
        model and asks for no CPU; it is kept on a cluster of our own, where no spares were asked for.
        """
        if self._reserve is not None and self._reserve.is_dead:
            self._reserve = None
        if self._reserve is not None or not self.cluster.owned or self.shape.spares or self._hosted is None:
            return
        if self.shape.gpus_per_member:
            return  # which GPU it would get is not known before
        actor = self._actor_class.options(num_cpus=0, max_restarts=0).remote(self._num_threads)
        actor.prepare.remote(self._hosted[0])
        self._reserve = _waiting(Seat(actor, 0, _beside(actor.identify).remote()))

    def _called_up(self, bundle: int) -> Seat | None:
        """The reserve, made a member; None if there is none that answers."""
        seat, self._reserve = self._reserve, None
        if seat is None or self._hosted is None:
            return None
        try:
            ray.get(_beside(seat.actor.identify).remote(), timeout=_ANSWER_TIMEOUT_S)
        except RayError:
            return None
        seat.bundle = bundle
        seat.actor.host.remote(*self._hosted)
        return seat

    def refill_spares(self) -> None:
        """Start new spares where spares have stepped in or died.

        Not done at once when one steps in: starting one would slow the recovery.
        """
        self._vacant += [spare.bundle for spare in self.spares if spare.is_dead]
        self.spares = [spare for spare in self.spares if not spare.is_dead]
        while self._vacant:
            self.spares.append(_waiting(self._seat(self._vacant.pop())))

    def all_answer(self) -> bool:
        """Whether every process is alive, spares too."""
        seats = [*self.seats, *self.spares]
        try:
            ray.get([_beside(seat.actor.identify).remote() for seat in seats], timeout=_ALIVE_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return False
        return True

    def close(self) -> None:
        """End every process of the gang and give its place back."""
        reserve = [self._reserve] if self._reserve is not None else []
        actors = [seat.actor for seat in [*getattr(self, "seats", []), *getattr(self, "spares", []), *reserve]]
        self.seats, self.spares, self._reserve = [], [], None
        with contextlib.suppress(Exception):
            references = [_beside(actor.flush).remote() for actor in actors]
            ray.wait(references, num_returns=len(references), timeout=_FLUSH_TIMEOUT_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._placement)


def _waiting(seat: Seat) -> Seat:
    """The seat, watched for its death while it waits for its turn."""
    seat.end = _beside(seat.actor.linger).remote()
    return seat


def _beside(method: Any) -> Any:
    """The actor method, run beside the member's working thread and not behind what queues for it."""
    return method.options(concurrency_group="control")


def cause_of(error: BaseException) -> str:
    """The short reason in Ray's long text on a dead actor."""
    text = str(error)
    for line in text.splitlines():
        if "exit type" in line.lower() or "exit detail" in line.lower():
            detail = line.split("detail:", 1)[-1].strip().split(". ")[0].rstrip(".")
            return _PLAIN_CAUSES.get(detail, detail)
    return _last_line(error).rstrip(".")


_PLAIN_CAUSES = {
    "Worker unexpectedly exits with a connection error code 2": "its process was killed or crashed",
}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".") + "."
