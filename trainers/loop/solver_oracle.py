"""The loss of a batch as a function of the weights, with its derivatives, summed over the replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.forward import scalar, user_code
from orchestray.trainers.core.rng import seed_pass
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.solvers.admm import Loss, Samples, kind_of_loss
from orchestray.trainers.solvers.base import Product

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestray.platform.data.stream import MicroBatch, SampleStream, Share
    from orchestray.platform.task import Batch
    from orchestray.trainers.parallel.whole_model import WholeNetwork

_HIDDEN = (
    "The model's outputs hide their tensors, from which the Gauss-Newton matrix is computed. Have the model return "
    "them in a tuple, a list or a dict, or set train.solver.curvature to hessian if the solver has this key."
)
_ROUNDINGS = 64.0
"""Roundings of the weights' data type by which two values of a loss may differ."""


class SharedOracle:
    """An `Oracle` on the weights of a model, of which each replica holds a copy and computes on its share of the batch.

    Each method moves the weights of the model to where it is asked for. Sums over the replicas are float64, and the
    same bits on each.
    """

    def __init__(self, network: WholeNetwork, replicas: Collective, stream: SampleStream, rank: int) -> None:
        """
        Args:
            network: the model, with the pass through it.
            replicas: the workers that share a batch.
            stream: the training samples as this replica sees them.
            rank: rank of this worker, for messages.
        """
        self._network, self._replicas, self._stream, self._rank = network, replicas, stream, rank
        self._parameters = [p for p in network.model.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self._parameters]
        self._share: Share | None = None
        self._step = 0
        largest = max((torch.finfo(p.dtype).eps for p in self._parameters), default=0.0)
        self.resolution = _ROUNDINGS * largest
        self.num_batches = stream.steps_per_epoch

    def see(self, share: Share, step: int) -> None:
        """Take the loss of another batch.

        Args:
            share: this replica's share of it.
            step: number of the step.
        """
        self._share, self._step = share, step

    def weights(self) -> Tensor:
        """Return a copy of the weights as one vector, float64 [n]."""
        return self._flat([parameter.detach() for parameter in self._parameters])

    @torch.no_grad()
    def place(self, x: Tensor) -> None:
        """Make a vector the weights of the model."""
        for parameter, part in zip(self._parameters, torch.split(x, self._sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    # -- the function and its derivatives ------------------------------------------------------------------------------

    def value(self, x: Tensor) -> float:
        self.place(x)
        total = x.new_zeros(1)
        with torch.no_grad(), self._user_code():
            for micro_batch, fraction in self._parts():
                total += fraction * self._outputs_and_loss(micro_batch)[1].double()
        return float(self.summed(total))

    def gradient(self, x: Tensor) -> tuple[float, Tensor]:
        self.place(x)
        sums = self.summed(self._gradient_and_value(self._parts(), len(x)))
        return float(sums[-1]), sums[:-1]

    def hessian(self, x: Tensor) -> Product:
        self.place(x)
        held = []
        for micro_batch, fraction in self._parts():
            with self._user_code(), _twice_differentiable():
                loss = self._outputs_and_loss(micro_batch)[1]
                gradients = _derivatives([loss], self._parameters, None, create_graph=True)
            held.append((fraction, gradients))

        def product(vector: Tensor) -> Tensor:
            total, parts = torch.zeros_like(vector), self._cut(vector)
            for fraction, gradients in held:
                with self._user_code():
                    total += fraction * self._flat(_derivatives(gradients, self._parameters, parts))
            return self.summed(total)

        return product

    def gauss_newton(self, x: Tensor) -> Product:
        self.place(x)
        held: list[tuple[float, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]] = []
        for micro_batch, fraction in self._parts():
            with self._user_code(), _twice_differentiable():
                outputs, batch = self._network.forward.outputs(micro_batch.batch)
                if not (ends := [end for end in tensors_in(outputs) if end.requires_grad]):
                    raise TrainingError(_HIDDEN)
                # Outputs may be computed from each other: the loss is that of copies, which do not depend on others.
                copies = map_tensors(lambda end: end.detach().requires_grad_(end.requires_grad), outputs)
                leaves = [copy for copy in tensors_in(copies) if copy.requires_grad]
                loss = self._loss(copies, batch)
                of_loss = _derivatives([loss], leaves, None, create_graph=True)
                # J^T u is linear in u, so the derivative of its product with v is J v.
                dual = [torch.zeros_like(end, requires_grad=True) for end in ends]
                transposed = _derivatives(ends, self._parameters, dual, create_graph=True)
            held.append((fraction, ends, leaves, of_loss, dual, transposed))

        def product(vector: Tensor) -> Tensor:
            total, parts = torch.zeros_like(vector), self._cut(vector)
            for fraction, ends, leaves, of_loss, dual, transposed in held:
                with self._user_code():
                    moved = _derivatives(transposed, dual, parts)
                    bent = _derivatives(of_loss, leaves, moved)
                    total += fraction * self._flat(_derivatives(ends, self._parameters, bent))
            return self.summed(total)

        return product

    def whole_gradient(self, x: Tensor) -> Tensor:
        self.place(x)
        sums = x.new_zeros(len(x) + 2)
        with self._stream.epoch(0) as shares:
            for share in shares:
                parts = ((each, each.weight) for each in self._seeded(share.micro_batches) if each.weight)
                sums[:-1] += self._gradient_and_value(parts, len(x))
                sums[-1] += share.weight
        sums = self.summed(sums)
        return sums[:-2] / sums[-1]

    def samples(self) -> Samples:
        """Return this replica's samples of the batch; all replicas call, and each has some.

        Raises:
            ConfigError: the task's loss is another one than cross-entropy or the squared error, or is weighted.
        """
        assert self._share is not None
        forward = self._network.forward
        inputs, targets, rows, kinds = [], [], [], set[Loss]()
        for micro_batch in self._share.micro_batches:
            with torch.no_grad(), self._user_code():
                outputs, loss = self._outputs_and_loss(micro_batch)
                batch = forward.place(micro_batch.batch)
            kinds.add(kind_of_loss(outputs, batch.get("targets"), float(loss), micro_batch.own_weight))
            inputs.append(batch["inputs"].double())
            targets.append(batch["targets"])
            rows.append(torch.from_numpy(micro_batch.sample_ids))
        wanted = torch.cat(targets)
        kind = kinds.pop()
        if kind == "squared_error":
            wanted = wanted.double().reshape(len(wanted), -1)
        return Samples(torch.cat(inputs), wanted, torch.cat(rows).to(wanted.device), kind)

    def summed(self, tensor: Tensor) -> Tensor:
        if self._replicas.size > 1:
            self._replicas.all_reduce(tensor)
        return tensor

    # -- passes --------------------------------------------------------------------------------------------------------

    def _gradient_and_value(self, parts: Iterator[tuple[MicroBatch, float]], size: int) -> Tensor:
        """Return the sum of the gradients of weighted micro-batches, and behind it that of their losses, [size + 1]."""
        sums = torch.zeros(size + 1, dtype=torch.float64, device=self._device)
        for micro_batch, weight in parts:
            with self._user_code():
                loss = self._outputs_and_loss(micro_batch)[1]
                sums[:-1] += weight * self._flat(_derivatives([loss], self._parameters, None))
                sums[-1] += weight * loss.detach().double()
        return sums

    def _parts(self) -> Iterator[tuple[MicroBatch, float]]:
        """Yield this replica's micro-batches that count, each with the part of the batch that it is."""
        assert self._share is not None
        for micro_batch in self._seeded(self._share.micro_batches):
            if micro_batch.weight:
                yield micro_batch, micro_batch.weight / self._share.batch_weight

    def _seeded(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches, with random numbers that depend on the step and on the micro-batch before each."""
        for index, micro_batch in enumerate(micro_batches):
            self._network.draw.micro_batch = index
            seed_pass(self._network.draw, self._network.forward.device)
            yield micro_batch

    def _outputs_and_loss(self, micro_batch: MicroBatch) -> tuple[Any, Tensor]:
        """Return the model's outputs for a micro-batch, and the mean loss over it, which need not be finite."""
        outputs, batch = self._network.forward.outputs(micro_batch.batch)
        return outputs, self._loss(outputs, batch)

    def _loss(self, outputs: Any, batch: Batch) -> Tensor:
        return scalar(self._network.forward.loss_of(outputs, batch, step=self._step))

    def _user_code(self) -> user_code:
        return user_code(self._step, self._rank)

    # -- vectors -------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([dense(tensor).reshape(-1).double() for tensor in tensors])

    def _cut(self, vector: Tensor) -> list[Tensor]:
        """Return a vector as tensors like the parameters."""
        parts = zip(self._parameters, torch.split(vector, self._sizes), strict=True)
        return [part.view_as(parameter).to(parameter.dtype) for parameter, part in parts]


def _twice_differentiable() -> AbstractContextManager[None]:
    """Return the context of passes that are differentiated twice, which torch cannot do with fused attention."""
    return sdpa_kernel(SDPBackend.MATH)


def _derivatives(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor] | None, *, create_graph: bool = False
) -> list[Tensor]:
    """Return the derivatives of the sum of outputs times weights, 0 where they do not depend on an input.

    The graph is kept where weights are given, for other ones.
    """
    chosen = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not chosen:
        return [torch.zeros_like(each) for each in inputs]
    return list(
        torch.autograd.grad(
            [outputs[index] for index in chosen],
            list(inputs),
            None if weights is None else [weights[index] for index in chosen],
            retain_graph=create_graph or weights is not None,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    )
