"""A run on GPUs that lose their peers, in virtual time: the driver's own decisions, and NCCL that reports nothing.

Members end where they are killed, and those who wait for them would wait for ever. Only the driver's word ends that: it
learns of a death some time later, and tells the others to abort. They meet again as the next generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.sim.programs import Promise
from orchestray.trainers.driver.control.controller import State, step
from orchestray.trainers.driver.control.decisions import Abort, Decision, Employ, Finish, Record, Replace
from orchestray.trainers.driver.control.events import Done, Event, Lost, StoppedEarly
from support.nccl import GpuCollective, Gpus, in_virtual_time

Train = Callable[[Any, Collective], Any]
"""Trains a state to the end in one generation, and returns what came out."""


class RunOnGpus:
    """A run of `size` members.

    Args:
        seed: seed of what is drawn: the order of events, the deaths, and the time until the driver hears of them.
        size: number of members.
        make: makes the state of a new member.
        train: trains it; raises PeerLostError if another member is lost.
        num_deaths: deaths that happen.
        until_s: virtual seconds within which they happen; an operation takes half a second on average.
        abort: ends what a state waits for beside the collective, as a host of the product does on the driver's word.
    """

    def __init__(
        self,
        seed: int,
        size: int,
        make: Callable[[], Any],
        train: Train,
        *,
        num_deaths: int,
        until_s: float,
        abort: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.gpus = Gpus(seed)
        self._size, self._make, self._train = size, make, train
        self._abort = abort
        self._state = State.of(size, size, max_restarts=100)
        self._ids = list(range(size))
        """Process of each rank; a replacement is another one."""
        self._held = {member: make() for member in self._ids}
        self._num_processes = size
        self._ends: dict[int, Collective] = {}
        self._generation = 0
        self._inbox: list[Event] = []
        self._arrived: Promise[None] = Promise()
        self.results: dict[int, Any] = {}
        self.num_killed = 0
        self.gpus.on_ended = self._kill
        for _ in range(num_deaths):
            self.gpus.at(self.gpus.rng.uniform(0, until_s), self._kill_one)

    def run(self) -> list[Any]:
        """Run to the end; return the result of each rank.

        Raises:
            DeadlockError: some wait for ever.
        """
        self.gpus.start("driver", self._drive)
        with in_virtual_time(self.gpus):
            self.gpus.run()
        return [self.results[rank] for rank in range(self._size)]

    def _drive(self) -> None:
        for unit in self._state.units:
            self._state = self._state.employed(unit)
            self._employ()
        while True:
            if not self._inbox:
                self._arrived = Promise()
                self.gpus.wait_for(self._arrived, "the driver waits")
            self._state, decisions = step(self._state, self._inbox.pop(0))
            for decision in decisions:
                if isinstance(decision, Finish):
                    return
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Abort):
            self.gpus.abandon(self._name)
            for member, end in self._ends.items():
                self.gpus.at(self.gpus.now_s + self.gpus.rng.random(), self._ends_waits(member, end))  # calls take time
        elif isinstance(decision, Replace):
            self._ids[decision.rank] = self._num_processes
            self._held[self._num_processes] = self._make()
            self._num_processes += 1
        elif isinstance(decision, Employ):
            self._employ()
        else:
            assert isinstance(decision, Record), decision

    def _ends_waits(self, member: int, end: Collective) -> Callable[[], None]:
        def abort() -> None:
            end.abort()
            self._abort(self._held[member])

        return abort

    @property
    def _name(self) -> str:
        return f"generation-{self._generation}"

    def _employ(self) -> None:
        self._generation += 1
        self._ends = {}
        for rank, member in enumerate(self._ids):
            self.gpus.start_member(member, self._program(rank, member, self._name), f"process {member} in {self._name}")

    def _program(self, rank: int, member: int, name: str) -> Callable[[], None]:
        def work() -> None:
            try:
                end = self._ends[member] = GpuCollective(self.gpus, self._ids, member, path=name)
                if self.gpus.is_abandoned(name):  # a gang of which a member is lost while it meets gives it no work
                    end.abort()
                self.results[rank] = self._train(self._held[member], end)
            except PeerLostError:
                self._tell(StoppedEarly(rank, explained=False))
            else:
                self._tell(Done(rank))

        return work

    def _tell(self, event: Event) -> None:
        self._inbox.append(event)
        if not self._arrived.done():
            self._arrived.set_result(None)

    def _kill_one(self) -> None:
        self.num_killed += self._kill(self._ids[self.gpus.rng.randrange(self._size)])

    def _kill(self, member: int) -> bool:
        if not self.gpus.kill_member(member):
            return False  # it has ended already
        rank = self._ids.index(member)
        self._ends.pop(member, None)
        self.gpus.at(self.gpus.now_s + 3 * self.gpus.rng.random(), lambda: self._tell(Lost(rank, "killed")))
        return True
