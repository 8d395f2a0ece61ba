"""The centre of elastic averaging, with compressed pulls.

A pull is alpha times the decoded distance, at both ends: the replica subtracts what the centre adds. So the sum of all
is kept whatever the code loses. What it loses is still between replica and centre, and so a part of the next pull; a
residual in addition would pull twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.platform.comm.pending import Pending
from orchestray.trainers.sync.common.messages import trade
from orchestray.trainers.sync.local.answering import PulledValues, Question
from orchestray.trainers.sync.local.delta_encoding import DifferenceCode
from orchestray.trainers.sync.local.elastic_center import Pull, ServedCentre, SharedCentre


class Coding:
    """The settings from which a centre makes codes.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`.
        flat: layout of the tensors in the flat ones.
        seed: seed of the run, for random rounding.
        exact: indices of the tensors that are sent uncompressed.
    """

    def __init__(
        self, compression: Mapping[str, Any], flat: FlatTensors, seed: int, exact: Collection[int] = ()
    ) -> None:
        self._compression, self._flat, self._seed, self._exact = dict(compression), flat, seed, exact

    def code(self, worker: int, num_workers: int) -> DifferenceCode:
        whom: dict[str, Any] = {"worker": worker, "num_workers": num_workers}
        return DifferenceCode(self._compression, self._flat, seed=self._seed, exact=self._exact, **whom)


class CodedSharedCentre(SharedCentre):
    """A centre kept by every replica; each sends its message to all: (P-1) messages, not 2(P-1)/P times the values.

    Args:
        coding: settings of the messages' code.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective, coding: Coding) -> None:
        super().__init__(start, alpha, collective)
        self._code = coding.code(collective.rank, collective.size)

    def meet(self, position: list[Tensor], step: int) -> Pull:
        code, collective = self._code, self._collective
        message = code.encode(torch._foreach_sub(position, self._values), step)
        dense_bytes = sum(ring_bytes(value, collective.size) for value in self._values)
        sent_bytes = message.numel() + (8 if code.message_bytes is None else 0)
        self.saved_bytes += dense_bytes - (collective.size - 1) * sent_bytes
        own = message if code.message_bytes is not None else torch.tensor([message.numel()])
        whole = own.new_empty(collective.size * own.numel())
        pending = collective.start_all_gather(whole, own)
        return _Messages(self, message, whole, pending)

    def take(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Move the centre by the messages of all replicas, in the order of ranks; return this one's pull."""
        own: list[Tensor] = []
        for rank, message in enumerate(messages):
            pulls = self._code.decode(message)
            torch._foreach_mul_(pulls, self._alpha)
            torch._foreach_add_(self._values, pulls)
            if rank == self._collective.rank:
                own = pulls
        return own

    def all_messages(self, message: Tensor, whole: Tensor) -> list[Tensor]:
        """Return the messages of all ranks; `whole` contains them, or their lengths."""
        size = self._collective.size
        if self._code.message_bytes is not None:
            return list(whole.view(size, -1).unbind())
        return trade([message] * size, whole.tolist(), self._collective)


class _Messages:
    """The messages of all replicas to all, or their lengths, in flight."""

    def __init__(self, centre: CodedSharedCentre, message: Tensor, whole: Tensor, pending: Pending) -> None:
        self._centre, self._message, self._whole, self._pending = centre, message, whole, pending

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        return self._centre.take(self._centre.all_messages(self._message, self._whole))


class CodedServedCentre(ServedCentre):
    """A centre kept by the first replica, which shares with each of the others an estimate of where that one is.

    A replica sends its distance from the estimate, and receives its pull from there; both count what was sent as known.
    The first replica pulls without a message.

    Args:
        coding: settings of the messages' code.
    """

    def __init__(self, start: list[Tensor], alpha: float, collective: Collective, coding: Coding) -> None:
        rank, size = collective.rank, collective.size
        self._code = coding.code(rank, 2 * size)
        self._estimate = [value.clone() for value in start]
        super().__init__(start, alpha, collective, CodedService(start, alpha, coding, size if rank == 0 else 0))

    def meet(self, position: list[Tensor], step: int) -> Pull:
        if self._collective.rank == 0:
            return super().meet(position, step)
        message = self._code.encode(torch._foreach_sub(position, self._estimate), step)
        torch._foreach_add_(self._estimate, self._code.decode(message))
        return _CodedAnswer(self, message, self._links.ask(0, [message]))

    def moved(self, message: Tensor, answer: Tensor) -> list[Tensor]:
        """Apply the pull that the first replica sent in answer to a message; return it."""
        # Not on the first replica, which may report a segment while the others still pull.
        self.saved_bytes += 2 * self._code.dense_bytes - message.numel() - answer.numel()
        pulls = self._code.decode(answer)
        torch._foreach_sub_(self._estimate, pulls)
        return pulls


class CodedService(PulledValues):
    """A `PulledValues` with an estimate and a code for each of the others.

    Args:
        values: the centre's values.
        alpha: fraction of the distance that is moved.
        coding: settings of the messages' code.
        size: number of replicas; 0 if this one does not serve.
    """

    def __init__(self, values: list[Tensor], alpha: float, coding: Coding, size: int) -> None:
        super().__init__(values, alpha)
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
            torch._foreach_add_(self._values, pulls)  # by what is sent to the replica: the sum of all is kept
        torch._foreach_sub_(estimate, pulls)
        return [answer]


class _CodedAnswer:
    """A compressed answer in flight from the first replica."""

    def __init__(self, centre: CodedServedCentre, message: Tensor, question: Question) -> None:
        self._centre, self._message, self._question = centre, message, question

    def wait(self) -> list[Tensor]:
        [answer] = self._question.wait()
        return self._centre.moved(self._message, answer)
