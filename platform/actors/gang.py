"""Gangs: N actors in a placement group, each with a role and a rank, that start, meet, die and are replaced."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from orchestray.platform.actors.death_cause import LOSSES, cause_of, last_line
from orchestray.platform.actors.locality import Where
from orchestray.platform.actors.member import Failure, Identity, Meeting, Member
from orchestray.platform.actors.membership import Membership
from orchestray.platform.actors.placement import (
    PLACEMENT_TIMEOUT_S,
    Place,
    Shape,
    is_created,
    nodes_of,
    place,
    remove,
    share_cpus,
    that_share_a_node,
)
from orchestray.platform.actors.slot import MemberSlot, Patience, State, beside, end, waiting
from orchestray.platform.actors.stacks import stacks_of
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.comm.backend import BackendKind, Given, choose_backend
from orchestray.platform.errors import ClusterError, OrchestrayError, PlaceLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_COLLECTIVE_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 2.0
_READY_TIMEOUT_S = 15.0
"""Time a waiting process has to answer: it may still be importing, while a dead one raises an error at once."""
_ALIVE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 150.0
"""Time a process has to answer once its place is ready: on a busy machine its imports take 30 s."""
_LOOK_S = 0.5


def ignore(*_: object) -> None:
    """Do nothing: the default for what a caller does not want to hear."""


class MemberLostError(OrchestrayError):
    """Raised when members died while the gang was waiting for their answers; `lost` gives the cause for each rank."""

    def __init__(self, lost: dict[int, str]) -> None:
        self.lost = lost
        super().__init__("; ".join(f"worker {rank} died: {cause}" for rank, cause in sorted(lost.items())))


class Gang:
    """A set of N members that live in a placement group and form one process group.

    A lost member is replaced (by a warm spare if there is one) without touching the processes of the others. The gang
    then meets again, as the next generation.
    """

    def __init__(
        self,
        cluster: Cluster,
        shape: Shape,
        notify: Callable[[str], None] = ignore,
        *,
        nodes: Sequence[Where] = (),
    ) -> None:
        self.cluster = cluster
        self.shape = shape
        self.wished = list(nodes)
        """Preferred node of each member if the gang is placed beside another one; empty otherwise."""
        self.generation = 0
        self.while_waiting: Callable[[], None] = ignore
        """Callback that runs about twice a second while the gang waits for its members."""
        self.patience = Patience()
        self.keep_stacks: Callable[[str, int, str], None] = ignore
        """Callback that gets role, rank and stacks of a member that is killed because it hangs."""
        self._hosted: tuple[Any, ...] | None = None
        self._vacant: list[Place] = []
        """Places freed by spares that became members or died."""
        self._reserve: MemberSlot | None = None
        """Process that has done its imports and holds no model, ready to take over a lost member's rank."""
        cpus, self._num_threads = share_cpus(cluster, shape, notify)
        neighbours = that_share_a_node(cluster, shape, cpus, notify)
        self.membership = Membership(self, neighbours, notify)
        self._reserved = reserved = place(cluster, shape, neighbours, cpus, nodes=nodes)
        try:
            wrap: Any = ray.remote(concurrency_groups={"control": 5})  # type: ignore[call-overload]  # a documented option
            self._actor_class = wrap(Member)
            self.slots = [self.start(reserved.members[rank // neighbours]) for rank in range(shape.size)]
            self.spares = [waiting(self.start(place)) for place in reserved.spares]
        except BaseException:
            self.close()
            raise

    def start(self, place: Place, hosted: tuple[Any, ...] | None = None) -> MemberSlot:
        """Start a process, which is not a member yet.

        Args:
            place: its place.
            hosted: arguments of `host` for it; None: those of the gang.
        """
        options: dict[str, Any] = {"num_cpus": place.cpus, "num_gpus": self.shape.gpus_per_member}
        options |= {"scheduling_strategy": place.strategy(self.cluster), "max_restarts": 0}
        actor = self._actor_class.options(**options).remote(self._num_threads)
        slot = MemberSlot(actor, place, beside(actor.identify).remote())
        if (hosting := hosted or self._hosted) is not None:
            # Not waited for: a failure shows in the first call, which queues behind this one.
            slot.hosting = slot.actor.host.remote(*hosting)
        return slot

    def host(self, target: str, *arguments: Any) -> None:
        """Build the object named by `target` in every member and spare, and in every later replacement.

        Raises:
            OrchestrayError: what the first failing member reports.
            MemberLostError: a member died.
        """
        self.gather(self.begin_host(target, *arguments))

    def begin_host(self, target: str, *arguments: Any) -> list[Any]:
        """Start `host` without waiting, and return the Ray references to pass to `gather`."""
        self._hosted = (target, *arguments)
        for slot in (*self.slots, *self.spares):
            slot.hosting = slot.actor.host.remote(*self._hosted)
        return [slot.hosting for slot in self.slots]

    def identify(self) -> list[tuple[str, int, Identity]]:
        """Return (role, rank, identity) of each member and spare that has answered so far, without waiting."""
        return [
            (role, rank, identity)
            for role, slots in self._by_role()
            for rank, slot in enumerate(slots)
            if (identity := slot.answered()) is not None
        ]

    def _by_role(self) -> list[tuple[str, list[MemberSlot]]]:
        reserve = [self._reserve] if self._reserve is not None else []
        joining = self.membership.joining
        return [(self.shape.role, self.slots), ("spare", self.spares), ("reserve", reserve), ("joining", joining)]

    @property
    def places(self) -> list[Place]:
        """Places of the members and spares, and those that are kept for later spares."""
        return [*(slot.place for slot in [*self.slots, *self.spares]), *self._vacant]

    def meet(self) -> None:
        """Form a new process group of all members, and leave the previous one.

        Raises:
            MemberLostError: a member died; the meeting is abandoned for all.
            ClusterError: no backend fits the GPUs that the members were given.
        """
        self.generation += 1
        for slot in self.slots:
            slot.forget_sign()
        opener = next((slot for slot in self.slots if slot.met), self.slots[0])
        rank = self.slots.index(opener)
        host, port = self.gather_one(opener.actor.open_store.remote(), rank)
        meeting = Meeting(self.generation, host, port, self.shape.size, _COLLECTIVE_TIMEOUT_S, self._backend())
        joins = {slot.actor.join.remote(meeting, rank): rank for rank, slot in enumerate(self.slots)}
        lost: dict[int, str] = {}
        try:
            # Stops at the first member that did not join: the others wait for it.
            all_came = all(came for _, came in self._answers(joins))
        except MemberLostError as error:
            lost, all_came = error.lost, False
        if not all_came:
            for slot in self.slots:
                beside(slot.actor.abandon).remote(self.generation)
            raise MemberLostError({**self._dead(), **lost})
        for slot in self.slots:
            slot.met = True

    def _backend(self) -> BackendKind:
        """Return the backend for the members as they are placed now."""
        gpus = self.shape.gpus_per_member
        if not gpus:
            return "gloo"
        identities: list[Identity] = self.gather([slot.identifying for slot in self.slots])
        return choose_backend([Given(gpus, identity.node, identity.gpus) for identity in identities])

    def _dead(self) -> dict[int, str]:
        """Return the cause of death of each dead member, by rank."""
        dead = {}
        for rank, slot in enumerate(self.slots):
            try:
                ray.get(beside(slot.actor.identify).remote(), timeout=_ANSWER_TIMEOUT_S)
            except GetTimeoutError:
                continue  # slow, or still starting
            except LOSSES as error:
                dead[rank] = self.cause(rank, error)
        return dead

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Start a method of every member's hosted object, and return one Ray reference per rank."""
        return [self.call_one(rank, method, *arguments) for rank in range(len(self.slots))]

    def call_one(self, rank: int, method: str, *arguments: Any) -> Any:
        """Start a method of one member's hosted object, and return its Ray reference."""
        return self.slots[rank].actor.call.remote(method, *arguments)

    def control(self, method: str, *arguments: Any) -> list[Any]:
        """Start a method of every hosted object beside its working thread, and return one Ray reference per rank."""
        return [self.control_one(rank, method, *arguments) for rank in range(len(self.slots))]

    def control_one(self, rank: int, method: str, *arguments: Any) -> Any:
        """Start a method of one member's hosted object beside its working thread, and return its Ray reference."""
        return beside(self.slots[rank].actor.control).remote(method, *arguments)

    def nodes(self) -> list[str]:
        """Return the IP address of each member's node, in the order of ranks; wait until all have answered.

        Raises:
            MemberLostError: a member died.
        """
        return [identity.node for identity in self.gather([slot.identifying for slot in self.slots])]

    def whereabouts(self) -> list[Where]:
        """Return the node of each member, in the order of ranks, as Ray reports it now; do not wait for any process."""
        return nodes_of(self.cluster, [slot.place for slot in self.slots])

    def watch(self) -> list[Any]:
        """Return one Ray reference per member that becomes ready, with an error, once the member's process is dead."""
        for slot in self.slots:
            if slot.end is None:
                waiting(slot)
        return [slot.end for slot in self.slots]

    def gather(self, references: Sequence[Any]) -> list[Any]:
        """Wait for one answer per rank; raise a death or a failure as soon as it is seen."""
        answers = dict(self._answers({reference: rank for rank, reference in enumerate(references)}))
        return [answers[rank] for rank in range(len(references))]

    def gather_one(self, reference: Any, rank: int) -> Any:
        """Wait for the answer of one member.

        Raises:
            MemberLostError: a member died.
            OrchestrayError: what the member reports.
        """
        return next(answer for _, answer in self._answers({reference: rank}))

    def _answers(self, rank_of: Mapping[Any, int]) -> Iterator[tuple[int, Any]]:
        """Yield the rank and the answer of each reference as it arrives; raise the same errors as `gather`."""
        pending = list(rank_of)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
            self.while_waiting()
            self.check_places()
            for reference in ready:
                yield rank_of[reference], self._answer(rank_of[reference], reference)
            if unheard := self.unheard({reference: rank_of[reference] for reference in pending}):
                raise MemberLostError({rank_of[reference]: cause for reference, cause in unheard.items()})

    def check_places(self) -> None:
        """Check that every member has its place, starts there, answers and goes on; call this repeatedly while waiting.

        A member is killed that does not start in time, does not answer any more, or is stuck in its work. Its stacks
        are read before. Calls to it then report that it is dead, and `cause` gives the reason.

        Raises:
            PlaceLostError: a member has waited too long for a place in a placement group made by others, whose machine
                is gone.
        """
        room, now_s = self.cluster.room, time.monotonic()
        troubles = {rank: slot.trouble(now_s, self.patience) for rank, slot in enumerate(self.slots)}
        if hung := {rank: reason for rank, reason in troubles.items() if reason is not None}:
            self.save_stacks(list(hung), kill=True)
            for rank, reason in hung.items():
                self.slots[rank].killed_because = reason
                self.slots[rank].kill()
        silent = [slot for slot in self.slots if now_s - slot.made_s >= PLACEMENT_TIMEOUT_S and slot.is_silent]
        is_there = {group: is_created(group) for group in {slot.place.group for slot in silent}}
        for slot in silent:
            if is_there[slot.place.group]:
                slot.kill_if_late(now_s, START_TIMEOUT_S)
            elif room is not None:
                raise PlaceLostError(
                    f"A machine with places of {len(self.slots)} worker(s) is gone, and the cluster had no other place "
                    f"within {PLACEMENT_TIMEOUT_S:g} s. What they did can go on where there are places for all: start "
                    "a machine in its place, or ask for fewer workers (strategy.network)."
                )
            else:
                slot.placed_s = None  # our own: the place is there again once the cluster has a machine for it

    def states(self, now_s: float) -> list[State | None]:
        """Return the state of each member, by rank; None for one that is dead."""
        return [slot.state(now_s) for slot in self.slots]

    def unheard(self, rank_of: Mapping[Any, int]) -> dict[Any, str]:
        """Return the calls that do not end although the member is dead, with the cause of its death.

        Ray ends the calls of a dead process with an error, but once in many deaths some of them stay open for good.

        Args:
            rank_of: rank of the member, by the Ray reference of each open call to it.
        """
        now_s = time.monotonic()
        gone = {rank: slot.death for rank, slot in enumerate(self.slots) if slot.is_unheard(now_s)}
        return {call: self.cause(rank, error) for call, rank in rank_of.items() if (error := gone.get(rank))}

    def is_deadlocked(self) -> bool:
        """Return True if members work, and all that do have waited too long: for each other, so none is to blame."""
        signs = [slot.sign for slot in self.slots if slot.sign is not None]
        return bool(signs) and all(sign.is_waiting and self.patience.is_over(sign) for sign in signs)

    def save_stacks(self, ranks: Sequence[int], *, kill: bool = False) -> None:
        """Hand the stacks of these members to `keep_stacks`, and kill them if wanted; takes at most 20 s."""
        found = {rank: identity for rank in ranks if (identity := self.slots[rank].answered()) is not None}
        for rank, text in zip(found, stacks_of(list(found.values()), kill=kill), strict=True):
            self.keep_stacks(self.shape.role, rank, text)

    def cause(self, rank: int, error: BaseException) -> str:
        """Return the short cause of a member's death, given the error that reports it."""
        return self.slots[rank].killed_because or cause_of(error)

    def _answer(self, rank: int, reference: Any) -> Any:
        try:
            answer = ray.get(reference)
        except LOSSES as error:
            raise MemberLostError({rank: self.cause(rank, error)}) from error
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), OrchestrayError):
                raise cause from error
            raise ClusterError(
                f"Worker {rank} could not be started: {last_line(error)} If its machine lacks orchestray or the "
                "packages of the task, install them there, or let `orchestray submit` bring them."
            ) from error
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def replace(self, rank: int) -> bool:
        """Start a replacement of a lost member, and return True if a warm spare took its rank."""
        lost = self.slots[rank]
        lost.kill()  # it may only look dead: two members with the same rank must never meet
        while self.spares:
            spare = self.spares.pop(0)
            try:
                ray.get(beside(spare.actor.identify).remote(), timeout=_READY_TIMEOUT_S)
            except RayError:
                spare.kill()  # it may only be late, and its place has room for only one
                self._vacant.append(spare.place)
                continue
            self.slots[rank] = spare
            self._vacant.append(lost.place)
            return True
        self.slots[rank] = self._called_up(lost.place) or self.start(lost.place)
        return False

    def keep_reserve(self) -> None:
        """Start a reserve process if there is none yet and no spares were requested.

        Imports take most of the time until a new process can take over from a lost one, so the reserve does them in
        advance. It holds no model and reserves no CPU. It is kept only on a cluster of our own.
        """
        if self._reserve is not None and self._reserve.is_dead:
            self._reserve = None
        if self._reserve is not None or not self.cluster.owned or self.shape.spares or self._hosted is None:
            return
        if self.shape.gpus_per_member:
            return  # the GPU it would get is not known in advance
        actor = self._actor_class.options(num_cpus=0, max_restarts=0).remote(self._num_threads)
        actor.prepare.remote(self._hosted[0])
        self._reserve = waiting(MemberSlot(actor, self.slots[0].place, beside(actor.identify).remote()))

    def _called_up(self, place: Place) -> MemberSlot | None:
        """Turn the reserve into a member at `place`; return None if that is missing or does not answer."""
        slot, self._reserve = self._reserve, None
        if slot is None or self._hosted is None:
            return None
        try:
            ray.get(beside(slot.actor.identify).remote(), timeout=_READY_TIMEOUT_S)
        except RayError:
            slot.kill()
            return None
        slot.place = place
        slot.hosting = slot.actor.host.remote(*self._hosted)
        return slot

    def refill_spares(self) -> None:
        """Start new spares where spares became members or died.

        This is deferred after a recovery, because starting a process would slow it down.
        """
        self._vacant += [spare.place for spare in self.spares if spare.is_dead]
        self.spares = [spare for spare in self.spares if not spare.is_dead]
        while self._vacant:
            self.spares.append(waiting(self.start(self._vacant.pop())))

    def all_answer(self) -> bool:
        """Return True if every process is alive, including spares."""
        slots = [*self.slots, *self.spares]
        try:
            ray.get([beside(slot.actor.identify).remote() for slot in slots], timeout=_ALIVE_TIMEOUT_S)
        except (RayError, GetTimeoutError):
            return False
        return True

    def close(self) -> None:
        """End every process of the gang and release its places."""
        reserve = [self._reserve] if self._reserve is not None else []
        slots = [*getattr(self, "slots", []), *getattr(self, "spares", []), *reserve, *self.membership.joining]
        self.slots, self.spares, self._reserve = [], [], None
        end([slot.actor for slot in slots])
        self.membership.close()
        remove(self._reserved.groups)
