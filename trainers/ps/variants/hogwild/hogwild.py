"""Workers of HOGWILD: they are on one node and change the same parameters at any time, without a lock.

Recht, Re, Wright and Niu 2011, "Hogwild!: A lock-free approach to parallelizing stochastic gradient descent", algorithm
1: read the present values, compute a gradient, add its update to the values that it touches. Sparse gradients touch
only their rows, under SGD without momentum and weight decay; under other rules every value of the parameter moves.

The optimizer's state, if it has any, is in the shared memory too, and is also changed without a lock (Mnih et al. 2016,
"Asynchronous methods for deep reinforcement learning", section 4: shared statistics proved more robust than those that
each worker keeps for itself). Its updates can be lost like those of the values.

A share counts as done when its update begins. A worker that is killed during an update leaves some values changed and
others not, as if the other updates had been lost. The share is not computed again, so nothing is applied twice.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestray.platform.comm.channel.base import CLOSED_HERE, ChannelClosedError
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.errors import ClusterError, ConfigError, TrainingError
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.core.model_state import buffers_beside
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.optim.clipping import clip
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.ps.protocol.address import MEMORY_KEY, Address
from orchestray.trainers.ps.protocol.assignments import Compute, Order, Save
from orchestray.trainers.ps.protocol.buffers import Buffers, SharedBuffers
from orchestray.trainers.ps.protocol.grad_into_buffer import Pair
from orchestray.trainers.ps.protocol.messages import ANSWER, REQUEST, result, start
from orchestray.trainers.ps.protocol.partition import Partition, trainable
from orchestray.trainers.ps.protocol.requests import Request
from orchestray.trainers.ps.variants.hogwild.client import HogwildClient
from orchestray.trainers.ps.variants.hogwild.fused_low_rank_update import LowRankUpdate, add_product
from orchestray.trainers.ps.variants.hogwild.reading import read_together
from orchestray.trainers.ps.variants.hogwild.shared_values import Marks, Shape, SharedValues
from orchestray.trainers.ps.worker.worker import CentralWorker

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.data.stream import Share
    from orchestray.platform.run.checkpoint import CheckpointWriter
    from orchestray.trainers.config.settings import ReplicaSettings

_MEMORY_TIMEOUT_S = 60.0
_READ_AT_ONCE = 8
_ROOM = 64
"""Number of workers for which there is room in the memory, as some may come later."""


def shape_of(model: nn.Module, settings: ReplicaSettings, optimizer: Optimizer, buffers: Buffers) -> Shape:
    """Return the shape of the shared memory of a run.

    Args:
        model: model of the run.
        settings: settings of the run.
        optimizer: optimizer, which may be uninitialised.
        buffers: buffers of the model.
    """
    return Shape(
        Partition.of(model).parameters,
        trainable(model)[0][1].dtype,
        max(_ROOM, settings.layout.data),
        slots=tuple(optimizer.slots),
        step_dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32,
        num_floats=buffers.floats.numel(),
        num_integers=buffers.integers.numel(),
    )


def _descend(parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Make a step of plain SGD by the same kernel that the optimizer calls.

    For a small model the optimizer would take six times as long, only to find out that nothing else has to be done.
    """
    torch._fused_sgd_(
        parameters,
        gradients,
        [],
        lr=lr,
        weight_decay=0.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


class Updater:
    """An updater that applies gradients in place, by an optimizer's rule; the values may change at the same time."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer, *, by_rows: bool, grad_clip: float | None):
        """
        Args:
            parameters: parameters to change, with which the optimizer was initialised.
            optimizer: optimizer, whose state may be shared.
            by_rows: True if its rule is plain SGD, so that rows without a gradient keep their values.
            grad_clip: largest norm of a batch's gradient.
        """
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._by_rows = by_rows
        self._grad_clip = grad_clip
        self.takes_factors = self._is_plain = (
            # On a CPU the kernel of `_descend` leaves numbers of 16 bits as they are, without a word.
            by_rows and grad_clip is None and all(p.is_contiguous() and p.element_size() >= 4 for p in parameters)
        )
        """True if an update needs only a row of a gradient at a time."""
        self._forms = [(p.dtype, p.stride()) for p in parameters]

    @torch.no_grad()
    def apply(
        self,
        gradients: Sequence[Tensor | None],
        lr: float,
        weight: float = 1.0,
        factors: Mapping[int, Pair] | None = None,
    ) -> None:
        """Make one update.

        Args:
            gradients: gradient of each parameter, some of them sparse, None for those that have none; may be changed.
            lr: learning rate.
            weight: fraction of a batch that the gradients are from, which scales the norm they are clipped to.
            factors: factors of gradients that are None there, by place; only where `takes_factors`.
        """
        for index, pair in (factors or {}).items():
            add_product(self._parameters[index], pair, lambda rows, part: _descend([rows], [part], lr))
        if self._is_plain and self._all_alike(gradients):
            _descend(self._parameters, list(gradients), lr)
            return
        dense, rows = list(gradients), dict[int, tuple[Tensor, Tensor]]()
        for index, gradient in enumerate(gradients):
            if gradient is None or gradient.layout == torch.strided:
                continue
            if self._by_rows and gradient.sparse_dim() == 1:
                summed = gradient.coalesce()  # each row once
                rows[index], dense[index] = (summed.indices()[0], summed.values()), None
            else:
                dense[index] = gradient.to_dense()
        present = [*(g for g in dense if g is not None), *(values for _, values in rows.values() if values.numel())]
        if self._grad_clip is not None and present:
            clip(present, self._grad_clip * weight)
        self._optimizer.step(self._parameters, dense, lr)
        for index, (places, values) in rows.items():
            self._parameters[index].index_add_(0, places, values, alpha=-lr)

    def _all_alike(self, gradients: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
        """Return True if every parameter has a gradient with its dtype and strides."""
        for gradient, (dtype, stride) in zip(gradients, self._forms, strict=True):
            if gradient is None or gradient.layout != torch.strided:
                return False
            if gradient.dtype != dtype or gradient.stride() != stride:
                return False
        return True


class HogwildWorker(CentralWorker):
    """A worker that computes what the lead server orders, on parameters that all workers share, and changes them
    itself.
    """

    def __init__(self, task: Any, settings: ReplicaSettings, *rest: Any, device: torch.device | str = "cpu") -> None:
        """Take the same arguments as `CentralWorker`.

        Raises:
            ConfigError: the model is to be on a GPU.
        """
        if torch.device(device).type != "cpu":
            raise ConfigError(
                "strategy.exchange.transport: shared_memory is memory of CPUs; set resources.gpus_per_worker to 0, or "
                "use transport: channel"
            )
        super().__init__(task, settings, *rest, device=device)
        self.flat.detach()
        self._named = trainable(self.network.model)
        self._factors = LowRankUpdate(self.network.model, self._named)
        self._shared: SharedValues | None = None
        self._shared_buffers: SharedBuffers | None = None
        self._shares: dict[int, Share] = {}
        """Shares that were read ahead, by order."""
        self._marks: Marks

    @property
    def shared(self) -> SharedValues:
        """The shared memory of the run."""
        assert self._shared is not None
        return self._shared

    def attach(self, address: str) -> None:
        """Make the model's parameters those that the server shares at this address.

        Args:
            address: `SharedValues.address` of the server.

        Raises:
            ClusterError: the server is on another node, or its process is not visible.
            TrainingError: its model is another one.
        """
        settings, model = self.settings, self.network.model
        optimizer = make_optimizer(**settings.optimizer)
        shape = shape_of(model, settings, optimizer, Buffers.of(self._places))  # a copy: those of the model would move
        self._shared = shared = SharedValues.attach(address, shape)
        for view, (_, parameter) in zip(shared.views(shared.values), self._named, strict=True):
            parameter.data = view
        self.flat.values = shared.values
        self._shared_buffers = None if self._buffers is None else SharedBuffers(self._places, shared.buffers)
        optimizer.init((name, parameter.detach()) for name, parameter in self._named)
        shared.share_state(optimizer, [name for name, _ in self._named])
        self._optimizer = optimizer
        chosen = settings.optimizer
        is_plain = chosen["type"] == "sgd" and not chosen.get("momentum") and not chosen.get("weight_decay")
        parameters = [parameter.detach() for _, parameter in self._named]
        self._updater = Updater(parameters, optimizer, by_rows=is_plain, grad_clip=settings.grad_clip)

    def run(
        self,
        channels: Sequence[Channel],
        rank: int,
        *,
        writer: CheckpointWriter | None = None,
        faults: Faults | None = None,
        replace: Callable[[int, Exception], Channel] | None = None,
    ) -> str:
        """Do the same as `CentralWorker.run`, after `attach`.

        Raises:
            TrainingError: there are more workers than the memory has room for.
        """
        if rank >= self.shared.shape.num_workers:
            raise TrainingError(
                f"The memory that the workers share has room for {self.shared.shape.num_workers} of them, and this is "
                f"worker {rank}. Use fewer workers, or transport: channel."
            )
        self._faults = faults or Faults()
        client = HogwildClient(channels, self.partition, rank, self.shared.values)
        self._client = client
        self._shares.clear()
        client.hello(data=self.marks())
        self._marks = Marks(self.shared, rank)  # after the lead has read those of an earlier process
        return self._work(writer)

    @property
    def client(self) -> HogwildClient:
        """The connection to the lead server."""
        assert isinstance(self._client, HogwildClient)
        return self._client

    def pull(self, min_version: int) -> None:
        """Read the shared buffers; the model's parameters are the shared ones already."""
        self._read_buffers()

    def fetch(self, step: int) -> dict[str, Tensor]:
        """Return the plain model's tensors, which no worker changes any more."""
        self._read_buffers()
        return model_tensors(self.network.model)

    def _next(self) -> Order:
        return self.client.take()

    def _settle(self) -> list[Order]:
        return []

    def _leave(self) -> None:
        return

    def _compute(self, order: Compute, reader: ShareReader) -> list[Order]:
        """Compute a share's gradient, and apply it."""
        began_s = time.perf_counter()
        share = self._share_of(order, reader)
        read = self.shared.version()
        self._read_buffers()
        for _, parameter in self._named:
            parameter.grad = None
        marks, factors = self._marks, self._factors
        factors.begin(
            is_on=self._updater.takes_factors and not self._faults.plan.faults and len(share.micro_batches) == 1,
        )
        loss_sum = self._backward(order, share, self._assembler.draw)
        write = self.shared.version()
        if marks.is_expelled:
            raise ChannelClosedError(f"worker {self.client.worker} was given up by the lead server: {CLOSED_HERE}")
        marks.begin(order.order_id, loss_sum, read, write)
        part = order.num_samples / order.batch_samples
        if self._shared_buffers is not None:
            self._shared_buffers.add(part)
        gradients = [parameter.grad for _, parameter in self._named]
        kept = factors.take(gradients)
        self._updater.apply(gradients, self._rate(marks.reach(order.step), write - read), part, kept)
        marks.end()
        took_s = time.perf_counter() - began_s
        self._count(order, took_s)
        self.client.report(order, loss_sum, read, write, took_s)
        return []

    @contextlib.contextmanager
    def _weights_at_rest(self) -> Iterator[None]:
        """Have the model compute with a copy of the shared values."""
        shared = [parameter.data for _, parameter in self._named]
        try:
            for (_, parameter), value in zip(self._named, shared, strict=True):
                parameter.data = value.clone()
            yield
        finally:
            for (_, parameter), value in zip(self._named, shared, strict=True):
                parameter.data = value

    def _share_of(self, order: Compute, reader: ShareReader) -> Share:
        """Return the samples of an order.

        Short shares are read several at a time, while the code that reads them is in the processor's caches. After a
        model has been through its caches, reading one share alone takes twice as long.
        """
        if order.order_id not in self._shares:
            orders = [order, *self.client.upcoming(_READ_AT_ONCE - 1)]
            for one, share in zip(orders, read_together(reader, orders), strict=True):
                self._shares[one.order_id] = share
        return self._shares.pop(order.order_id)

    def _rate(self, step: int, staleness: int) -> float:
        lr = self._rates.at(step)
        return lr / (1 + staleness) if self.central.scale_by_staleness else lr

    def _read_buffers(self) -> None:
        """Set the model's buffers to the present shared ones."""
        if self._shared_buffers is not None:
            self._shared_buffers.read()

    def _save(self, order: Save, writer: CheckpointWriter | None) -> None:
        """Write the shared memory to a checkpoint; no worker changes it meanwhile."""
        if writer is not None:
            tensors, slots = self.fetch(order.step), self._optimizer.state_tensors()
            beside = buffers_beside(self.network.model)
            writer.save_async(order.step, tensors, slots, self.client.flush_reports(), resume=beside)
            writer.wait()
        self.client.saved(order)


def find_memory(worker: HogwildWorker, server: Address, channel: Channel) -> None:
    """Have a worker attach to the memory of a server.

    Args:
        worker: worker that attaches.
        server: address of the server.
        channel: channel to the server.

    Raises:
        ChannelClosedError: the server is lost.
        ClusterError: it is on another node, or its process is not visible.
    """
    timeout = timedelta(seconds=_MEMORY_TIMEOUT_S)
    try:
        store = dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=timeout)
        address = store.get(MEMORY_KEY).decode()
    except dist.DistError as error:
        raise ChannelClosedError(f"{server.name} did not learn where the parameters are: {error}") from error
    try:
        worker.attach(address)
    except ClusterError:
        # If the server has just died, its placement is not the cause: then this raises.
        start(channel, REQUEST, Request())
        result(channel.irecv(tag=ANSWER))
        raise
