"""The centre of elastic averaging: kept by all replicas alike, or by the first one alone and served to the others."""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, ChannelError, Handle, Message
from orchestray.platform.comm.channel.gloo import GlooChannel
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.pending import Pending
from orchestray.platform.process.pulse import PULSE

ANY_TIME_S = 365 * 86400.0
"""Timeout that never ends: a channel reports at once when its other end is gone,
and a replica may compute for any time.
"""


class Pull(Protocol):
    """A pull of a replica in flight."""

    def wait(self) -> list[Tensor]:
        """Return what the replica must subtract from its parameters: alpha (x - centre), by which the centre has moved.

        Raises:
            PeerLostError: another replica is gone.
        """


class Centre(ABC):
    """Flat tensors that replicas pull at.

    Args:
        start: values it begins with, the same on every replica; the centre takes them over.
        alpha: fraction of the distance that is moved.
        collective: the replicas. All make their end at the same time.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective) -> None:
        self._values = start
        self._alpha = alpha
        self._collective = collective
        self.asked_bytes = 0
        """Bytes that this replica's pulls have sent outside the collective, both ways; known when a pull is done."""
        self.saved_bytes = 0
        """Bytes saved by compression: this replica's part of what all have saved together."""

    @abstractmethod
    def meet(self, position: list[Tensor], step: int) -> Pull:
        """Start a pull from `position`, which the centre takes over, in this step."""

    def values(self) -> list[Tensor]:
        """Return copies of the current values, the same bits everywhere. All
        replicas call this, with no pull in flight.
        """
        return [value.clone() for value in self._values]

    def values_here(self) -> list[Tensor]:
        """Return the centre's own memory, on the first replica."""
        return self._values

    def close(self) -> None:
        """Close the centre's own connections and threads."""
        return


class SharedCentre(Centre):
    """A centre kept by every replica, and moved by the sum of all pulls: equations 5 and 6 of the paper."""

    def meet(self, position: list[Tensor], step: int) -> Pull:
        pulls = [_pulled(mine, value, self._alpha) for mine, value in zip(position, self._values, strict=True)]
        sums = [pull.clone() for pull in pulls]
        return _Together(self._values, pulls, sums, [self._collective.start_all_reduce(each) for each in sums])


class _Together:
    def __init__(self, values: list[Tensor], pulls: list[Tensor], sums: list[Tensor], pending: list[Pending]) -> None:
        self._values, self._pulls, self._sums, self._pending = values, pulls, sums, pending

    def wait(self) -> list[Tensor]:
        for pending in self._pending:
            pending.wait()
        torch._foreach_add_(self._values, self._sums)
        return self._pulls


class ServedCentre(Centre):
    """A centre kept by the first replica, to which each of the others has a channel: no pull waits for another replica.

    Algorithm 1 of the paper: the centre moves by one replica's pull at a time.
    """

    def __init__(
        self, start: list[Tensor], alpha: float, collective: Collective, service: Service | None = None
    ) -> None:
        super().__init__(start, alpha, collective)
        self._service = service or Service(self._values, alpha)
        self._channels: dict[int, Channel] = {}
        """Channels to the other replicas on the first one; to the first one on the others."""
        if collective.rank == 0:
            for peer in range(1, collective.size):
                self._channels[peer] = _open(collective, peer)
            self._service.serve(self._channels)
        elif collective.size > 1:
            self._channels[0] = _open(collective, collective.rank)
        # The serving threads hold service and channels, not this object: they end with it.
        self._closing = weakref.finalize(self, _close, list(self._channels.values()))

    def meet(self, position: list[Tensor], step: int) -> Pull:
        if self._collective.rank == 0:
            return _Done(self._service.pull(position))
        return _Answer(self, position, self.ask(position))

    def ask(self, tensors: list[Tensor]) -> Handle[Message]:
        """Send tensors to the first replica; return a handle of its answer. The tensors must exist until the answer.

        Raises:
            PeerLostError: the first replica is gone.
        """
        try:
            answer = self._channels[0].irecv()
            self._channels[0].isend(tensors)
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        return answer

    def answered(self, sent: Sequence[Tensor], answer: Handle[Message]) -> list[Tensor]:
        """Return the answer to what was `sent`, tensor by tensor, once there, on the devices of the sent tensors.

        Raises:
            PeerLostError: the first replica is gone.
        """
        try:
            with self._collective.waiting.during():
                tensors = answer.wait(ANY_TIME_S).tensors
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        self.asked_bytes += sum(tensor.nbytes for tensor in (*sent, *tensors))
        return [tensor.to(asked.device) for tensor, asked in zip(tensors, sent, strict=True)]

    def values(self) -> list[Tensor]:
        values = self._service.values()
        for value in values:
            self._collective.broadcast(value, 0)
        return values

    def close(self) -> None:
        self._closing()
        with PULSE.waiting():
            self._service.join()


class Service:
    """The state that the first replica's threads share: the centre, and a lock so
    that one pull comes after the other.
    """

    def __init__(self, values: list[Tensor], alpha: float) -> None:
        self._values = values
        self._alpha = alpha
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def pull(self, position: Sequence[Tensor]) -> list[Tensor]:
        with self._lock, torch.no_grad():
            pulls = self.distance(position)
            torch._foreach_add_(self._values, pulls)
            return pulls

    def distance(self, position: Sequence[Tensor]) -> list[Tensor]:
        """Return the pull from that position; call this under the lock."""
        return [_pulled(mine, value, self._alpha) for mine, value in zip(position, self._values, strict=True)]

    def answer(self, peer: int, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the answer to the tensors of `peer`'s pull of this number, from 1; called by one thread a peer."""
        return self.pull(tensors)

    def values(self) -> list[Tensor]:
        with self._lock:
            return [value.clone() for value in self._values]

    def serve(self, channels: Mapping[int, Channel]) -> None:
        for peer, channel in channels.items():
            thread = threading.Thread(target=self._serve, args=(peer, channel), name="orchestray-centre", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: int, channel: Channel) -> None:
        with channel:  # when this thread ends for any reason, the replica at the other end notices
            for number in itertools.count(1):
                try:
                    tensors = channel.recv(timeout_s=ANY_TIME_S).tensors
                    channel.send(self.answer(peer, tensors, number), timeout_s=ANY_TIME_S)
                except ChannelClosedError:
                    return

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class _Done:
    def __init__(self, pulls: list[Tensor]) -> None:
        self._pulls = pulls

    def wait(self) -> list[Tensor]:
        return self._pulls


class _Answer:
    """An answer in flight from the first replica."""

    def __init__(self, centre: ServedCentre, position: list[Tensor], answer: Handle[Message]) -> None:
        self._centre = centre
        self._position = position
        self._answer = answer

    def wait(self) -> list[Tensor]:
        return self._centre.answered(self._position, self._answer)


def _pulled(position: Tensor, value: Tensor, alpha: float) -> Tensor:
    return (position.to(value.device) - value).mul_(alpha)


def _open(collective: Collective, peer: int) -> Channel:
    """Return this end of the channel between the first replica and `peer`."""
    names = ("the centre", f"replica {peer}")
    end = 0 if collective.rank == 0 else 1
    try:
        return GlooChannel(
            collective.prefix_store(f"centre-{peer}"),
            end,
            name=names[end],
            peer=names[1 - end],
            connect_timeout_s=collective.timeout_s or ANY_TIME_S,
        )
    except ChannelError as error:
        raise PeerLostError(str(error)) from error


def _close(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()
