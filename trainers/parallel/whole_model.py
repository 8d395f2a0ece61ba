"""A model that every sample passes through on one worker: whole, or with its layers split over a tensor group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orchestray.trainers.core.batch_norm import has_synchronized, needs_every_pass
from orchestray.trainers.core.forward import empty_pass, evaluation_code, pass_without_loss, passing, user_code
from orchestray.trainers.core.network import Usage
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.rng import seed_pass
from orchestray.trainers.core.task_calls import add
from orchestray.trainers.parallel.pipeline.tied import add_up

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.trainers.core.exchange import Exchange, OptimizedTensor
    from orchestray.trainers.core.forward import Forward
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.layout.tensor_slice import TensorSlice


class WholeNetwork:
    """A `Network` whose micro-batches go through the model one after the other."""

    streams = False

    def __init__(
        self,
        forward: Forward,
        draw: RngKey,
        stream: Callable[[], SampleStream],
        *,
        rank: int = 0,
        pieces: Mapping[str, TensorSlice] | None = None,
        tensor_group: Collective | None = None,
        partial: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            forward: calls the model.
            draw: what random numbers depend on.
            stream: returns this replica's stream, for a sample where this replica has none.
            rank: this worker's rank, for messages.
            pieces: slices of the tensors that are not whole here.
            tensor_group: the workers that the layers are split over; None if they are not split.
            partial: names of parameters of which each worker of that group computes a part of the gradient.
        """
        self.model: nn.Module = forward.model
        self.pieces: Mapping[str, TensorSlice] = pieces or {}
        self.is_reporting = tensor_group is None or tensor_group.rank == 0
        self.forward = forward
        """Calls the model."""
        self.draw = draw
        """Key of random numbers."""
        self._stream = stream
        self._rank = rank
        self._tensor_group = tensor_group
        self.partial = partial
        self.combines = bool(partial)
        # Metrics may take gradients where the loss takes none.
        self._without_gradients = {loss_only: WithoutGradients(forward.model) for loss_only in (False, True)}
        self._meets_in_passes = has_synchronized(self.model)
        # What a pass does to other buffers, it has to do on every replica: count calls, say.
        self._needs_every_pass = needs_every_pass(self.model)
        self._loss: Callable[..., tuple[Tensor, float | Tensor]] = forward.loss
        if forward.device.type != "cpu":
            self._loss = forward.unread_loss
        self._sent_before = 0 if tensor_group is None else tensor_group.own_bytes_sent

    def backward(self, share: Share, exchange: Exchange, *, step: int) -> float | Tensor:
        loss_sum: float | Tensor = 0.0
        num_passes = share.num_micro_batches if self._needs_every_pass else len(share.micro_batches)
        with user_code(step, self._rank):
            for number, micro_batch in enumerate(share.micro_batches, start=1):
                self.draw.micro_batch = number - 1
                seed_pass(self.draw, self.forward.device)
                if not micro_batch.weight:  # its loss is 0/0, but statistics are those of all samples
                    exchange.begin_backward(last_micro_batch=number == num_passes)
                    pass_without_loss(self.forward, micro_batch.batch, step=step)
                    continue
                weight = micro_batch.weight / share.batch_weight
                loss, value = self._loss(micro_batch, step=step, rank=self._rank)
                exchange.begin_backward(last_micro_batch=number == num_passes)
                self.forward.backward(loss, weight)
                loss_sum += value * weight
            for number in range(len(share.micro_batches) + 1, num_passes + 1):
                self.draw.micro_batch = number - 1
                if self._meets_in_passes:
                    exchange.begin_backward(last_micro_batch=number == num_passes)
                    empty_pass(self.forward, self._stream().one_sample(), step=step)
                else:
                    passing(self.forward, self._stream())
        return loss_sum if self.is_reporting else 0.0

    def refuse_losses(self, step: int) -> None:
        self.forward.unread.refuse(step)

    def combine(self, updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None]) -> None:
        """Sum the gradients of `partial` parameters over the tensor group, in place.

        `gradients` must be a list: a None is replaced if another worker has a gradient.
        """
        assert isinstance(gradients, MutableSequence)
        indices = [index for index, update in enumerate(updates) if update.name in self.partial]
        if indices and self._tensor_group is not None:
            add_up(self._tensor_group, [update.tensor for update in updates], gradients, indices)

    def evaluate(self, share: Share, *, loss_only: bool = False) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        judge = self._without_gradients[loss_only]
        for micro_batch in share.micro_batches:
            with evaluation_code(self.draw.step, self._rank, loss_only=loss_only):
                add(sums, judge.metrics(self.forward, micro_batch, step=self.draw.step, loss_only=loss_only))
        return sums if self.is_reporting else {}

    def usage(self) -> Usage | None:
        if self._tensor_group is None:
            return None
        sent = self._tensor_group.own_bytes_sent - self._sent_before
        self._sent_before += sent
        return Usage(bytes_by_link={"tensor": sent})

    def close(self) -> None:
        return
