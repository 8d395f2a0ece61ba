"""Copies of a server: the primary sends every entry to a backup, over a channel that carries nothing else.

Primary and backup are as in Li et al. 2014, section 4.3, and Chilimbi et al. 2014, "Project Adam", section 3.3.2
(separate endpoints for replication). The primary answers a worker only when the backup has the entries that the answer
reports. So a backup that takes over has every acknowledged update; workers send again what was not acknowledged.

A primary that was declared dead may still run for a while, and two primaries would diverge. So a backup that is
promoted tells its primary, which answers nobody from then on. If the two cannot reach each other at that time, the
primary must really be dead.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, ChannelError, Message
from orchestray.platform.errors import OrchestrayError, TrainingError
from orchestray.trainers.ps.protocol.messages import (
    DONE,
    ENTRY,
    PROMOTED,
    SNAPSHOT,
    flat_state,
    result,
    start,
    tensors_of,
)
from orchestray.trainers.ps.protocol.requests import Entry, Header, State
from orchestray.trainers.ps.server.followers import SupersededError
from orchestray.trainers.ps.server.state_machine import Machine

_FAREWELL_TIMEOUT_S = 1.0


class Replicator:
    """The primary's end: a `Follower` that sends the entries to a backup."""

    def __init__(self, channel: Channel) -> None:
        self.name = channel.peer
        self._channel = channel
        self._is_superseded = False

    def begin(self, machine: Machine) -> None:
        """Send the state that the entries build on."""
        state, tensors = machine.state()
        names, copies = flat_state(tensors)
        start(self._channel, SNAPSHOT, State(json.dumps(state), names), copies)

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        if self._is_superseded:
            return self._raise_superseded
        done = self._channel.irecv()
        done.future.add_done_callback(self._look)
        with contextlib.suppress(ChannelClosedError):  # the answer says why
            start(self._channel, ENTRY, entry, [tensor.clone() for tensor in tensors])

        def wait() -> None:
            try:
                result(done)
            except ChannelClosedError:
                if not self._is_superseded:
                    raise
            if self._is_superseded:
                self._raise_superseded()

        return wait

    def close(self) -> None:
        self._channel.close()

    def _raise_superseded(self) -> None:
        raise SupersededError(f"{self.name} serves instead of this server")

    def _look(self, answer: Future[Message]) -> None:
        """Look at an answer before any later one fails."""
        with contextlib.suppress(ChannelClosedError):
            self._is_superseded |= answer.result().tag == PROMOTED


class Backup:
    """A copy of a primary's machine, kept by `follow`; after `promote` it is the server.

    Attributes:
        num_entries: number of entries applied since the last snapshot.
    """

    def __init__(self, machine: Machine) -> None:
        """
        Args:
            machine: machine made with the same arguments as the primary's, whose state it takes on.
        """
        self._machine = machine
        self._changed = threading.Condition()
        self._channel: Channel | None = None
        self._has_state = self._has_ended = False
        self._promoted = False
        self.num_entries = 0

    def follow(self, channel: Channel) -> None:
        """Keep up with a primary until the channel ends, by its death or by `promote`. Blocks."""
        with self._changed:
            if self._promoted:
                channel.close()
            self._channel = channel
        try:
            is_primary = True
            while is_primary:
                message = result(channel.irecv())
                if message.tag == SNAPSHOT:
                    snapshot = Header.decode(State, message.content)
                    is_primary = self._begin(snapshot.sections, tensors_of(channel, snapshot))
                else:
                    header = Header.decode(Entry, message.content)
                    is_primary = self._take(header.sections, tensors_of(channel, header))
                    if is_primary:
                        channel.send([], tag=DONE)
        except ChannelClosedError:
            return
        finally:
            channel.close()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def promote(self) -> Machine:
        """Stop following and return the machine, which has all that its primary acknowledged; give it to a
        `ShardServer`.

        Raises:
            TrainingError: no primary has ever sent its state.
        """
        with self._changed:
            channel = self._channel
            if channel is not None:  # a state that has come may still be read
                self._changed.wait_for(lambda: self._has_state or self._has_ended, _FAREWELL_TIMEOUT_S)
            self._promoted = True
        if channel is not None:
            with contextlib.suppress(ChannelError):  # the primary is dead, or stopped
                channel.send([], tag=PROMOTED, timeout_s=_FAREWELL_TIMEOUT_S)
            channel.close()
        if not self._has_state:
            raise TrainingError(
                "This backup cannot take over: its primary was lost before it told its state. Go on from a checkpoint."
            )
        return self._machine

    def _begin(self, state: State, tensors: Sequence[Tensor]) -> bool:
        """Take on the primary's state; return False if this backup has been promoted."""
        with self._changed:
            if not self._promoted:
                self._machine.load_state(json.loads(state.state), dict(zip(state.names, tensors, strict=True)))
                self._has_state, self.num_entries = True, 0
                self._changed.notify_all()
            return not self._promoted

    def _take(self, entry: Entry, tensors: Sequence[Tensor]) -> bool:
        """Apply an entry of the primary; return False if this backup has been promoted."""
        with self._changed:
            if not self._promoted:
                with contextlib.suppress(OrchestrayError):  # the primary had the same error, and sent it to its worker
                    self._machine.apply(entry, tensors)
                self.num_entries += 1
            return not self._promoted
