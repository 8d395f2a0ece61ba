"""The centre of elastic averaging, pulled at in a code.

A pull is alpha times what the code says of the distance, at both ends: the replica takes off what the centre takes up,
so the sum of all is kept whatever the code loses. What it loses is still between replica and centre, and so a part of
the next pull; a residue beside it would pull twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.channel.base import Handle, Message
from orchestray.platform.collective import Collective, Pending, ring_bytes
from orchestray.trainers.exchange.centre import Pull, ServedCentre, Service, SharedCentre
from orchestray.trainers.exchange.differences import DifferenceCode
from orchestray.trainers.exchange.flat import FlatTensors
from orchestray.trainers.exchange.messages import trade


class Coding:
    """What a centre needs to make codes.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`.
        flat: how tensors lie in the flat ones.
        seed: of the run, for random rounding.
        exact: which of the tensors are sent as they are.
    """

    def __init__(
        self, compression: Mapping[str, Any], flat: FlatTensors, seed: int, exact: Collection[int] = ()
    ) -> None:
        self._compression, self._flat, self._seed, self._exact = dict(compression), flat, seed, exact

    def code(self, worker: int, num_workers: int) -> DifferenceCode:
        whom: dict[str, Any] = {"worker": worker, "num_workers": num_workers}
        return DifferenceCode(self._compression, self._flat, seed=self._seed, exact=self._exact, **whom)


class CodedSharedCentre(SharedCentre):
    """Kept by every replica; all get the message of each: (P-1) messages, in place of 2(P-1)/P times the values.

    Args:
        coding: of the messages.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective, coding: Coding) -> None:
        super().__init__(start, alpha, collective)
        self._code = coding.code(collective.rank, collective.size)
        self._saved_bytes = 0

    @property
    def saved_bytes(self) -> float:
        return float(self._saved_bytes)

    def meet(self, position: list[Tensor], step: int) -> Pull:
        code, collective = self._code, self._collective
        message = code.encode(torch._foreach_sub(position, self._values), step)
        dense_bytes = sum(ring_bytes(value, collective.size) for value in self._values)
        told_bytes = message.numel() + (8 if code.message_bytes is None else 0)
        self._saved_bytes += dense_bytes - (collective.size - 1) * told_bytes
        told = message if code.message_bytes is not None else torch.tensor([message.numel()])
        whole = told.new_empty(collective.size * told.numel())
        pending = collective.start_all_gather(whole, told)
        return _Messages(self, message, whole, pending)

    def take(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Be pulled by what all replicas have said, in the order of ranks; returns this one's pull."""
        own: list[Tensor] = []
        for rank, message in enumerate(messages):
            pulls = self._code.decode(message)
            torch._foreach_mul_(pulls, self._alpha)
            torch._foreach_add_(self._values, pulls)
            if rank == self._collective.rank:
                own = pulls
        return own

    def all_messages(self, message: Tensor, whole: Tensor) -> list[Tensor]:
        """Of all ranks: `whole` is them, or how long they are."""
        size = self._collective.size
        if self._code.message_bytes is not None:
            return list(whole.view(size, -1).unbind())
        return trade([message] * size, whole.tolist(), self._collective)


class _Messages:
    """Of all replicas to all, on their way; or their lengths."""

    def __init__(self, centre: CodedSharedCentre, message: Tensor, whole: Tensor, pending: Pending) -> None:
        self._centre, self._message, self._whole, self._pending = centre, message, whole, pending

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        return self._centre.take(self._centre.all_messages(self._message, self._whole))


class CodedServedCentre(ServedCentre):
    """Kept by the first replica, which for each of the others keeps an estimate of where it is, as that one does.

    A replica says how far it is from the estimate, and is told how far it is pulled from there; both take what was said
    for known. The first replica pulls without a message.

    Args:
        coding: of the messages.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective, coding: Coding) -> None:
        rank, size = collective.rank, collective.size
        self._served = CodedService(start, alpha, coding, size if rank == 0 else 0)
        self._code = coding.code(rank, 2 * size)
        self._estimate = [value.clone() for value in start]
        super().__init__(start, alpha, collective, self._served)

    def meet(self, position: list[Tensor], step: int) -> Pull:
        if self._collective.rank == 0:
            return super().meet(position, step)
        message = self._code.encode(torch._foreach_sub(position, self._estimate), step)
        torch._foreach_add_(self._estimate, self._code.decode(message))
        return _CodedAnswer(self, message, self.ask([message]))

    def moved(self, answer: Tensor) -> list[Tensor]:
        """Follow the pull that the first replica told; returns it."""
        pulls = self._code.decode(answer)
        torch._foreach_sub_(self._estimate, pulls)
        return pulls

    @property
    def saved_bytes(self) -> float:
        """Known on the first replica alone."""
        return self._served.saved_bytes / self._collective.size


class CodedService(Service):
    """As `Service`, with an estimate and a code for each of the others.

    Args:
        values: the centre's.
        alpha: part of the distance that is moved.
        coding: of the messages.
        size: replicas; 0: this one does not serve.
    """

    def __init__(self, values: list[Tensor], alpha: float, coding: Coding, size: int) -> None:
        super().__init__(values, alpha)
        self.saved_bytes = 0
        self._codes = {peer: coding.code(size + peer, 2 * size) for peer in range(1, size)}
        self._estimates = {peer: [value.clone() for value in values] for peer in range(1, size)}

    @torch.no_grad()
    def answer(self, peer: int, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        code, estimate = self._codes[peer], self._estimates[peer]
        message = tensors[0].to(estimate[0].device)
        torch._foreach_add_(estimate, code.decode(message))
        with self._lock:
            answer = code.encode(self.distance(estimate), number)
            pulls = code.decode(answer)
            torch._foreach_add_(self._values, pulls)  # by what the replica is told: the sum of all is kept
            self.saved_bytes += 2 * code.dense_bytes - message.numel() - answer.numel()
        torch._foreach_sub_(estimate, pulls)
        return [answer]


class _CodedAnswer:
    """On its way from the first replica."""

    def __init__(self, centre: CodedServedCentre, message: Tensor, answer: Handle[Message]) -> None:
        self._centre, self._message, self._answer = centre, message, answer

    def wait(self) -> list[Tensor]:
        [answer] = self._centre.answered([self._message], self._answer)
        return self._centre.moved(answer)
