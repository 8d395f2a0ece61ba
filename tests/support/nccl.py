"""NCCL's rules in virtual time: what would deadlock, or go on with undefined values, on GPUs is found on a CPU.

The rules, as torch's `ProcessGroupNCCL` follows them:

- An operation is put on its communicator's stream and runs when all earlier ones of that stream have ended. A receive
  holds its stream until its send runs, a send may hold its stream until its receive runs, and a collective holds it
  until all members have come to it.
- Sends and receives between `_start_coalescing` and `_end_coalescing` are one operation: they run together, on the
  communicator of all members.
- A send or receive alone uses a communicator of the pair, which is made when it is first needed (`eager=False`), or
  the communicator of all, where it is serialised with every other operation (`eager=True`).
- Members first meet in a store, which can be called off. Then they make the communicator, which blocks each until all
  others are there too, and which nothing calls off.
- `wait` orders the member's later operations behind this one, whichever thread starts them. It never fails: not if a
  peer is dead, and not after an abort, when the result is undefined (here not-a-number).

The programs are the product's own code: each member is a function in a thread of which exactly one runs at a time.
Which one runs next, how long an operation takes, and which sends are buffered is drawn from the seed.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from orchestray.platform.comm.allreduce import execute
from orchestray.platform.comm.channel.base import DEFAULT_TIMEOUT_S, Channel, ChannelTimeoutError
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.sim.event_loop import DeadlockError
from orchestray.platform.sim.network import Link, SimulatedNetwork
from orchestray.platform.sim.programs import Promise, SimulatedProgram, VirtualHandle
from orchestray.trainers.layout import groups
from orchestray.trainers.sync.local import answering

FOR_EVER = float("inf")
MAKING_S = 20.0
"""Virtual seconds after which a member that waits for a communicator to be made ends: see `ended_if_late`."""


class MismatchError(RuntimeError):
    """Raised when members call different operations at the same place of a communicator's order."""


@dataclass(eq=False)
class Part:
    """One send, one receive, or one member's part of a collective."""

    kind: str
    """`send`, `receive`, or the name and parameters of a collective."""
    peer: int
    """Rank of the other member; -1 for a collective."""
    take: Callable[[], Any]
    """Returns a copy of what the member gives."""
    put: Callable[[Any], None]
    """Writes the result."""
    result: Any = None
    is_matched: bool = False


@dataclass(eq=False)
class Operation:
    """An operation on a stream of a member: a collective, or sends and receives that run together."""

    member: int
    parts: list[Part]
    behind: list[Operation]
    """Operations that the member had waited for when it started this one."""
    number: int
    """Number of operations that were started before it, and this one."""
    promise: Promise[None] = field(default_factory=Promise)
    state: Literal["queued", "running", "done"] = "queued"

    def __str__(self) -> str:
        return " + ".join(part.kind if part.peer < 0 else f"{part.kind} {part.peer}" for part in self.parts)


class Communicator:
    """A communicator: a stream on each of its members, and the operations that have yet to find their partners."""

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, tuple(members)
        self.group = name.split(" ", maxsplit=1)[0].split("/", maxsplit=1)[0]
        """Name of the group that is left and called off as a whole."""
        self.streams: dict[int, deque[Operation]] = {member: deque() for member in members}
        self.came: set[int] = set()
        self.arrived: Promise[None] = Promise()
        """Done once all members have come to the store."""
        self.makes: set[int] = set()
        """Members that are making it."""
        self.made: Promise[None] = Promise()
        self.rounds: dict[int, dict[int, tuple[Operation, Part]]] = {}
        """Collectives that have begun to run, by their number and then by member."""
        self.num_rounds = Counter[int]()
        self.is_broken = False
        """True once a member has died or left: nothing that begins then ever ends."""
        self.sent: dict[tuple[int, int], deque[Any]] = {}
        """Contents that have been sent and not received, by sender and receiver."""
        self.wanted: dict[tuple[int, int], deque[tuple[Operation, Part]]] = {}


class Gpus(SimulatedNetwork):
    """Members with a GPU each, in virtual time; their channels, which use no GPU, are those of the network.

    Args:
        seed: seed of everything that is drawn.
        eager: True if a group makes its communicator when it is connected, as it does if it knows its device.
        room: number of operations that a GPU runs at once, on whatever communicators: kernels that wait for others hold
            their place, so that members with different orders may wait for each other; None: all.
    """

    def __init__(self, seed: int = 0, *, eager: bool = True, room: int | None = None) -> None:
        super().__init__(Link(latency_s=0.1))
        self.eager = eager
        self._opened: dict[str, tuple[Channel, Channel]] = {}
        self._both_came: dict[str, Promise[None]] = {}
        self._channels: dict[int, list[Channel]] = {}
        """Ends of channels of each member."""
        self._room = room
        self._num_running = Counter[int]()
        self._num_posted = 0
        self.rng = random.Random(seed)
        self.communicators: dict[str, Communicator] = {}
        self.deadlock: str | None = None
        self.mismatch: str | None = None
        self.waited: dict[int, list[Operation]] = {}
        """Operations that the streams of each member wait for."""
        self._of: dict[SimulatedProgram, int] = {}
        self._abandoned: set[str] = set()
        self.on_ended: Callable[[int], object] = self.kill_member
        """Called with a member whose process ends as a communicator was not made in time."""
        self.num_ended = 0
        """Number of processes that ended so."""

    # -- programs ------------------------------------------------------------------------------------------------------

    def resume(self, replica: SimulatedProgram, error: BaseException | None) -> None:
        """Queue the replica's turn anywhere among those that are ready."""
        replica.resumed()
        self._ready.insert(self.rng.randrange(len(self._ready) + 1), (replica, error))

    def wait_for(self, promise: Promise[Any], why: str) -> None:
        """Block the running program until the promise is done."""
        VirtualHandle(promise, why, FOR_EVER, self).wait()

    def run(self) -> float:
        """Run until all programs have ended.

        Raises:
            DeadlockError: some wait for ever; it names them, and the operations that hold the streams.
            MismatchError: members called different operations.
        """
        try:
            return super().run()
        finally:
            if self.mismatch is not None:
                raise MismatchError(self.mismatch)
            if self.deadlock is not None:
                raise DeadlockError(self.deadlock)

    def _end_waits(self, waiting: list[SimulatedProgram]) -> None:
        if self.deadlock is None:
            held = [
                f"member {member} of {communicator.name}: {stream[0]} ({stream[0].state}), {len(stream) - 1} behind it"
                for communicator in self.communicators.values()
                for member, stream in communicator.streams.items()
                if stream
            ]
            self.deadlock = "\n".join([", ".join(program.name for program in waiting) + " wait for ever", *held])
        for program in waiting:
            program.kill()

    # -- communicators -------------------------------------------------------------------------------------------------

    def communicator(self, name: str, members: Sequence[int], member: int) -> Communicator:
        """Return a communicator; its first use by a member blocks until all have come."""
        if name not in self.communicators:
            self.communicators[name] = Communicator(name, members)
            if self.communicators[name].group in self._abandoned:
                self.communicators[name].arrived.set_exception(PeerLostError("the meeting was called off"))
        found = self.communicators[name]
        if member not in found.came:
            found.came.add(member)
            if len(found.came) == len(found.members) and not found.arrived.done():
                found.arrived.set_result(None)
        if not found.made.done():
            self.wait_for(found.arrived, f"member {member} waits for all who make {name}")
            self._make(found, member)
        return found

    def _make(self, communicator: Communicator, member: int) -> None:
        """Wait until all members make it; if one of them is gone, this one's process ends after a time."""
        if member not in communicator.makes:
            self.sleep(self.rng.random()).wait()
            communicator.makes.add(member)
            if len(communicator.makes) == len(communicator.members):
                communicator.made.set_result(None)
        try:
            if not communicator.made.done():
                VirtualHandle(communicator.made, f"member {member} makes {communicator.name}", MAKING_S, self).wait()
        except ChannelTimeoutError:
            self.num_ended += 1
            self.at(self.now_s, lambda: self.on_ended(member))
            self.wait_for(Promise(), f"member {member} ends")

    def open_channel(self, store: str, rank: int, **_: Any) -> Channel:
        """Return an end of a channel between two members once both have come, as `nearest.open_channel` does.

        Raises:
            ChannelTimeoutError: the other did not come in time.
        """
        if store not in self._opened:
            self._opened[store] = self.pair(f"{store}, first end", f"{store}, second end")
            self._both_came[store] = Promise()
            VirtualHandle(self._both_came[store], f"{store} is opened", DEFAULT_TIMEOUT_S, self).wait()
        else:
            self._both_came[store].set_result(None)
        end = self._opened[store][rank]
        self._channels.setdefault(self.member_of_running(), []).append(end)
        return end

    # -- operations ----------------------------------------------------------------------------------------------------

    def post(self, communicator: Communicator, member: int, parts: list[Part]) -> Operation:
        """Put an operation on the stream of a member."""
        behind = [earlier for earlier in self.waited.get(member, []) if earlier.state != "done"]
        self._num_posted += 1
        operation = Operation(member, parts, behind, self._num_posted)
        communicator.streams[member].append(operation)
        for earlier in behind:
            earlier.promise.add_done_callback(lambda _: self._advance(communicator, member))
        self._advance(communicator, member)
        return operation

    def _advance(self, communicator: Communicator, member: int) -> None:
        stream = communicator.streams[member]
        if not stream or stream[0].state != "queued" or any(one.state != "done" for one in stream[0].behind):
            return
        operation = stream[0]
        if self._room is not None and self._num_running[member] >= self._room:
            return
        self._num_running[member] += 1
        operation.state = "running"
        if communicator.is_broken:
            return
        for part in operation.parts:
            self._run_part(communicator, operation, part)

    def _run_part(self, communicator: Communicator, operation: Operation, part: Part) -> None:
        member = operation.member
        rank = communicator.members.index(member)
        if part.kind == "send":
            way = (rank, part.peer)
            content = part.take()
            if waiting := communicator.wanted.get(way):
                receiver, receive = waiting.popleft()
                self._matched(communicator, receiver, receive, content)
                self._matched(communicator, operation, part, None)
            else:
                is_buffered = self.rng.random() < 0.5
                held = None if is_buffered else (operation, part)
                communicator.sent.setdefault(way, deque()).append((content, held))
                if is_buffered:
                    self._matched(communicator, operation, part, None)
        elif part.kind == "receive":
            way = (part.peer, rank)
            if sent := communicator.sent.get(way):
                content, held = sent.popleft()
                self._matched(communicator, operation, part, content)
                if held is not None:
                    self._matched(communicator, *held, None)
            else:
                communicator.wanted.setdefault(way, deque()).append((operation, part))
        else:
            self._come(communicator, operation, part)

    def _come(self, communicator: Communicator, operation: Operation, part: Part) -> None:
        number = communicator.num_rounds[operation.member]
        communicator.num_rounds[operation.member] += 1
        come = communicator.rounds.setdefault(number, {})
        come[operation.member] = operation, part
        if len(come) < len(communicator.members):
            return
        del communicator.rounds[number]
        kinds = {member: one.kind for member, (_, one) in come.items()}
        if len(set(kinds.values())) > 1:
            self.mismatch = self.mismatch or f"operation {number} of {communicator.name} is {kinds}"
            return  # all wait for ever, which ends their programs
        given = [come[member][1].take() for member in communicator.members]
        for one, its in come.values():
            self._matched(communicator, one, its, given)

    def _matched(self, communicator: Communicator, operation: Operation, part: Part, content: Any) -> None:
        def end() -> None:
            if operation.state == "done":
                return  # aborted meanwhile
            part.put(content)
            part.is_matched = True
            if all(each.is_matched for each in operation.parts):
                self._done(communicator, operation)

        self.at(self.now_s + self.rng.random(), end)

    def _done(self, communicator: Communicator, operation: Operation) -> None:
        was_running = operation.state == "running"
        operation.state = "done"
        communicator.streams[operation.member].remove(operation)
        operation.promise.set_result(None)
        self._num_running[operation.member] -= was_running
        own = [each for each in self.communicators.values() if each.streams.get(operation.member)]
        for each in sorted(own, key=lambda each: each.streams[operation.member][0].number):  # as they were started
            self._advance(each, operation.member)

    def abort(self, name: str, member: int) -> None:
        """End all operations of a member on the communicators of a group: their results are undefined."""
        for communicator in self.communicators.values():
            if communicator.name.split(" ")[0] != name or not communicator.made.done():
                continue
            communicator.is_broken |= member in communicator.streams
            for operation in list(communicator.streams.get(member, ())):
                for part in operation.parts:
                    part.put(UNDEFINED)
                if operation.state != "done":
                    self._done(communicator, operation)

    def abandon(self, name: str) -> None:
        """Call off the meetings of a group: members that wait for others there lose them."""
        self._abandoned.add(name)
        for communicator in self.communicators.values():
            if communicator.group == name and not communicator.arrived.done():
                communicator.arrived.set_exception(PeerLostError("the meeting was called off"))

    def is_abandoned(self, name: str) -> bool:
        """Return True if the meetings of a group were called off."""
        return name in self._abandoned

    def kill_member(self, member: int) -> bool:
        """End the programs of a member where they are; what it has started on its GPU stays under way for ever.

        Those at the other ends of its channels may notice, as sockets do, or not, as if its machine were gone.

        Returns:
            True if there was one to end.
        """
        running = [program for program, owner in self._of.items() if owner == member and program.finished_s is None]
        if not running:  # the driver is not informed, so nothing would end what others wait for
            return False
        for program in running:
            program.kill()
        for communicator in self.communicators.values():
            communicator.is_broken |= member in communicator.streams
        if self.rng.random() < 0.5:
            for end in self._channels.get(member, []):
                self.at(self.now_s + self.rng.random(), end.close)
        return True

    def member_of_running(self) -> int:
        """Return the member whose program runs now."""
        assert self._moving is not None
        return self._of[self._moving]

    def start_member(self, member: int, program: Callable[[], Any], name: str = "") -> SimulatedProgram:
        """Start a program of a member."""
        started = self.start(name or f"member {member}", program)
        self._of[started] = member
        return started


UNDEFINED: Any = object()


class Work:
    """The handle of an operation. Its `wait` returns when the operation has ended, however it has ended."""

    def __init__(self, gpus: Gpus, operation: Operation) -> None:
        self._gpus, self._operation = gpus, operation

    def wait(self, *_: object) -> bool:
        gpus, operation = self._gpus, self._operation
        waited = gpus.waited.setdefault(operation.member, [])
        waited[:] = [one for one in waited if one.state != "done"]
        if operation.state != "done":
            waited.append(operation)
            gpus.wait_for(operation.promise, f"member {operation.member} waits for {operation}")
        return True


class Group:
    """A member's end of a process group, with the operations of `ProcessGroupNCCL`."""

    supports_coalescing = True

    def __init__(self, gpus: Gpus, name: str, members: Sequence[int], member: int) -> None:
        self._gpus, self._name, self._members, self._member = gpus, name, tuple(members), member
        self._together: list[Part] | None = None
        if gpus.eager:
            self._all()

    def rank(self) -> int:
        return self._members.index(self._member)

    def size(self) -> int:
        return len(self._members)

    def abort(self) -> None:
        self._gpus.abort(self._name, self._member)

    def allreduce(self, tensors: Sequence[Tensor], operation: Any) -> Work:
        (tensor,) = tensors
        is_sum = operation == dist.ReduceOp.SUM
        combine = (lambda rows: sum(rows[1:], rows[0].clone())) if is_sum else (lambda rows: torch.stack(rows).amax(0))
        kind = f"all-reduce {'sum' if is_sum else 'max'} {tensor.dtype} {tensor.numel()}"
        return self._collective(kind, tensor, [tensor], lambda rows: [combine(rows)])

    def allgather(self, rows: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> Work:
        kind = f"all-gather {own[0].dtype} {own[0].numel()}"
        return self._collective(kind, own[0], rows[0], lambda given: given)

    def _allgather_base(self, whole: Tensor, part: Tensor) -> Work:
        kind = f"all-gather {part.dtype} {part.numel()}"
        return self._collective(kind, part, [whole], lambda given: [torch.cat([row.view(-1) for row in given])])

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> Work:
        rank, size = self.rank(), self.size()

        def own(given: list[Tensor]) -> list[Tensor]:
            return [sum((row.view(size, -1)[rank] for row in given[1:]), given[0].view(size, -1)[rank].clone())]

        return self._collective(f"reduce-scatter {whole.dtype} {whole.numel()}", whole, [part], own)

    def broadcast(self, raw: Tensor, source: int) -> Work:
        kind = f"broadcast from {source} {raw.dtype} {raw.numel()}"
        if self.rank() == source:  # its memory is only read
            return self._collective(kind, raw, [], lambda _: [])
        return self._collective(kind, raw, [raw], lambda given: [given[source]])

    def barrier(self) -> Work:
        return self._collective("barrier", torch.zeros(0), [], lambda _: [])

    def send(self, tensors: Sequence[Tensor], peer: int, _tag: int) -> Work:
        (tensor,) = tensors
        return self._point_to_point(Part("send", peer, tensor.clone, lambda _: None))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        if tag:  # by which a collective closes the connections of gloo: NCCL has no tags, and no such way
            raise RuntimeError("NCCL has no tags")
        return self._point_to_point(Part("receive", peer, lambda: None, lambda content: _write(tensor, content)))

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> Work:
        parts, self._together = self._together or [], None
        return Work(self._gpus, self._gpus.post(self._all(), self._member, parts))

    def _point_to_point(self, part: Part) -> Any:
        gpus = self._gpus
        if self._together is not None:
            self._together.append(part)
            return None
        if gpus.eager:
            return Work(gpus, gpus.post(self._all(), self._member, [part]))
        pair = sorted([self.rank(), part.peer])
        members = [self._members[rank] for rank in pair]
        communicator = gpus.communicator(f"{self._name} {pair[0]}:{pair[1]}", members, self._member)
        part.peer = pair.index(part.peer)
        return Work(gpus, gpus.post(communicator, self._member, [part]))

    def _collective(
        self, kind: str, gives: Tensor, into: Sequence[Tensor], result: Callable[[list[Tensor]], list[Tensor]]
    ) -> Work:
        def put(given: Any) -> None:
            values = [UNDEFINED] * len(into) if given is UNDEFINED else result(given)
            for tensor, value in zip(into, values, strict=True):
                _write(tensor, value)

        part = Part(kind, -1, gives.clone, put)
        return Work(self._gpus, self._gpus.post(self._all(), self._member, [part]))

    def _all(self) -> Communicator:
        return self._gpus.communicator(self._name, self._members, self._member)


def _write(tensor: Tensor, value: Any) -> None:
    with torch.no_grad():
        if value is not UNDEFINED:
            tensor.view(-1).copy_(value.view(-1))
        elif tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.view(-1).view(torch.uint8).random_()


class GpuCollective(Collective):
    """A collective whose groups, siblings and subgroups follow NCCL's rules."""

    def __init__(self, gpus: Gpus, members: Sequence[int], member: int, *, path: str = "group") -> None:
        self.gpus, self._all_members, self._member = gpus, tuple(members), member
        super().__init__(Group(gpus, path, members, member), path=path)

    @property
    def has_native_scatter(self) -> bool:
        """True: NCCL has both."""
        return True

    def prefix_store(self, name: str) -> Any:
        """Return the name of what connects here: there is no store."""
        return f"{self._path}/{name}"

    def _connect_relative(self, path: str, ranks: list[int]) -> Collective:
        return GpuCollective(self.gpus, [self._all_members[rank] for rank in ranks], self._member, path=path)


class _Thread:
    """A thread that product code starts beside its member: another program of the member."""

    def __init__(
        self, gpus: Gpus, *, target: Callable[..., None], name: str, daemon: bool, args: Sequence[Any] = ()
    ) -> None:
        self._gpus, self._target, self._name, self._daemon = gpus, partial(target, *args), name, daemon
        self._ended: Promise[None] = Promise()

    def start(self) -> None:
        member = self._gpus.member_of_running()
        started = self._gpus.start_member(member, self._target, f"{self._name} of member {member}")
        started.on_end(lambda _: self._ended.set_result(None))

    def join(self) -> None:
        if not self._ended.done():
            self._gpus.wait_for(self._ended, f"the end of {self._name}")


class _Future(Promise[Any]):
    """A future whose result is waited for in virtual time."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self._gpus = gpus

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._gpus.wait_for(self, "the result of a thread")
        return super().result(timeout)


@contextlib.contextmanager
def in_virtual_time(gpus: Gpus) -> Iterator[None]:
    """Let the threads beside a member be programs in virtual time, and let members open simulated channels.

    The threads are those of scheduled all-reduces, and of replicas that serve the centre of elastic averaging or answer
    neighbours.
    """
    threads = SimpleNamespace(
        Thread=partial(_Thread, gpus), Lock=threading.Lock, current_thread=threading.current_thread
    )
    with (
        mock.patch.object(execute, "threading", threads),
        mock.patch.object(execute, "Future", partial(_Future, gpus)),
        mock.patch.object(groups, "open_channel", gpus.open_channel),
        mock.patch.object(answering, "threading", threads),
        mock.patch.object(answering, "GlooChannel", gpus.open_channel),
    ):
        yield


def run_on_gpus(
    size: int,
    member: Callable[[Collective], Any],
    *,
    seed: int = 0,
    eager: bool = True,
    room: int | None = None,
) -> tuple[list[Any], Gpus]:
    """Run `member(collective)` on `size` GPUs; return the results in rank order, and the GPUs.

    Raises:
        DeadlockError: some wait for ever.
        MismatchError: members call different operations.
    """
    gpus = Gpus(seed, eager=eager, room=room)

    def program(rank: int) -> Callable[[], Any]:
        return lambda: member(GpuCollective(gpus, range(size), rank))

    programs = [gpus.start_member(rank, program(rank)) for rank in range(size)]
    with in_virtual_time(gpus):
        gpus.run()
    return [each.result for each in programs], gpus
