"""Data parallelism with parameters, gradients and the optimizer's state sharded over the replicas: ZeRO stage 3.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5.3,
and 7.2.2 for the bytes, on PyTorch's FSDP2 (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", VLDB 2023). The parameters of a block are gathered when it is called, forward and again backward, and freed
after. Its gradients are reduce-scattered as soon as they are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.exchange import LocalTensor, OptimizedTensor
from orchestray.trainers.core.own_gradients import is_marked
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.exchange_base import ExchangeBase
from orchestray.trainers.sync.zero import fsdp2
from orchestray.trainers.sync.zero.fsdp_units import SMALLEST_UNIT_BYTES, unit_modules
from orchestray.trainers.sync.zero.reduce_scatter import AllGather, ReduceScatter, Regions
from orchestray.trainers.sync.zero.replicated import Replicated
from orchestray.trainers.sync.zero.row_sharding import can_be_cut
from orchestray.trainers.sync.zero.uneven_calls import Turns

_MAX_IN_FLIGHT = 2
"""Most units whose gradients are being reduced at once."""


class FullySharded(ExchangeBase):
    """The ZeRO-3 exchange: between steps a replica holds only its rank's rows (`torch.chunk`) of each parameter.

    Attaching changes how the model stores its parameters: the old ones are gone, and references to them should be
    dropped. The model must be called as a whole (its `forward`), and a unit's parameters exist only while that unit is
    called: see fsdp_units.py. `updates()`, `gradients()` and `held()` return plain tensors, this replica's rows. Scalar
    parameters and tensors without elements are not sharded.

    For every forward pass, backward pass and reduction of gradients, each of N replicas sends (N-1)/N of the bytes of
    the parameters. Rows are padded to a multiple of N. A step also sends one small all-reduce, and 8 (N-1) bytes before
    each operation. With these bytes replicas may run different numbers of passes and different parts of the model
    (uneven_calls.py). After forward passes without a backward one (validation), call `rest`.

    The replicas scale their losses by num_samples / batch_samples, so the gradients are plainly summed. A parameter
    that is not used by any replica has no gradient.

    Args:
        reduce_each: True to reduce the gradients of every micro-batch: 1/N of them is held at any time. False to add up
            whole gradients over a step's micro-batches and reduce them once: less is sent, more is held. The result is
            the same up to the order of additions.
        smallest_unit_bytes: modules with fewer bytes of parameters are gathered together with the root's own.
    """

    takes_complex = True

    def __init__(self, *, reduce_each: bool = True, smallest_unit_bytes: int = SMALLEST_UNIT_BYTES) -> None:
        super().__init__()
        self._reduce_each = reduce_each
        self._smallest_unit_bytes = smallest_unit_bytes
        self._model: nn.Module | None = None
        self._turns: Turns | None = None
        self._replicated: Replicated | None = None
        self._units: list[fsdp2.Unit] = []
        self._place: tuple[int, int] | None = None
        self._order: list[int] | None = []
        """Units in the order in which they are first gathered; None once it is known and set."""
        self._used: list[bool] = []
        self._used_anywhere: list[bool] = []
        self._in_flight: deque[tuple[int, Tensor, ReduceScatter]] = deque()
        self._parts: dict[int, Tensor] = {}
        """This replica's part of each unit's gradients, by the unit's number."""

    def run_report(self) -> dict[str, int]:
        """Return how many numbers of the model this replica `holds` between steps, `of` how many; empty if of all."""
        if not self._units:
            return {}
        pieces = [held.piece for held in self._held.values()]
        return {
            "holds": sum(held.tensor.numel() for held in self._held.values()),
            "of": sum(math.prod(piece.shape) for piece in pieces),
        }

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        place = (collective.rank, collective.size)
        if model is self._model and self._units and place != self._place:
            raise TrainingError(
                f"The model was sharded for worker {self._place} and cannot be for worker {place}: build it anew."
            )
        is_sharded = model is self._model and bool(self._units)
        self.detach()
        self._collective = collective
        self._turns = Turns(collective, self._serve)
        if not is_sharded:
            self._take(model, collective, pieces)
        if collective.size > 1:
            whole = [parameter for parameter in self._parameters if not can_be_cut(parameter)]
            self._replicated = Replicated(self._parameters, whole, collective)
        self._used, self._used_anywhere = [False] * len(self._parameters), [False] * len(self._parameters)

    def _take(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None) -> None:
        self._model, self._units, self._place = model, [], (collective.rank, collective.size)
        self._order = []
        self._hold(model, collective, pieces)
        if collective.size > 1:
            whole = {parameter for parameter in model.parameters() if not can_be_cut(parameter)}
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()  # FSDP2 shards only contiguous ones
            if len(whole) < len(list(model.parameters())):
                # Gradients that a forward pass takes go back through all of it, whose parameters must be there.
                units = [] if is_marked(model) else unit_modules(model, self._smallest_unit_bytes)
                comms = fsdp2.Comms(self._gather, self._reduce)
                self._units = fsdp2.shard(model, units, whole, collective, comms)
            self._describe(model, pieces or {})
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        order = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for unit in self._units:
            unit.watch(lambda parameter: self._note_used(order[id(parameter)]))

    def _describe(self, model: nn.Module, pieces: Mapping[str, TensorSlice]) -> None:
        """Set what this replica holds and updates, now that parameters are stored as shards."""
        shards = {id(shard.parameter): shard for unit in self._units for shard in unit.shards}
        named = dict(model.named_parameters(remove_duplicate=False))
        rank, size = self._place or (0, 1)
        for name, held in self._held.items():
            if name in named and (shard := shards.get(id(named[name]))) is not None:
                num_rows = held.piece.local_shape[0]
                each = -(-num_rows // size)
                rows = (min(rank * each, num_rows), min((rank + 1) * each, num_rows))
                piece = (pieces.get(name) or TensorSlice.whole(name, held.piece.shape)).narrow(0, rows)
                self._held[name] = LocalTensor(shard.local, piece)
        self._updates = [
            OptimizedTensor(update.name, self._held[update.name].tensor, self._held[update.name].piece)
            if id(named[update.name]) in shards
            else update
            for update in self._updates
        ]

    def detach(self) -> None:
        self._forget()
        parameters = self._parameters
        super().detach()
        self._parameters = parameters  # those of a model that stays sharded, which may be attached again
        if self._model is not None and self._units:
            fsdp2.reset(self._model)
        self._turns = self._replicated = None

    def gradients(self) -> list[Tensor | None]:
        replicated = self._replicated
        if replicated is None:
            return super().gradients()
        views = {
            id(shard.parameter): view
            for unit in self._units
            if unit.number in self._parts
            for shard, view in zip(unit.trained, unit.reduced(self._parts[unit.number]), strict=True)
        }
        found: list[Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            if not self._used_anywhere[index]:
                found.append(None)
            else:
                found.append(views[id(parameter)] if id(parameter) in views else replicated.gradient(index))
        return found

    def before_step(self, step: int) -> None:
        self._forget()
        super().before_step(step)
        self._used = [False] * len(self._parameters)
        self._used_anywhere = [False] * len(self._parameters)

    def begin_backward(self, last_micro_batch: bool) -> None:
        if self._units and self._model is not None:
            fsdp2.set_gradient_sync(self._model, sync=self._reduce_each or last_micro_batch)

    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        if self._replicated is None:
            return self._alone(extras)
        self.rest()
        while self._in_flight:
            self._wait_oldest()
        self._replicated.start(self._used, extras)
        self._used_anywhere, sums = self._replicated.wait()
        return sums[: len(extras)]

    def rest(self) -> None:
        """Take part in the other replicas' passes until they rest as well: this replica runs no more for now."""
        if self._turns is not None and self._units:
            self._turns.rest()
            for unit in self._units:
                unit.settle()
            if self._order:
                # The order of the first passes; if a later pass takes another branch, a prefetch is wasted.
                fsdp2.prefetch([self._units[number] for number in self._order])
                self._order = None

    def _forget(self) -> None:
        """Drop the gradients, and those in flight."""
        self._in_flight.clear()
        self._parts.clear()
        for unit in self._units:
            unit.clear()

    def _note_used(self, index: int) -> None:
        self._used[index] = True

    # -- operations of units, on all replicas in turn: code 2 number + 1 gathers, 2 number + 2 reduces ----------------

    def _gather(self, number: int, whole: Tensor) -> AllGather:
        if self._order is not None and number not in self._order and not fsdp2.is_backward():
            self._order.append(number)
        return self._joined_turns().take(2 * number + 1, lambda: self._start_gather(whole))

    def _reduce(self, number: int, whole: Tensor, part: Tensor) -> ReduceScatter:
        return self._joined_turns().take(2 * number + 2, lambda: self._start_reduce(number, whole, part))

    def _serve(self, code: int) -> None:
        number, kind = divmod(code - 1, 2)
        unit, size = self._units[number], self.joined().size
        if kind == 0:
            self._start_gather(unit.input(size)).wait()
        else:
            part = unit.trained[0].padded.new_empty(unit.num_reduced())
            self._start_reduce(number, part.new_zeros(size * part.numel()), part)

    def _joined_turns(self) -> Turns:
        if self._turns is None:
            raise TrainingError("The model is sharded, and the exchange that gathers its parameters is not attached.")
        return self._turns

    def _start_gather(self, whole: Tensor) -> AllGather:
        collective = self.joined()
        numel = whole.numel() // collective.size
        return AllGather(collective, Regions([numel] * collective.size), whole)

    def _start_reduce(self, number: int, whole: Tensor, part: Tensor) -> ReduceScatter:
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._wait_oldest()
        collective = self.joined()
        regions = Regions([part.numel()] * collective.size)
        reduction = ReduceScatter(collective, regions, whole, part, lambda numel, like: like.new_empty(numel))
        self._in_flight.append((number, part, reduction))
        # FSDP2 would add to an earlier micro-batch's gradient at once; here it is added when this one has come.
        for shard in self._units[number].trained:
            shard.parameter.grad = None
        return reduction

    def _wait_oldest(self) -> None:
        number, part, reduction = self._in_flight[0]
        reduction.wait()
        self._in_flight.popleft()
        if number in self._parts:
            part += self._parts[number]
        self._parts[number] = part
        for shard in self._units[number].trained:
            shard.parameter.grad = None
