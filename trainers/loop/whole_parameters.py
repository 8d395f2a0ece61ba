"""Whole parameters for an optimizer that has to see them, where workers hold parts.

Each parameter that is cut has an owner among the workers that hold parts of it, as matrices have in Distributed Shampoo
(Shi et al. 2023, "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.sparse import dense

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.optim.clipping import SpreadSums

_Messages = dict[int, list[Tensor]]
"""Tensors to or from each worker, by its rank."""


class _Part(NamedTuple):
    rank: int
    """Rank of the worker that holds it."""
    place: int
    """Place among the parameters of that worker."""
    piece: TensorSlice


class _Cut(NamedTuple):
    owner: _Part
    """Part of the worker that moves the whole parameter; it may be an empty one."""
    parts: list[_Part]
    """All parts, by rank; those that are counted cover the parameter."""


def with_whole_parameters(optimizer: Optimizer, sums: SpreadSums) -> Optimizer:
    """Return the optimizer, made fit for parts of parameters if it has to see whole ones.

    Args:
        optimizer: optimizer of this worker, which `init` follows for.
        sums: sums over the workers that hold the parts, all of which call.
    """

    def wrap(one: Optimizer) -> Optimizer:
        plain = one.optimizer if isinstance(one, WholeParameters) else one
        return plain if plain.takes_parts or plain.mixes_parameters else WholeParameters(plain, sums)

    return optimizer.replaced(wrap)


class WholeParameters(Optimizer):
    """An optimizer that moves whole parameters, of which workers hold parts.

    In each step the holders of a parameter send its owner their parts of it and of its gradient. The owner moves the
    whole, and sends the parts back. It alone has the optimizer's state for this parameter. Parameters that are whole on
    every worker are moved by each.
    """

    def __init__(self, optimizer: Optimizer, sums: SpreadSums) -> None:
        """
        Args:
            optimizer: optimizer to give whole parameters to.
            sums: sums over the workers that hold the parts. All of them call `init` at the same time.
        """
        super().__init__()
        self.optimizer = optimizer
        self.slots, self.whole_slots = optimizer.slots, optimizer.whole_slots
        self._piece_of, self._holders, self._sums = sums.piece_of, sums.holders, sums
        self._cuts: list[_Cut] = []
        """Parameters that are cut anywhere, in the same order on all workers."""
        self._wholes: dict[int, Tensor] = {}
        """Memory of each whole parameter that this worker owns, by the place of its part."""
        self._moved: list[int] = []
        """Places of the parameters that the optimizer has here."""

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._names, self._templates = [name for name, _ in named], [parameter for _, parameter in named]
        self._cuts = self._planned()
        rank = self._holders.rank
        self._wholes = {
            cut.owner.place: self._templates[cut.owner.place].new_zeros(cut.owner.piece.shape)
            for cut in self._cuts
            if cut.owner.rank == rank
        }
        is_cut = {part.place for cut in self._cuts for part in cut.parts if part.rank == rank}
        whole = [self._piece_of[name].is_whole for name in self._names]
        self._moved = [
            place for place in range(len(named)) if place in self._wholes or (whole[place] and place not in is_cut)
        ]
        self.optimizer.init([(self._names[place], self._wholes.get(place, named[place][1])) for place in self._moved])

    def _planned(self) -> list[_Cut]:
        """Return the parameters that are cut, or apart from what they move with; owners have about as many elements."""
        own = []
        for name in self._names:
            piece, first = self._piece_of[name], self._piece_of[self.optimizer.moves_with(name)]
            own.append([first.name, piece.name, piece.shape, piece.ranges, piece.is_counted])
        units: dict[str, dict[str, list[_Part]]] = {}  # parameters that move together, with their parts
        for rank, rows in enumerate(objects.gather_json(self._holders, own)):
            for place, (first, name, shape, ranges, is_counted) in enumerate(rows):
                held = tuple(tuple((start, stop) for start, stop in of_dimension) for of_dimension in ranges)
                part = _Part(rank, place, TensorSlice(name, tuple(shape), held, is_counted))
                units.setdefault(first, {}).setdefault(name, []).append(part)
        cuts = []
        loads = [0] * self._holders.size
        for unit in sorted(units.values(), key=lambda unit: -_numel(unit)):
            filled = {name: [part for part in parts if part.piece.numel] for name, parts in unit.items()}
            holders = {frozenset(part.rank for part in parts) for parts in filled.values()}
            if len(holders) > 1 or any(not part.piece.is_whole for parts in filled.values() for part in parts):
                rank = min(frozenset().union(*holders), key=lambda rank: (loads[rank], rank))
                loads[rank] += _numel(unit)
                for name, parts in unit.items():
                    cuts.append(_Cut(next(part for part in parts if part.rank == rank), filled[name]))
        return cuts

    def observe(self, *given: Any, **named: Any) -> None:
        self.optimizer.observe(*given, **named)

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        self.optimizer.join(replicas, is_alike=is_alike and not self._cuts)

    def begin_step(self, step: int, num_samples: int, batch_samples: int) -> None:
        self.optimizer.begin_step(step, num_samples, batch_samples)

    def _totals(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """Return the sums over all parameters, each counted by its owner, or by the worker whose whole one counts."""
        owned = {self._names[place] for place in self._wholes}
        counted = [name in owned or self._piece_of[name].is_counted for name in names]
        return self._sums.present(names, squares, counted).sum(dim=1)

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        moved = {place: (params[place], grads[place]) for place in self._moved} | self._gathered(params, grads)
        self.optimizer.total_reducer = self._totals
        self.optimizer.step([moved[place][0] for place in self._moved], [moved[place][1] for place in self._moved], lr)
        self._give_back(params)

    def _gathered(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Return the whole parameters that this worker owns, and their gradients."""
        rank = self._holders.rank
        values: _Messages = {}
        sent: _Messages = {}
        shapes: _Messages = {}
        like: _Messages = {}
        for owner, part in self._routes():
            if part.rank == rank:
                parameter, grad = params[part.place], grads[part.place]
                is_used = parameter.new_tensor([grad is not None])
                given = torch.zeros_like(parameter) if grad is None else dense(grad).to(parameter.dtype)
                values.setdefault(owner.rank, []).append(parameter)
                sent.setdefault(owner.rank, []).extend((given, is_used))
            if owner.rank == rank:
                empty = self._wholes[owner.place].new_empty(part.piece.local_shape)
                shapes.setdefault(part.rank, []).append(empty)
                like.setdefault(part.rank, []).extend((empty, empty.new_empty(1)))
        # Each in a message of its own: a dry run, which takes other messages for these, then mixes no numbers up.
        arrived, arrived_grads = self._exchanged(values, shapes), self._exchanged(sent, like)
        gradients = {place: torch.zeros_like(whole) for place, whole in self._wholes.items()}
        used = set()
        for owner, part in self._routes():
            if owner.rank == rank:
                part.piece.put(self._wholes[owner.place], next(arrived[part.rank]))
                part.piece.put(gradients[owner.place], next(arrived_grads[part.rank]))
                if bool(next(arrived_grads[part.rank])):
                    used.add(owner.place)
        return {place: (whole, gradients[place] if place in used else None) for place, whole in self._wholes.items()}

    def _give_back(self, params: Sequence[Tensor]) -> None:
        """Send each worker its parts of the whole parameters, which take the place of the old ones."""
        rank = self._holders.rank
        send: _Messages = {}
        receive: _Messages = {}
        targets = []
        for owner, part in self._routes(all_parts=True):
            if owner.rank == rank:
                send.setdefault(part.rank, []).append(part.piece.take(self._wholes[owner.place]))
            if part.rank == rank:
                receive.setdefault(owner.rank, []).append(params[part.place])
                targets.append((owner.rank, params[part.place]))
        arrived = self._exchanged(send, receive)
        for source, parameter in targets:
            parameter.detach().copy_(next(arrived[source]))

    def _routes(self, *, all_parts: bool = False) -> Iterator[tuple[_Part, _Part]]:
        """Yield owner and part of each counted part, or of all, in the same order on all workers."""
        for cut in self._cuts:
            for part in cut.parts:
                if all_parts or part.piece.is_counted:
                    yield cut.owner, part

    def _exchanged(self, send: _Messages, receive: _Messages) -> dict[int, Iterator[Tensor]]:
        """Send tensors, one message to each worker, and return those that come, by their worker.

        Args:
            send: tensors to send.
            receive: tensors of the shapes and types of those to come, in the order in which they are sent.
        """
        rank = self._holders.rank
        out = {peer: _bytes_of(tensors) for peer, tensors in send.items() if peer != rank}
        into = {
            peer: torch.empty(sum(tensor.nbytes for tensor in like), dtype=torch.uint8, device=like[0].device)
            for peer, like in receive.items()
            if peer != rank
        }
        self._holders.start_exchange(out, into).wait()
        arrived = {peer: iter(_tensors_of(flat, receive[peer])) for peer, flat in into.items()}
        return arrived | {rank: iter(send.get(rank, ()))}

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        """Do nothing: the other optimizer does it."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def slots_of(self, name: str) -> tuple[str, ...]:
        return self.optimizer.slots_of(name) if self._names.index(name) in self._moved else ()

    def slot_piece(self, name: str, slot: str, piece: TensorSlice) -> TensorSlice:
        is_owned = self._names.index(name) in self._wholes
        held = TensorSlice.whole(piece.name, piece.shape) if is_owned else piece
        return self.optimizer.slot_piece(name, slot, held)

    def step_metrics(self) -> dict[str, float]:
        return self.optimizer.step_metrics()

    def state_tensors(self) -> dict[str, Tensor]:
        return self.optimizer.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.optimizer.load_state_tensors(tensors)


def _numel(unit: Mapping[str, Sequence[_Part]]) -> int:
    """Return the number of elements of parameters that move together."""
    return sum(math.prod(parts[0].piece.shape) for parts in unit.values())


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _tensors_of(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    parts = flat.split_with_sizes([tensor.nbytes for tensor in like])
    for part, tensor in zip(parts, like, strict=True):
        yield part.clone().view(tensor.dtype).view(tensor.shape)  # cloned, as a part may begin at any byte
