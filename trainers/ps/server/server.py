"""A server of a shard, with one thread per worker channel, one lock, and answers that wait for the followers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.ps.protocol.assignments import Wait, order_to_json
from orchestray.trainers.ps.protocol.load_balancing import Stopwatch
from orchestray.trainers.ps.protocol.messages import (
    ANSWER,
    DENSE,
    borrowed_tensors,
    finish,
    flat_state,
    num_bytes_of,
    result,
    start,
    tensors_of,
)
from orchestray.trainers.ps.protocol.traffic_counter import TrafficCounter
from orchestray.trainers.ps.server.event_queue import EventQueue
from orchestray.trainers.ps.server.followers import Follower, Followers
from orchestray.trainers.ps.server.snapshots import Versions
from orchestray.trainers.ps.server.state_machine import Entry, Listener, Machine

_MUTATING = (
    *("hello", "leave", "coordinator", "push", "acknowledge", "validated", "saved", "next", "advance"),
    *("deposit", "hand_over", "deposited"),
    *("relay", "change", "acknowledge_for"),
)


class ShardServer:
    """A server that applies the requests of workers to a state machine and answers them.

    An answer is sent once every follower has the entry that it reports, and all entries before it. So a follower that
    replaces a lost server knows at least what any worker has been sent. A lost follower is dropped, and the listener is
    notified.
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
        self._machine = machine
        self.events = EventQueue(machine.listener if listener is None else listener)
        machine.listener = self._note
        self._changed = threading.Condition()
        self._followers = Followers(
            self._changed, lambda lost: self._note({"event": "follower_lost", "name": lost.name})
        )
        self._spare: list[Tensor] = []
        """Unused memory of the shard's size."""
        self._versions = Versions(machine.shard)
        self._channels: set[Channel] = set()
        self._serving: dict[int, Channel] = {}
        """Newest channel of each worker."""
        self._tally = TrafficCounter()
        coordinator = machine.coordinator
        is_timed = coordinator is not None and coordinator.settings.balance == "speed"
        self._stopwatch = Stopwatch(clock) if is_timed else None
        self._closed = False
        for follower in followers:
            self.follow(follower)

    # -- calls of the host ---------------------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> int | None:
        """Answer a worker until its channel ends. Blocks.

        On the lead the worker then leaves the coordinator, unless it has come back over another channel.

        Returns:
            The worker's number; None if it sent no `hello`.
        """
        worker: int | None = None
        try:
            with self._changed:
                self._channels.add(channel)
                self._tally.open(channel)
                if self._closed:
                    channel.close()
            asked = channel.irecv()
            while True:
                header = result(asked)
                if "hello" in header.meta:
                    worker = int(header.meta["hello"]["worker"])
                    with self._changed:
                        self._serving[worker] = channel
                asked = self._serve_one(channel, worker, header)
        except ChannelClosedError:
            pass
        finally:
            channel.close()
            self._gone(worker, channel)
        return worker

    def follow(self, follower: Follower) -> None:
        """Add a follower, which starts from the present state."""
        with self._changed:
            self._followers.add(follower, self._machine)
        self.events.deliver()

    def forget(self, worker: int) -> None:
        """Hand out again what a worker holds that is not connected and will not come back (after `promote`)."""
        self.change({"worker": worker, "leave": True})

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """End the run with a checkpoint, as in `Coordinator.request_stop`."""
        self.change({"coordinator": ["request_stop", {"reason": reason, "validate": validate}]})

    def resize(self, num_shares: int) -> None:
        """Cut the batches that have not begun into `num_shares` shares."""
        self.change({"coordinator": ["resize", {"num_shares": num_shares}]})

    def dismiss(self, worker: int) -> None:
        """Have a worker leave once it has done what it holds."""
        self.change({"coordinator": ["dismiss", {"worker": worker}]})

    def change(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Apply an entry; return its answer once every follower has the entry."""
        with self._changed:
            answer = self._apply(entry, tensors)
            safe = self._followers.barrier()
        safe()
        self.events.deliver()
        return answer

    def snapshot(self, step: int | None = None) -> dict[str, Tensor]:
        """Return copies of the shard's state by name.

        The names are `values` (flat); "optimizer/<parameter>:<start>.<slot>" for the optimizer; "buffers/floats" and
        "buffers/integers" for the buffers; and those of `residuals` for the state of workers' compressors.

        Args:
            step: step of the barrier, where an update is one of a batch; its update is made first.
        """
        with self._changed:
            if step is not None and step > self._machine.shard.version:
                self._apply({"advance": step}, ())
            shard = self._machine.shard
            state = {"values": shard.values}
            state |= {f"optimizer/{name}": tensor for name, tensor in shard.optimizer_slots().items()}
            if shard.buffers is not None:
                state |= {"buffers/floats": shard.buffers.floats, "buffers/integers": shard.buffers.integers}
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
        with self._changed:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:  # before the followers: an answer must not be sent that no follower has
            channel.close()
        self._followers.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _serve_one(self, channel: Channel, worker: int | None, header: Message) -> Handle[Message]:
        """Answer one request; return the receive of the next."""
        request = dict(header.meta)
        push = request.get("push", {})
        request["reusable"] = push.get("encoding") == DENSE and not self._is_borrowed(header)
        if push.get("encoding") == DENSE:
            tensors = self._received_dense(channel, header)
        else:
            tensors = tensors_of(channel, header)
        if places := request.get("pull", {}).get("place"):
            request["pull"] = {**request["pull"], "place": [channel.borrow(place) for place in places], "to": channel}
        asked = channel.irecv()
        try:
            answer, reply = self._answer(request, worker, tensors, asked)
        except ChannelClosedError:
            raise
        except OrchestrayError as error:
            answer, reply = {"error": str(error)}, []
        if answer.get("placed"):
            channel.count_lent(sent_bytes=num_bytes_of(request["pull"]["place"]))
        if "found" in answer:
            answer["found"] = self._versions.show(channel, answer["found"])
        try:
            finish(start(channel, ANSWER, answer, reply))
        finally:
            self._end_loan(request, reply)
        return asked

    def _received_dense(self, channel: Channel, header: Message) -> list[Tensor]:
        """Return the gradient of a push, whole even if it came in pieces, and the tensors that came with it."""
        if self._is_borrowed(header):
            return borrowed_tensors(channel, header)
        memory, num_pieces = self._memory(), int(header.meta["push"]["pieces"])
        sizes = [piece.num_elements for piece in self._machine.shard.slices]
        into = [memory] if num_pieces == 1 else list(memory.split_with_sizes(sizes))
        received = tensors_of(channel, header, [*into, *self._buffer_memory(header.meta["tensors"] - num_pieces)])
        return [memory, *received[num_pieces:]]

    def _is_borrowed(self, header: Message) -> bool:
        """Return True if a gradient can stay in the worker's memory; the worker may send it again if this server is
        lost.
        """
        is_lent = header.meta.get("lent", [None])[0] is not None and header.meta["push"]["pieces"] == 1
        return is_lent and not self._machine.shard.changes_gradients

    def _answer(
        self, request: dict[str, Any], worker: int | None, tensors: Sequence[Tensor], asked: Handle[Message]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the answer and its tensors. The first tensor of a pull is lent by the shard."""
        reply: list[Tensor] = []
        entry = {name: request[name] for name in _MUTATING if name in request}
        answer: dict[str, Any] = {}
        with self._changed:
            if "tally" in request:
                self._tally.add(request["tally"])
            if entry:
                answer = self._apply({**entry, "worker": worker, **self._timed(worker, entry)}, tensors)
            if not answer.pop("kept", False) and request["reusable"]:
                self._spare.append(tensors[0])
            if "next" in request and answer["order"] is None:
                again = {"worker": worker, "next": request["next"]}
                answer |= self._until(lambda: self._try_next(again), asked) or {"order": order_to_json(Wait())}
            self._start_timing(worker, answer.get("order"))
            if "residual" in request and worker is not None and self._machine.residuals is not None:
                kept, answer["heard"] = self._machine.residuals.of(worker)
                answer["names"], reply = flat_state(kept)
            if "snapshot" in request:
                answer["names"], reply = flat_state(self.snapshot(request["snapshot"]))
            if "pull" in request:
                self._until(lambda: self._reached(int(request["pull"]["min_version"])), asked)
                newer_than = request["pull"]["newer_than"]
                if newer_than is None or self._machine.shard.version > newer_than:
                    if "place" in request["pull"]:
                        answer |= self._placed(**request["pull"])
                    else:
                        reply = self._published()
                answer["version"] = self._machine.shard.version
            safe = self._followers.barrier()
        try:
            safe()
            if "snapshot" in request or "run_state" in request:  # for a checkpoint: nothing happens until it is saved
                self.events.deliver_all()
                answer["run_state"] = self.run_state()
            else:
                self.events.deliver()
        except BaseException:
            self._end_loan(request, reply)
            raise
        return answer, reply

    def _end_loan(self, request: Mapping[str, Any], reply: Sequence[Tensor]) -> None:
        """End the loan of what `_published` lent for an answer, if anything."""
        if reply and "pull" in request:
            with self._changed:
                self._machine.shard.give_back(reply[0])

    def _timed(self, worker: int | None, entry: Entry) -> dict[str, Any]:
        """Return how long the acknowledged shares took, as a section of the entry."""
        if self._stopwatch is None or worker is None:
            return {}
        if "hello" in entry:
            self._stopwatch.forget(worker)
        acknowledged = entry.get("acknowledge", ())
        took_s = [self._stopwatch.stop(worker, order_id) for order_id, *_ in acknowledged]
        return {"took_s": took_s} if took_s else {}

    def _start_timing(self, worker: int | None, order: Mapping[str, Any] | None) -> None:
        if self._stopwatch is not None and worker is not None and order is not None and order["kind"] == "compute":
            self._stopwatch.start(worker, order["order_id"])

    # -- events and entries ------------------------------------------------------------------------------------------

    def _note(self, event: dict[str, Any]) -> None:
        """Take note of an event for the listener; the server is locked."""
        self.events.put({**event, "traffic": self._tally.take()} if event["event"] == "step" else event)

    def _apply(self, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        self._followers.tell(entry, tensors)
        try:
            return self._machine.apply(entry, tensors)
        finally:
            self._changed.notify_all()

    def _try_next(self, again: Entry) -> dict[str, Any] | None:
        answer = self._machine.apply(again)
        if answer["order"] is None:
            return None  # nothing has changed, so the followers need no entry
        self._followers.tell(again, ())
        self._changed.notify_all()
        return answer

    def _reached(self, version: int) -> bool:
        shard = self._machine.shard
        if shard.needs(version):
            self._apply({"advance": version}, ())
        return not shard.needs(version)

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

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _gone(self, worker: int | None, channel: Channel) -> None:
        with self._changed:
            self._channels.discard(channel)
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
            self.forget(worker)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _published(self) -> list[Tensor]:
        values, buffers = self._machine.shard.lend(), self._machine.shard.buffers
        return [values] if buffers is None else [values, buffers.floats.clone(), buffers.integers.clone()]

    @torch.no_grad()
    def _placed(
        self, place: Sequence[Tensor], to: Channel, reads: int | None = None, **_rest: object
    ) -> dict[str, Any]:
        """Write the present parameters into the worker's memory, or lend it the server's.

        They are lent if the worker says which version it reads.
        """
        shard = self._machine.shard
        held = [shard.values] if shard.buffers is None else [shard.values, shard.buffers.floats, shard.buffers.integers]
        num_lent = 0 if reads is None else 1
        for target, tensor in list(zip(place, held, strict=True))[num_lent:]:
            target.copy_(tensor)
        if reads is None:
            self._versions.end(to, reads_on=False)  # it asks for a copy, so it no longer reads the server's memory
            return {"placed": True}
        self._versions.settle(to, reads)
        return {"placed": True, "found": self._versions.lend(to)}

    def _memory(self) -> Tensor:
        with self._changed:
            return self._spare.pop() if self._spare else torch.empty_like(self._machine.shard.values)

    def _buffer_memory(self, num: int) -> list[Tensor]:
        buffers = self._machine.shard.buffers
        if not num or buffers is None:
            return []
        return [torch.empty_like(buffers.floats), torch.empty_like(buffers.integers)]
