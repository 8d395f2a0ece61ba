"""Data parallelism with parameters, gradients and the optimizer's state sharded over the replicas: ZeRO stage 3.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5.3,
and 7.2.2 for the bytes, on PyTorch's FSDP2 (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", VLDB 2023). The parameters of a block are gathered when it is called, forward and again backward, and freed
after; its gradients are reduce-scattered as soon as they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.exchange import fsdp2
from orchestray.trainers.exchange.attached import Attached
from orchestray.trainers.exchange.base import Held, Update
from orchestray.trainers.exchange.cuts import can_be_cut
from orchestray.trainers.exchange.holdings import held_tensors, updated_whole
from orchestray.trainers.exchange.replicated import Replicated
from orchestray.trainers.exchange.scatter import AllGather, ReduceScatter, Regions
from orchestray.trainers.exchange.turns import Turns
from orchestray.trainers.exchange.units import SMALLEST_UNIT_BYTES, unit_modules
from orchestray.trainers.layout.pieces import Piece

_MAX_IN_FLIGHT = 2
"""Units whose gradients are being reduced at once."""


class FullySharded(Attached):
    """ZeRO-3. Between steps a replica holds, of each parameter, `torch.chunk`'s rows of its rank, and nothing else.

    Attaching changes how the model stores its parameters: those it had are gone, and what held them should let go of
    them. The model must be called as a whole (its `forward`), and a unit's parameters are there only while that unit is
    called: see units.py. `updates()`, `gradients()` and `held()` give plain tensors, this replica's rows. Scalar
    parameters and tensors without elements are not sharded.

    Sent per step by each of N replicas: (N-1)/N of the bytes of the parameters (rows padded to a multiple of N) for
    each forward pass, each backward pass, and each time gradients are reduced; beside them one small all-reduce, and 8
    (N-1) bytes before each operation, by which replicas may run different numbers of passes and different parts of the
    model (turns.py). After forward passes without a backward one (validation), call `rest`.

    The replicas scale their losses by num_samples / batch_samples, so the gradients are plainly summed. A parameter
    no replica used has no gradient.

    Args:
        reduce_each: reduce the gradients of every micro-batch: what is held is 1/N of them at any time. False: add up
            whole gradients over a step's micro-batches and reduce them once: less is sent, more is held. The result is
            the same up to the order of additions.
        smallest_unit_bytes: modules with fewer bytes of parameters are gathered together with the root's own.
    """

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
        """Units as they are first gathered, until it is known."""
        self._used: list[bool] = []
        self._used_anywhere: list[bool] = []
        self._in_flight: deque[tuple[int, Tensor, ReduceScatter]] = deque()
        self._parts: dict[int, Tensor] = {}
        """Of each unit by number: this replica's part of its gradients."""

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        place = (collective.rank, collective.size)
        if model is self._model and self._units and place != self._place:
            raise TrainingError(
                f"The model was sharded for worker {self._place} and cannot be for worker {place}: build it anew."
            )
        is_sharded = model is self._model and bool(self._units)
        self.detach()
        self._collective = collective
        self._turns = Turns(collective, self._serve, self._count)
        if not is_sharded:
            self._take(model, collective, pieces)
        if collective.size > 1:
            whole = [parameter for parameter in self._parameters if not can_be_cut(parameter)]
            self._replicated = Replicated(self._parameters, whole, collective)
        self._used, self._used_anywhere = [False] * len(self._parameters), [False] * len(self._parameters)

    def _take(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None) -> None:
        self._model, self._units, self._place = model, [], (collective.rank, collective.size)
        self._order = []
        self._held = held_tensors(model, pieces, is_counted=collective.rank == 0)
        self._updates = updated_whole(model, self._held)
        if collective.size > 1:
            whole = {parameter for parameter in model.parameters() if not can_be_cut(parameter)}
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()  # FSDP2 shards no others
            if len(whole) < len(list(model.parameters())):
                units = unit_modules(model, self._smallest_unit_bytes)
                comms = fsdp2.Comms(self._gather, self._reduce)
                self._units = fsdp2.shard(model, units, whole, collective, comms)
            self._describe(model, pieces or {})
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        order = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for unit in self._units:
            unit.watch(lambda parameter: self._note_used(order[id(parameter)]))

    def _describe(self, model: nn.Module, pieces: Mapping[str, Piece]) -> None:
        """What this replica holds and updates, now that parameters are stored as shards."""
        shards = {id(shard.parameter): shard for unit in self._units for shard in unit.shards}
        named = dict(model.named_parameters(remove_duplicate=False))
        rank, size = self._place or (0, 1)
        for name, held in self._held.items():
            if name in named and (shard := shards.get(id(named[name]))) is not None:
                num_rows = held.piece.local_shape[0]
                each = -(-num_rows // size)
                rows = (min(rank * each, num_rows), min((rank + 1) * each, num_rows))
                piece = (pieces.get(name) or Piece.whole(name, held.piece.shape)).narrow(0, rows)
                self._held[name] = Held(shard.local, piece)
        self._updates = [
            Update(update.name, self._held[update.name].tensor, self._held[update.name].piece)
            if id(named[update.name]) in shards
            else update
            for update in self._updates
        ]

    def detach(self) -> None:
        self._forget()
        super().detach()
        if self._model is not None and self._units:
            fsdp2.reset(self._model)
        self._turns = self._replicated = None

    def gradients(self) -> list[Tensor | None]:
        replicated = self._replicated
        if replicated is None:
            return [parameter.grad for parameter in self._parameters]
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

    def finish(self, extras: Sequence[float]) -> list[float]:
        self._check(extras)
        if self._replicated is None:
            return [float(extra) for extra in extras]
        self.rest()
        while self._in_flight:
            self._wait_oldest()
        self._count(self._replicated.start(self._used, extras))
        sums, self._used_anywhere = self._replicated.wait()
        return sums[: len(extras)]

    def rest(self) -> None:
        """This replica runs no more passes for now: take part in the others' until they have come here as well."""
        if self._turns is not None and self._units:
            self._turns.rest()
            for unit in self._units:
                unit.settle()
            if self._order:
                # The order of the first passes; where another pass takes another branch, a gathering is in vain.
                fsdp2.prefetch([self._units[number] for number in self._order])
                self._order = None

    def _forget(self) -> None:
        """Drop the gradients, and what is under way."""
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
        unit, size = self._units[number], self._joined().size
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
        collective = self._joined()
        numel = whole.numel() // collective.size
        gather = AllGather(collective, Regions([numel] * collective.size), whole)
        self._count(gather.sent_bytes)
        return gather

    def _start_reduce(self, number: int, whole: Tensor, part: Tensor) -> ReduceScatter:
        if len(self._in_flight) == _MAX_IN_FLIGHT:
            self._wait_oldest()
        collective = self._joined()
        regions = Regions([part.numel()] * collective.size)
        reduction = ReduceScatter(collective, regions, whole, part, lambda numel, like: like.new_empty(numel))
        self._count(reduction.sent_bytes)
        self._in_flight.append((number, part, reduction))
        # FSDP2 would add to an earlier micro-batch's gradient at once; it is added when this one is there.
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
