"""Replicas that answer one another at any time, also while they compute: no question waits for another one's step."""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, ChannelError, Handle, Message
from orchestray.platform.comm.channel.gloo import GlooChannel
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.process.pulse import PULSE

ANY_TIME_S = 365 * 86400.0
"""Timeout that never ends: a channel reports at once when its other end is gone,
and a replica may compute for any time.
"""


class Service(ABC):
    """A state that answers questions, each peer's by a thread of its own.

    Args:
        values: the state; taken over.
    """

    def __init__(self, values: list[Tensor]) -> None:
        self._values = values
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def answer(self, peer: int, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the answer to the tensors of `peer`'s question of this number, from 1; called by one thread a peer."""

    def values(self) -> list[Tensor]:
        """Return copies of the present values."""
        with self._lock:
            return [value.clone() for value in self._values]

    def serve(self, channels: Mapping[int, Channel]) -> None:
        """Answer what comes over the peers' channels until they are closed."""
        for peer, channel in channels.items():
            thread = threading.Thread(target=self._serve, args=(peer, channel), name="orchestray-answers", daemon=True)
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
        """Wait until the threads have ended, after their channels were closed."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class PulledValues(Service):
    """Values that move towards each one that asks, by a part of the distance; it moves as far the other way.

    Args:
        values: what they begin with; taken over.
        alpha: the part of the distance, between 0 and 1.
    """

    def __init__(self, values: list[Tensor], alpha: float) -> None:
        super().__init__(values)
        self._alpha = alpha

    def answer(self, peer: int, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        return self.pull(tensors)

    def pull(self, position: Sequence[Tensor]) -> list[Tensor]:
        """Move towards a position; return what the one there must subtract. One pull comes after the other."""
        with self._lock, torch.no_grad():
            pulls = self.distance(position)
            torch._foreach_add_(self._values, pulls)
            return pulls

    def distance(self, position: Sequence[Tensor]) -> list[Tensor]:
        """Return the pull from that position; call this under the lock."""
        return [pulled(mine, value, self._alpha) for mine, value in zip(position, self._values, strict=True)]


class Links:
    """Channels of this replica: to those that it asks, and from those that ask its service.

    Args:
        collective: the replicas. All make their end at the same time.
        service: what answers.
        pairs: ranks of each asker and its answerer, the same in the same order on every replica.

    Raises:
        PeerLostError: a replica is gone.
    """

    def __init__(self, collective: Collective, service: Service, pairs: Iterable[tuple[int, int]]) -> None:
        self._collective = collective
        self._asked: dict[int, Channel] = {}
        self.asked_bytes = 0
        """Bytes of this replica's questions and their answers; known when an answer is there."""
        answered: dict[int, Channel] = {}
        for asker, answerer in pairs:  # in the same order: an end waits for the other
            if collective.rank == asker:
                self._asked[answerer] = _open(collective, asker, answerer)
            elif collective.rank == answerer:
                answered[asker] = _open(collective, asker, answerer)
        service.serve(answered)
        # The answering threads hold service and channels, not this object: they end with it.
        self._closing = weakref.finalize(self, _close, [*self._asked.values(), *answered.values()], service)

    def ask(self, peer: int, tensors: list[Tensor]) -> Question:
        """Begin to ask a peer; the tensors must not change until its answer.

        Raises:
            PeerLostError: the peer is gone.
        """
        try:
            answer = self._asked[peer].irecv()
            self._asked[peer].isend(tensors)
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        return Question(self, tensors, answer)

    def answered(self, tensors: Sequence[Tensor], answer: Handle[Message]) -> list[Tensor]:
        """Return the answer to these tensors once it is there; see `Question.wait`."""
        try:
            with self._collective.waiting.during():
                answers = answer.wait(ANY_TIME_S).tensors
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        self.asked_bytes += sum(tensor.nbytes for tensor in (*tensors, *answers))
        return [one.to(asked.device) for one, asked in zip(answers, tensors, strict=True)]

    def close(self) -> None:
        """Close the channels, and wait until the service's threads have ended."""
        with PULSE.waiting():
            self._closing()


class Question:
    """A question in flight."""

    def __init__(self, links: Links, tensors: list[Tensor], answer: Handle[Message]) -> None:
        self._links, self._tensors, self._answer = links, tensors, answer

    def wait(self) -> list[Tensor]:
        """Return the answer, tensor by tensor, on the devices of what was asked.

        Raises:
            PeerLostError: who was asked is gone.
        """
        return self._links.answered(self._tensors, self._answer)


def pulled(position: Tensor, value: Tensor, alpha: float) -> Tensor:
    """Return that part of the distance from a value to a position, on the value's device."""
    return (position.to(value.device) - value).mul_(alpha)


def _open(collective: Collective, asker: int, answerer: int) -> Channel:
    """Return this replica's end of the channel over which `asker` asks `answerer`."""
    end = 0 if collective.rank == asker else 1
    names = (f"replica {asker}", f"replica {answerer}")
    try:
        return GlooChannel(
            collective.prefix_store(f"asks-{asker}-{answerer}"),
            end,
            name=names[end],
            peer=names[1 - end],
            connect_timeout_s=collective.timeout_s or ANY_TIME_S,
        )
    except ChannelError as error:
        raise PeerLostError(str(error)) from error


def _close(channels: list[Channel], service: Service) -> None:
    """Close the channels, and wait for the threads: one that wakes in a process that ends would abort it."""
    for channel in channels:
        channel.close()
    service.join()
