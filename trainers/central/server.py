"""A server of a shard: one thread a worker's channel, one lock, and an answer only once what it tells is safe.

Sources: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.3 (a change is
acknowledged after the replicas have it).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from orchestray.platform.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.central.machine import Entry, Listener, Machine
from orchestray.trainers.central.messages import (
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
from orchestray.trainers.central.orders import Wait, order_to_json
from orchestray.trainers.central.speeds import Stopwatch
from orchestray.trainers.central.tally import Tally
from orchestray.trainers.central.versions import Versions


class Follower(Protocol):
    """Who must have an entry before its effects are told to anybody: a backup, a log on disk."""

    name: str

    def begin(self, machine: Machine) -> None:
        """Called once, before the first entry, with the state they build on."""

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Called in the order of the entries, before they are applied, while the server is locked: tensors may change
        afterwards. What it returns waits until the follower has the entry; ChannelClosedError: it is lost.
        """

    def close(self) -> None:
        """There is nothing more to follow."""


_MUTATING = (
    *("hello", "leave", "ledger", "push", "acknowledge", "validated", "saved", "next", "advance"),
    *("deposit", "hand_over", "deposited"),
    *("relay", "change", "acknowledge_for", "settle", "settled"),
)


class ShardServer:
    """Serves a machine to workers.

    What an answer tells of, every follower has: the entry itself and all before it. So whatever becomes of this server,
    a follower that takes its place knows at least what anybody was told. A follower that is lost is dropped, and the
    listener told.
    """

    tell: Callable[[], dict[str, Any]] = dict
    """What a snapshot's answer says of the run, as JSON values."""

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
            machine: the server's from now on.
            followers: backups and logs; `follow` adds more at any time.
            listener: see `Machine.listener`; also told `follower_lost`.
            clock: tells seconds; how long workers take is measured by it, where their shares are by their speed.
        """
        self._machine = machine
        if listener is not None:
            machine.listener = listener
        self._changed = threading.Condition()
        self._followers: list[Follower] = []
        self._unsafe: dict[Follower, Callable[[], None]] = {}
        """What waits for the newest entry of each follower: it has the earlier ones then, too."""
        self._spare: list[Tensor] = []
        """Memory of the shard's size that nobody uses."""
        self._versions = Versions(machine.shard)
        self._channels: set[Channel] = set()
        self._serving: dict[int, Channel] = {}
        """The newest channel of each worker."""
        self._tally = Tally()
        ledger = machine.ledger
        self._stopwatch = Stopwatch(clock) if ledger is not None and ledger.settings.balance == "speed" else None
        self._closed = False
        for follower in followers:
            self.follow(follower)

    # -- what the host calls -------------------------------------------------------------------------------------------

    def serve(self, channel: Channel) -> int | None:
        """Answer a worker until its channel ends; returns which worker it was, if it said so. Blocks.

        On the lead the worker then leaves the ledger, unless it has come back over another channel.
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
        """Take a follower on, from the present state."""
        with self._changed:
            self._followers.append(follower)
            try:
                follower.begin(self._machine)
            except ChannelClosedError:
                self._drop(follower)

    def forget(self, worker: int) -> None:
        """A worker that is not connected will not come back (after `promote`): what it held is handed out again."""
        self.change({"worker": worker, "leave": True})

    def request_stop(self, reason: str, *, validate: bool = False) -> None:
        """As `Ledger.request_stop`."""
        self.change({"ledger": ["request_stop", {"reason": reason, "validate": validate}]})

    def resize(self, num_shares: int) -> None:
        """As `Ledger.resize`."""
        self.change({"ledger": ["resize", {"num_shares": num_shares}]})

    def dismiss(self, worker: int) -> None:
        """As `Ledger.dismiss`."""
        self.change({"ledger": ["dismiss", {"worker": worker}]})

    def change(self, entry: Entry, tensors: Sequence[Tensor] = ()) -> dict[str, Any]:
        """Apply an entry; returns its answer once every follower has it."""
        with self._changed:
            answer = self._apply(entry, tensors)
            safe = self._barrier()
        safe()
        return answer

    def snapshot(self, step: int | None = None) -> dict[str, Tensor]:
        """Copies of the shard's `values` (flat), and of what else it keeps: the optimizer's state as
        "optimizer/<parameter>:<start>.<slot>", the buffers as "buffers/floats" and "buffers/integers", what workers'
        compressors keep as `residuals` names it.

        Args:
            step: where batches are updates: that of the barrier, whose update is then made.
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
        """What is served."""
        return self._machine

    @property
    def version(self) -> int:
        """Updates made."""
        return self._machine.shard.version

    def tally(self) -> dict[str, Any]:
        """`Tally.take`; while the server is locked."""
        return self._tally.take()

    def close(self) -> None:
        """End every connection and every follower."""
        with self._changed:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:  # first: what no follower has must not be told
            channel.close()
        with self._changed:  # who is leaving now is not written to a log that is closed
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _serve_one(self, channel: Channel, worker: int | None, header: Message) -> Handle[Message]:
        """Returns the receive of the next request."""
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
        """The gradient of a push, whole however many pieces it comes in, and what else comes with it."""
        if self._is_borrowed(header):
            return borrowed_tensors(channel, header)
        memory, num_pieces = self._memory(), int(header.meta["push"]["pieces"])
        sizes = [piece.num_elements for piece in self._machine.shard.slices]
        into = [memory] if num_pieces == 1 else list(memory.split_with_sizes(sizes))
        received = tensors_of(channel, header, [*into, *self._buffer_memory(header.meta["tensors"] - num_pieces)])
        return [memory, *received[num_pieces:]]

    def _is_borrowed(self, header: Message) -> bool:
        """Whether a gradient can stay where the worker has it, who may send it again should this server be lost."""
        is_lent = header.meta.get("lent", [None])[0] is not None and header.meta["push"]["pieces"] == 1
        return is_lent and not self._machine.shard.changes_gradients

    def _answer(
        self, request: dict[str, Any], worker: int | None, tensors: Sequence[Tensor], asked: Handle[Message]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer and its tensors; of a pull the first of them is lent by the shard."""
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
            if "snapshot" in request or "told" in request:  # long, and of use for a checkpoint alone
                answer["told"] = self.tell()
            if "pull" in request:
                self._until(lambda: self._reached(int(request["pull"]["min_version"])), asked)
                newer_than = request["pull"]["newer_than"]
                if newer_than is None or self._machine.shard.version > newer_than:
                    if "place" in request["pull"]:
                        answer |= self._placed(**request["pull"])
                    else:
                        reply = self._published()
                answer["version"] = self._machine.shard.version
            safe = self._barrier()
        try:
            safe()
        except BaseException:
            self._end_loan(request, reply)
            raise
        return answer, reply

    def _end_loan(self, request: Mapping[str, Any], reply: Sequence[Tensor]) -> None:
        """Of what `_published` has lent for an answer, if it has."""
        if reply and "pull" in request:
            with self._changed:
                self._machine.shard.give_back(reply[0])

    def _timed(self, worker: int | None, entry: Entry) -> dict[str, Any]:
        """How long it took what is acknowledged: something the machine and its followers are told."""
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

    def _apply(self, entry: Entry, tensors: Sequence[Tensor]) -> dict[str, Any]:
        self._tell(entry, tensors)
        try:
            return self._machine.apply(entry, tensors)
        finally:
            self._changed.notify_all()

    def _tell(self, entry: Entry, tensors: Sequence[Tensor]) -> None:
        for follower in self._followers:
            try:
                self._unsafe[follower] = follower.append(entry, tensors)
            except ChannelClosedError:
                self._unsafe[follower] = _lost

    def _barrier(self) -> Callable[[], None]:
        """What waits until every follower has all that was applied up to now."""
        unsafe = list(self._unsafe.items())

        def wait() -> None:
            for follower, reached in unsafe:
                try:
                    reached()
                except ChannelClosedError:
                    self._drop(follower)

        return wait

    def _drop(self, follower: Follower) -> None:
        with self._changed:
            if follower not in self._followers:
                return
            self._followers.remove(follower)
            self._unsafe.pop(follower, None)
            self._machine.listener({"event": "follower_lost", "name": follower.name})
        follower.close()

    def _try_next(self, again: Entry) -> dict[str, Any] | None:
        answer = self._machine.apply(again)
        if answer["order"] is None:
            return None  # and nothing has changed, so nobody need know
        self._tell(again, ())
        self._changed.notify_all()
        return answer

    def _reached(self, version: int) -> bool:
        shard = self._machine.shard
        if shard.needs(version):
            self._apply({"advance": version}, ())
        return not shard.needs(version)

    def _until(self, ready: Callable[[], Any], asked: Handle[Message]) -> Any:
        """Wait, locked, until `ready` gives something; nothing if the worker asks again before. Its death raises."""
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
            # A worker that comes back may push what it computes meanwhile; of one that leaves nothing is taken.
            self._versions.end(channel, reads_on=not is_newest)
            if worker is None or not is_newest:
                return
            del self._serving[worker]
            if self._stopwatch is not None:
                self._stopwatch.forget(worker)
            self._tally.forget(worker)
        if self._machine.ledger is not None and not self._closed:
            self.forget(worker)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _published(self) -> list[Tensor]:
        values, buffers = self._machine.shard.lend(), self._machine.shard.buffers
        return [values] if buffers is None else [values, buffers.floats.clone(), buffers.integers.clone()]

    @torch.no_grad()
    def _placed(
        self, place: Sequence[Tensor], to: Channel, stands_on: int | None = None, **_rest: object
    ) -> dict[str, Any]:
        """Write the present parameters where a worker wants them; or lend it those that are here, if it says which of
        them it has now.
        """
        shard = self._machine.shard
        held = [shard.values] if shard.buffers is None else [shard.values, shard.buffers.floats, shard.buffers.integers]
        num_lent = 0 if stands_on is None else 1
        for target, tensor in list(zip(place, held, strict=True))[num_lent:]:
            target.copy_(tensor)
        if stands_on is None:
            self._versions.end(to, reads_on=False)  # it asks for a copy: it looks at nothing here any more
            return {"placed": True}
        self._versions.settle(to, stands_on)
        return {"placed": True, "found": self._versions.lend(to)}

    def _memory(self) -> Tensor:
        with self._changed:
            return self._spare.pop() if self._spare else torch.empty_like(self._machine.shard.values)

    def _buffer_memory(self, num: int) -> list[Tensor]:
        buffers = self._machine.shard.buffers
        if not num or buffers is None:
            return []
        return [torch.empty_like(buffers.floats), torch.empty_like(buffers.integers)]


def _lost() -> None:
    raise ChannelClosedError("the follower is lost")
