"""Gangs: N actors in a placement group, each with a role and a rank, that start, meet, die and are replaced."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.errors import ClusterError, OrchestrayError, PlaceLostError
from orchestray.platform.gang.causes import cause_of, last_line
from orchestray.platform.gang.growth import Growth
from orchestray.platform.gang.member import Failure, Identity, Meeting, Member
from orchestray.platform.gang.nearness import Where
from orchestray.platform.gang.placement import (
    PLACEMENT_TIMEOUT_S,
    Place,
    Room,
    Shape,
    give_back,
    is_created,
    nodes_of,
    place,
    remove,
    share_cpus,
    that_share_a_node,
)
from orchestray.platform.gang.seat import Seat, beside, end, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_COLLECTIVE_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 2.0
_READY_TIMEOUT_S = 15.0
"""Who waits for a turn may be importing still; one that is dead says so at once."""
_ALIVE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 150.0
"""How long a process may take to answer once its place is there: on a busy machine its imports take 30 s."""
_LOOK_S = 0.5


def silent(_text: str) -> None:
    """Nobody wants to be told."""


def _nothing() -> None:
    """Nothing to do meanwhile."""


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

    def __init__(
        self,
        cluster: Cluster,
        shape: Shape,
        notify: Callable[[str], None] = silent,
        *,
        nodes: Sequence[Where] = (),
    ) -> None:
        self.cluster = cluster
        self.shape = shape
        self.wished = list(nodes)
        """Of a gang beside another one: the node that each member is to be on while that is there."""
        self.generation = 0
        self.while_waiting: Callable[[], None] = _nothing
        """Called about twice a second while the gang waits for its members."""
        self._hosted: tuple[Any, ...] | None = None
        self._vacant: list[Place] = []
        """What spares have left."""
        self._unused: list[Place] = []
        """What members have left that are not replaced: the placement group of the first ones ends with the gang."""
        self._added: list[Place] = []
        """Of members that were added, each a placement group of its own."""
        self.growth: Growth | None = None
        """Members that are being added."""
        self._reserve: Seat | None = None
        """A process with its imports done and nothing else."""
        cpus, self._num_threads = share_cpus(cluster, shape, notify)
        self._notify = notify
        self._neighbours = neighbours = that_share_a_node(cluster, shape, cpus, notify)
        self._reserved = reserved = place(cluster, shape, neighbours, cpus, nodes=nodes)
        try:
            wrap: Any = ray.remote(concurrency_groups={"control": 5})  # type: ignore[call-overload]  # a documented option
            self._actor_class = wrap(Member)
            self.seats = [self._seat(reserved.members[rank // neighbours]) for rank in range(shape.size)]
            self.spares = [waiting(self._seat(place)) for place in reserved.spares]
        except BaseException:
            self.close()
            raise

    def _seat(self, place: Place, hosted: tuple[Any, ...] | None = None) -> Seat:
        options: dict[str, Any] = {"num_cpus": place.cpus, "num_gpus": self.shape.gpus_per_member}
        options |= {"scheduling_strategy": place.strategy(self.cluster), "max_restarts": 0}
        actor = self._actor_class.options(**options).remote(self._num_threads)
        seat = Seat(actor, place, beside(actor.identify).remote())
        if (told := hosted or self._hosted) is not None:
            # Not waited for: a failure shows in the first call, which queues behind this one.
            seat.hosting = seat.actor.host.remote(*told)
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
        joining = self.growth.seats if self.growth is not None else []
        return [(self.shape.role, self.seats), ("spare", self.spares), ("reserve", reserve), ("joining", joining)]

    def meet(self) -> None:
        """Bring the members together in a new process group, whatever became of the one before."""
        self.generation += 1
        opener = next((seat for seat in self.seats if seat.met), self.seats[0])
        rank = self.seats.index(opener)
        host, port = self.gather_one(opener.actor.open_store.remote(), rank)
        meeting = Meeting(self.generation, host, port, self.shape.size, _COLLECTIVE_TIMEOUT_S)
        joins = {seat.actor.join.remote(meeting, rank): rank for rank, seat in enumerate(self.seats)}
        lost: dict[int, str] = {}
        try:
            all_came = all(came for _, came in self._answers(joins))  # up to the first that did not: others wait for it
        except MemberLostError as error:
            lost, all_came = error.lost, False
        if not all_came:
            for seat in self.seats:
                beside(seat.actor.abandon).remote(self.generation)
            raise MemberLostError({**self._dead(), **lost})
        for seat in self.seats:
            seat.met = True

    def _dead(self) -> dict[int, str]:
        """Why members are dead, by rank."""
        dead = {}
        for rank, seat in enumerate(self.seats):
            try:
                ray.get(beside(seat.actor.identify).remote(), timeout=_ANSWER_TIMEOUT_S)
            except GetTimeoutError:
                continue  # slow, or still starting
            except RayActorError as error:
                dead[rank] = self.cause(rank, error)
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
        return beside(self.seats[rank].actor.control).remote(method, *arguments)

    def nodes(self) -> list[str]:
        """The address of each member's node, in the order of ranks; waits until all have answered.

        Raises:
            MemberLostError: a member died.
        """
        return [identity.node for identity in self.gather([seat.identifying for seat in self.seats])]

    def whereabouts(self) -> list[Where]:
        """The node of each member, in the order of ranks, as far as Ray says now; never waits for a process."""
        return nodes_of(self.cluster, [seat.place for seat in self.seats])

    def watch(self) -> list[Any]:
        """Of each member a Ray reference that is ready, with an error, once its process is dead."""
        for seat in self.seats:
            if seat.end is None:
                waiting(seat)
        return [seat.end for seat in self.seats]

    def gather(self, references: Sequence[Any]) -> list[Any]:
        """Wait for one answer a rank; a death or a failure is raised as soon as it is seen."""
        answers = dict(self._answers({reference: rank for rank, reference in enumerate(references)}))
        return [answers[rank] for rank in range(len(references))]

    def gather_one(self, reference: Any, rank: int) -> Any:
        """Wait for the answer of one member.

        Raises:
            MemberLostError, OrchestrayError: as `gather`.
        """
        return next(answer for _, answer in self._answers({reference: rank}))

    def _answers(self, rank_of: Mapping[Any, int]) -> Iterator[tuple[int, Any]]:
        """The rank and the answer of each reference, as they come; raises as `gather`."""
        pending = list(rank_of)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
            self.while_waiting()
            self.check_places()
            for reference in ready:
                yield rank_of[reference], self._answer(rank_of[reference], reference)

    def check_places(self) -> None:
        """See that the members have their places, and start there; to be called while one waits.

        One that does not start is ended: from then on whatever it was asked says that it is dead, and `cause` why.

        Raises:
            PlaceLostError: a member has waited too long for its place, which others made: the machine that had it is
                gone.
        """
        room, now_s = self.cluster.room, time.monotonic()
        silent = [seat for seat in self.seats if now_s - seat.made_s >= PLACEMENT_TIMEOUT_S and seat.is_silent]
        is_there = {group: is_created(group) for group in {seat.place.group for seat in silent}}
        for seat in silent:
            if is_there[seat.place.group]:
                seat.kill_if_late(now_s, START_TIMEOUT_S)
            elif room is not None:
                raise PlaceLostError(
                    f"A machine with places of {len(self.seats)} worker(s) is gone, and the cluster had no other place "
                    f"within {PLACEMENT_TIMEOUT_S:g} s. What they did can go on where there are places for all: start "
                    "a machine in its place, or ask for fewer workers (strategy.network)."
                )
            else:
                seat.placed_s = None  # our own: it is there again once the cluster has a machine for it

    def cause(self, rank: int, error: BaseException) -> str:
        """Why a member is dead, in a few words, from the error that says so."""
        return self.seats[rank].killed_because or cause_of(error)

    def _answer(self, rank: int, reference: Any) -> Any:
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            raise MemberLostError({rank: self.cause(rank, error)}) from error
        except RayError as error:
            raise ClusterError(
                f"Worker {rank} could not be started: {last_line(error)} If its machine lacks orchestray or the "
                "packages of the task, install them there, or let `orchestray submit` bring them."
            ) from error
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def replace(self, rank: int) -> bool:
        """Put a new process in the place of a lost member; returns whether a warm spare stepped in."""
        lost = self.seats[rank]
        lost.kill()  # it may only look dead: two members of one rank must never meet
        while self.spares:
            spare = self.spares.pop(0)
            try:
                ray.get(beside(spare.actor.identify).remote(), timeout=_READY_TIMEOUT_S)
            except RayError:
                spare.kill()  # it may only be late: its place is for one
                self._vacant.append(spare.place)
                continue
            self.seats[rank] = spare
            self._vacant.append(lost.place)
            return True
        self.seats[rank] = self._called_up(lost.place) or self._seat(lost.place)
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
        self._reserve = waiting(Seat(actor, self.seats[0].place, beside(actor.identify).remote()))

    def _called_up(self, place: Place) -> Seat | None:
        """The reserve, made a member; None if there is none that answers."""
        seat, self._reserve = self._reserve, None
        if seat is None or self._hosted is None:
            return None
        try:
            ray.get(beside(seat.actor.identify).remote(), timeout=_READY_TIMEOUT_S)
        except RayError:
            seat.kill()
            return None
        seat.place = place
        seat.hosting = seat.actor.host.remote(*self._hosted)
        return seat

    def refill_spares(self) -> None:
        """Start new spares where spares have stepped in or died.

        Not done at once when one steps in: starting one would slow the recovery.
        """
        self._vacant += [spare.place for spare in self.spares if spare.is_dead]
        self.spares = [spare for spare in self.spares if not spare.is_dead]
        while self._vacant:
            self.spares.append(waiting(self._seat(self._vacant.pop())))

    # -- more members, and fewer ---------------------------------------------------------------------------------------

    def begin_growth(self, num_members: int, target: str, *arguments: Any) -> Growth:
        """Start members that `adopt` makes a part of the gang, while the others go on; they build what `host` would.

        Raises:
            ClusterError: the cluster has not so much.
        """
        num_places = num_members // self._neighbours
        left = [place for place in self._unused if place.capacity == self._neighbours][:num_places]
        missing = (num_places - len(left)) * self._neighbours
        room = Room(self.cluster, self.shape, missing, self._neighbours, self._notify)
        self._unused = [place for place in self._unused if place not in left]
        seats = [place for place in [*left, *room.places] for _ in range(self._neighbours)]
        self.growth = Growth(room, seats, lambda place: self._seat(place, (target, *arguments)), self._give_up)
        return self.growth

    def adopt(self) -> None:
        """The members that were added, and are ready, get the ranks behind those there are."""
        growth, self.growth = self.growth, None
        assert growth is not None
        self._added += growth.room.places
        self.seats += growth.seats
        self.shape = replace(self.shape, size=len(self.seats))

    def shrink(self, size: int) -> None:
        """End the members of the last ranks, and give their places back."""
        leaving = self.seats[size:]
        del self.seats[size:]
        self.shape = replace(self.shape, size=size)
        end([seat.actor for seat in leaving])
        self._leave([seat.place for seat in leaving])

    def _give_up(self, growth: Growth) -> None:
        """Members that were being added are not wanted any more."""
        self.growth = None
        end([seat.actor for seat in growth.seats])
        growth.room.give_back()
        self._leave([place for place in growth.places if place not in growth.room.places])

    def _leave(self, places: Sequence[Place]) -> None:
        """Give back what nobody sits in any more; those of the first placement group are kept for whoever is added."""
        taken = [*(seat.place for seat in [*self.seats, *self.spares]), *self._vacant]
        free = [place for place in dict.fromkeys(places) if place not in taken]
        self._unused += [place for place in free if place not in self._added]
        give_back([place for place in free if place in self._added])
        self._added = [place for place in self._added if place not in free]

    def all_answer(self) -> bool:
        """Whether every process is alive, spares too."""
        seats = [*self.seats, *self.spares]
        try:
            ray.get([beside(seat.actor.identify).remote() for seat in seats], timeout=_ALIVE_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return False
        return True

    def close(self) -> None:
        """End every process of the gang and give its place back."""
        reserve = [self._reserve] if self._reserve is not None else []
        growing = [] if self.growth is None else self.growth.seats
        seats = [*getattr(self, "seats", []), *getattr(self, "spares", []), *reserve, *growing]
        added = self._added + ([] if self.growth is None else self.growth.room.places)
        self.seats, self.spares, self._reserve, self.growth = [], [], None, None
        end([seat.actor for seat in seats])
        give_back(added)
        remove(self._reserved.groups)
