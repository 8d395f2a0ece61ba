"""A server of a shard, with one thread per worker channel, one lock, and answers that wait for the followers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.errors import OrchestrayError, TrainingError
from orchestray.trainers.ps.protocol.assignments import Compute, Wait
from orchestray.trainers.ps.protocol.load_balancing import Stopwatch
from orchestray.trainers.ps.protocol.messages import (
    ANSWER,
    RequestServer,
    finish,
    flat_state,
    num_bytes_of,
    result,
    start,
    tensors_of,
)
from orchestray.trainers.ps.protocol.requests import (
    DENSE,
    NOBODY,
    Answer,
    Asking,
    Entry,
    Header,
    Pull,
    Request,
    Stop,
)
from orchestray.trainers.ps.server.events import EventQueue, TrafficCounter
from orchestray.trainers.ps.server.followers import Follower, Followers, SupersededError
from orchestray.trainers.ps.server.snapshots import Versions
from orchestray.trainers.ps.server.state_machine import Listener, Machine

_PLACE_BYTES = 4
"""Bytes of the place of a value that has changed."""


@dataclass
class Asker:
    """The sender of a request, and what goes with it."""

    worker: int | None
    """None: it sent no `hello`."""
    channel: Channel
    asked: Handle[Message]
    """Its next request, which it may send, or its death, before this one is answered."""
    targets: tuple[Tensor, ...] = ()
    """Its memory, where it wants the parameters."""
    reusable: Tensor | None = None
    """Memory of its gradient, if that is the server's own."""
    sent: Tensor | None = None
    """The server's values, which must not change until they have been sent to it."""
    found: Tensor | None = None
    """The server's values, if it reads them in place."""


class ShardServer(RequestServer):
    """A server that applies the requests of workers to a state machine and answers them.

    An answer is sent once every follower has the entry that it reports, and all entries before it. So a follower that
    replaces a lost server knows at least what any worker has been sent. A lost follower is dropped, and the listener is
    notified. A server that was replaced while it lived ends every connection.
    """

    run_state: Callable[[], dict[str, Any]] = dict
    """Returns the state of the run that a snapshot's answer carries, as JSON values."""

    def __init__(
        self,
        machine: Machine,
        followers: Sequence[Follower] = (),
        listener: Listener | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            machine: state machine; it belongs to the server from now on.
            followers: backups and logs; `follow` adds more at any time.
            listener: receives the events of the machine and `follower_lost`, in order, while the server is not locked.
                Those of a step have the `traffic` since the one before (`TrafficCounter.take`). Default: the machine's.
            clock: returns seconds. It times the workers where the sizes of their shares follow their speed.
        """
        super().__init__()
        self._machine = machine
        self.events = EventQueue(machine.listener if listener is None else listener)
        machine.listener = self._note
        self._followers = Followers(
            self._changed, lambda lost: self._note({"event": "follower_lost", "name": lost.name}), self._hang_up
        )
        self._spare: list[Tensor] = []
        """Unused memory of the shard's size."""
        machine.shard.batches.reuse = self._reuse
        self._versions = Versions(machine.shard)
        self._serving: dict[int, Channel] = {}
        """Newest channel of each worker."""
        self._tally = TrafficCounter()
        coordinator = machine.coordinator
        is_timed = coordinator is not None and coordinator.settings.balance == "speed"
        self._stopwatch = Stopwatch(clock) if is_timed else None
        for follower in followers:
            self.follow(follower)

    # -- calls of the host ---------------------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> int | None:
        """Answer a worker until its channel ends. Blocks.

        On the lead the worker then leaves the coordinator, unless it has come back over another channel.

        Returns:
            The worker's number; None if it sent no `hello`.
        """
        with self._changed:
            self._tally.open(channel)
        return super().serve(channel)

    def follow(self, follower: Follower) -> None:
        """Add a follower, which starts from the present state."""
        with self._changed:
            self._followers.add(follower, self._machine)
        self.events.deliver()

    def forget(self, worker: int) -> None:
        """Hand out again what a worker holds that is not connected and will not come back (after `promote`)."""
        self.change(Entry(worker=worker, leave=True))

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """End the run with a checkpoint, as in `Coordinator.request_stop`."""
        self.change(Entry(stop=Stop(reason, validate)))

    def resize(self, num_shares: int) -> None:
        """Cut the batches that have not begun into `num_shares` shares."""
        self.change(Entry(resize=num_shares))

    def dismiss(self, worker: int) -> None:
        """Have a worker leave once it has done what it holds."""
        self.change(Entry(worker=worker, dismiss=True))

    def change(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> Answer:
        """Apply an entry; return its answer once every follower has the entry."""
        with self._changing():
            return self._apply(entry, tensors)

    def snapshot(self, step: int | None = None) -> dict[str, Tensor]:
        """Return copies of the shard's state by name.

        The names are `values` (flat); "optimizer/<parameter>:<start>.<slot>" for the optimizer; "buffers/floats" and
        "buffers/integers" for the buffers; and those of `residuals` for the state of workers' compressors.

        Args:
            step: step of the barrier, where an update is one of a batch; its update is made first.
        """
        with self._changed:
            if step is not None and step > self._machine.shard.version:
                self._apply(Entry(advance=step), ())
            state = self._machine.shard.tensors()
            if self._machine.residuals is not None:
                state |= self._machine.residuals.tensors()
            return {name: tensor.detach().clone() for name, tensor in state.items()}

    @property
    def machine(self) -> Machine:
        """The state machine that is served."""
        return self._machine

    @property
    def version(self) -> int:
        """Number of updates made."""
        return self._machine.shard.version

    def close(self) -> None:
        """End every connection and every follower."""
        self._hang_up()  # before the followers: an answer must not be sent that no follower has
        self._followers.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _serve_one(self, channel: Channel, worker: int | None, header: Header[Request]) -> Handle[Message]:
        request = header.sections
        if request.hello is not None and worker is not None:
            with self._changed:
                self._serving[worker] = channel
        tensors, reusable = self._received(channel, header)
        asker = Asker(
            worker,
            channel,
            asked=channel.irecv(),
            targets=tuple([channel.borrow(place) for place in header.wanted]),
            reusable=reusable,
        )
        try:
            try:
                for report in request.relay:
                    self._compare(report.hello)
                answer, reply = self._answer(request, asker, tensors)
            except ChannelClosedError:
                raise
            except OrchestrayError as error:
                answer, reply = Answer(error=str(error)), []
            if answer.placed:
                channel.count_lent(sent_bytes=num_bytes_of(asker.targets))
            if asker.found is not None:
                answer.found = self._versions.show(channel, asker.found)
            finish(start(channel, ANSWER, answer, reply))
        finally:
            if asker.sent is not None:
                with self._changed:
                    self._machine.shard.give_back(asker.sent)
        return asker.asked

    def _received(self, channel: Channel, header: Header[Request]) -> tuple[list[Tensor], Tensor | None]:
        """Return the tensors of a request, with a dense gradient whole even if it came in pieces.

        And the memory of the gradient, if that is the server's own. A gradient can stay in the worker's memory unless
        the shard changes it: the worker may send it again if this server is lost.
        """
        push, shard = header.sections.push, self._machine.shard
        if push is None or push.encoding != DENSE:
            return tensors_of(channel, header), None
        if push.pieces == 1 and header.lent and header.lent[0] is not None and not shard.changes_gradients:
            return tensors_of(channel, header, borrows=True), None
        with self._changed:
            memory = self._spare.pop() if self._spare else torch.empty_like(shard.values)
        sizes = [piece.num_elements for piece in shard.slices]
        into = [memory] if push.pieces == 1 else list(memory.split_with_sizes(sizes))
        if header.num_tensors > push.pieces:
            into += shard.room_for_buffers(push.origin.parts[0].step)
        return [memory, *tensors_of(channel, header, into)[push.pieces :]], memory

    def _reuse(self, memory: Tensor) -> None:
        """Keep the memory of a gradient for another; the server is locked."""
        if memory.shape == self._machine.shard.values.shape and len(self._spare) < len(self._serving):
            self._spare.append(memory)

    def _answer(self, request: Request, asker: Asker, tensors: Sequence[Tensor]) -> tuple[Answer, list[Tensor]]:
        """Return the answer and its tensors."""
        reply: list[Tensor] = []
        worker, answer = asker.worker, Answer()
        is_of_checkpoint = request.snapshot is not None or request.run_state
        with self._changing(wait=is_of_checkpoint):
            if request.tally is not None:
                self._tally.add(request.tally)
            if changes := request.changes:
                entry = Entry(worker=NOBODY if worker is None else worker, **changes)
                if self._stopwatch is not None and worker is not None:
                    entry = self._stopwatch.timed(entry)
                answer = self._apply(entry, tensors)
            if asker.reusable is not None and not self._machine.keeps_gradient:
                self._reuse(asker.reusable)
            if request.next is not None:
                self._order(request.next, asker, answer)
            if request.residual and worker is not None and self._machine.residuals is not None:
                kept, answer.heard = self._machine.residuals.of(worker)
                answer.names, reply = flat_state(kept)
            if request.snapshot is not None:
                answer.names, reply = flat_state(self.snapshot(request.snapshot.step))
            if request.watch is not None:
                answer.is_taken = self._taken(request.watch, asker)
            if request.pull is not None:
                reply = self._pulled(request.pull, asker, answer)
        if is_of_checkpoint:
            answer.run_state = json.dumps(self.run_state())
        return answer, reply

    def _order(self, asking: Asking, asker: Asker, answer: Answer) -> None:
        """Enter the worker's next order in the answer, once there is one."""
        worker = asker.worker
        if answer.order is None:
            again = Entry(worker=NOBODY if worker is None else worker, next=asking)
            found = self._until(lambda: self._try(again), asker.asked)
            answer.order, answer.more = (found.order, found.more) if found else (Wait(), ())
        if self._stopwatch is not None and worker is not None and isinstance(answer.order, Compute):
            self._stopwatch.start(worker, answer.order.order_id)

    def _taken(self, order_id: int, asker: Asker) -> bool:
        """Wait until an order is not the worker's any more; return False if it sends another request before that."""
        worker = NOBODY if asker.worker is None else asker.worker
        return bool(self._until(lambda: not self._machine.lead.holds(worker, order_id), asker.asked))

    @torch.no_grad()
    def _pulled(self, pull: Pull, asker: Asker, answer: Answer) -> list[Tensor]:
        """Return the parameters, or leave them where the worker can read them; the server is locked.

        They are written into the worker's memory, or stay in the server's if the worker says which version it reads.
        """
        shard = self._machine.shard
        if shard.needs(pull.min_version):
            self._apply(Entry(advance=pull.min_version), ())
            if shard.needs(pull.min_version):  # all servers have every share of a batch before any worker hears of it
                raise TrainingError(
                    f"worker {asker.worker} wants the parameters after step {pull.min_version}, and a share of step "
                    f"{shard.version + 1} never came here"
                )
        answer.version = shard.version
        if pull.newer_than is not None and answer.version <= pull.newer_than:
            return []
        held = [shard.values] if shard.buffers is None else [shard.values, shard.buffers.floats, shard.buffers.integers]
        if pull.since is not None:
            return self._changes(pull.since, answer, held)
        if not asker.targets:
            asker.sent = shard.lend()
            return [asker.sent, *(buffer.clone() for buffer in held[1:])]
        answer.placed = True
        if pull.reads is None:
            self._versions.end(asker.channel, reads_on=False)  # it asks for a copy
        else:
            self._versions.settle(asker.channel, pull.reads)
            asker.found = self._versions.lend(asker.channel)
        for target, tensor in list(zip(asker.targets, held, strict=True))[0 if asker.found is None else 1 :]:
            target.copy_(tensor)
        return []

    def _changes(self, since: int, answer: Answer, held: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the values that have changed since a version, with their places, or of all if that is less.

        Args:
            since: the version.
            answer: answer, which says which of the two it is.
            held: values of the shard, and its buffers.
        """
        values, *buffers = held
        places = self._machine.shard.changed_since(since)
        if places is None or places.numel() * (_PLACE_BYTES + values.element_size()) >= values.nbytes:
            return [tensor.clone() for tensor in held]
        answer.is_sparse = True
        found = values.index_select(0, places.to(values.device))
        return [places.to(torch.int32), found, *(buffer.clone() for buffer in buffers)]

    # -- events and entries ------------------------------------------------------------------------------------------

    def _note(self, event: dict[str, Any]) -> None:
        """Take note of an event for the listener; the server is locked."""
        self.events.put({**event, "traffic": self._tally.take()} if event["event"] == "step" else event)

    @contextmanager
    def _changing(self, *, wait: bool = False) -> Iterator[None]:
        """Lock the server; then wait until all followers have what was applied, and deliver the events.

        Args:
            wait: True to return only once the listener has received them.
        """
        with self._changed:
            yield
            unsafe = dict(self._followers.unsafe)
        if unsafe:
            self._followers.wait(unsafe)
        self.events.deliver(wait=wait)

    def _apply(self, entry: Entry, tensors: Sequence[Tensor]) -> Answer:
        if self._followers.present:
            self._followers.tell(entry, tensors)
        try:
            return self._machine.apply(entry, tensors)
        finally:
            self._changed.notify_all()

    def _try(self, again: Entry) -> Answer | None:
        """Apply a request for orders; return None if there is none yet."""
        answer = self._machine.apply(again)
        if answer.order is None and not (answer.flush or any(answer.orders)):
            return None  # nothing has changed, so the followers need no entry
        self._followers.tell(again, ())
        self._changed.notify_all()
        return answer

    def _until(self, ready: Callable[[], Any], asked: Handle[Message]) -> Any:
        """Wait, locked, until `ready` returns something true, and return it.

        Return a false value if the worker sends another request first. Raises ChannelClosedError if the worker is lost.
        """
        found = ready()
        if not found:
            asked.future.add_done_callback(self._wake)
        while not found and not asked.done():
            self._changed.wait()
            found = ready()
        if not found:
            result(asked)
        return found

    def _gone(self, worker: int | None, channel: Channel) -> None:
        with self._changed:
            self._tally.end(channel)
            is_newest = worker is not None and self._serving.get(worker) is channel
            # A worker that comes back may still push what it computes; pushes of one that has left are refused.
            self._versions.end(channel, reads_on=not is_newest)
            if worker is None or not is_newest:
                return
            del self._serving[worker]
            if self._stopwatch is not None:
                self._stopwatch.forget(worker)
            self._tally.forget(worker)
        if self._machine.coordinator is not None and not self._closed:
            with suppress(SupersededError):
                self.forget(worker)
