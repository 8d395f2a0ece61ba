"""K-FAC: steps by the inverse of a curvature whose layers are Kronecker products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError, ConfigError, OrchestrayError
from orchestray.trainers.optim.inverse_owners import Owners, assign_owners, deliver, inversion_cost, owner_for
from orchestray.trainers.optim.kronecker import Factors, LayerSums, damped_inverses, factors_of, is_factored, stepped
from orchestray.trainers.optim.optimizers import SGD
from orchestray.trainers.optim.sparse import dense, is_sparse

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective

_COUNT = "statistics_step"
_RUNNING = ("input_factor", "output_factor")
_INVERTED = ("inverted_input_factor", "inverted_output_factor")
"""The slots of the factors whose inverses are in use, saved where the running ones have moved on since."""


@dataclass(frozen=True)
class _Curvature:
    """What is known of a layer between two steps."""

    num_steps: int = 0
    """Number of steps that moved the layer."""
    running: Factors | None = None
    """Running averages of the factors; None: the layer was never called as a module."""
    inverted: Factors | None = None
    """The averages as they were when they were last inverted."""


@dataclass
class _Layer:
    """A layer that is moved by its curvature."""

    name: str
    """Name of its weight, under which its state is saved."""
    weight: int
    """Place of its weight among the parameters."""
    bias: int | None
    sums: LayerSums
    known: _Curvature = _Curvature()
    owners: Owners = (0,)
    """Replicas that hold the inverses."""
    inverses: Factors | None = None
    """Inverses of `known.inverted`; None: they are on other replicas, or have to be computed."""
    must_invert: bool = True
    """True if no replica has the inverses of `known.inverted`."""

    def is_used(self, grads: Sequence[Tensor | None]) -> bool:
        return grads[self.weight] is not None and (self.bias is None or grads[self.bias] is not None)


class KFAC(SGD):
    """K-FAC (Martens and Grosse 2015, Grosse and Martens 2016), with the momentum of SGD on its steps.

    For a weight matrix W, bias included, with gradient V, inputs a and output gradients g:

        A <- d A + (1 - d) mean(a a^T),   G <- d G + (1 - d) mean(g g^T),   d = min(1 - 1/k, decay)
        U = (G + sqrt(damping)/pi I)^-1 V (A + pi sqrt(damping) I)^-1
        m <- momentum m + min(1, sqrt(kl_clip / (lr^2 sum(U V)))) U,   W <- W - lr m

    The gradients g are those of the batch's own targets (the empirical Fisher matrix), so that nothing is computed
    twice. Parameters that are not in a layer of `is_factored`, or in several, move as by SGD with momentum.

    Several replicas share a batch. They add up their statistics, invert each layer once (`inverse_owners`), and either
    hold the inverses or get the steps from a replica that does.
    """

    watches_layers = True
    takes_parts = False
    mixes_parameters = True

    def __init__(
        self,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 0.003,
        decay: float = 0.95,
        statistics_every: int = 1,
        inverse_every: int = 10,
        kl_clip: float | None = 0.001,
        inverse_workers: float = 1.0,
    ) -> None:
        """Initialise without state; the arguments are the keys of the config."""
        super().__init__(momentum=momentum)
        self._decay_of_weights, self._damping, self._decay = weight_decay, damping, decay
        self._statistics_every, self._inverse_every = statistics_every, inverse_every
        self._kl_clip, self._fraction = kl_clip, inverse_workers
        self._watched: dict[str, tuple[nn.Module, str | None]] | None = None
        self._layers: list[_Layer] = []

    # -- layers and replicas -------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        super().watch(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        uses: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self._watched = {}
        for module in model.modules():
            if is_factored(module) and uses[id(module.weight)] == 1:
                bias = module.bias if isinstance(module.bias, nn.Parameter) and module.bias.requires_grad else None
                if bias is None or uses[id(bias)] == 1:
                    self._watched[names[id(module.weight)]] = module, None if bias is None else names[id(bias)]

    def join(self, replicas: Collective) -> None:
        super().join(replicas)
        owners = assign_owners(
            [inversion_cost(layer.sums.sizes) for layer in self._layers], replicas.size, self._fraction
        )
        for layer, own in zip(self._layers, owners, strict=True):
            layer.sums.take()  # of a step that was lost with a replica
            layer.owners, layer.inverses, layer.must_invert = own, None, True

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        super().init(named_params)
        if self._watched is None:
            raise ConfigError(
                "config: train.optimizer.type: kfac needs the layers of a model, and here an optimizer has tensors "
                "alone; use strategy.exchange.type: allreduce with shard: none, or another optimizer"
            )
        for layer in self._layers:
            layer.sums.close()
        self._layers = []
        place = {name: index for index, name in enumerate(self._names)}
        for name, (module, bias) in self._watched.items():
            sums = LayerSums(module, has_bias=bias is not None)
            self._layers.append(_Layer(name, place[name], None if bias is None else place[bias], sums))
            self._know(self._layers[-1], _Curvature())
        if self._replicas is not None:
            self.join(self._replicas)

    def _know(self, layer: _Layer, known: _Curvature) -> None:
        layer.known = known
        layer.sums.is_wanted = _is_due(known, self._statistics_every)

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        used = [layer for layer in self._layers if layer.is_used(grads)]
        pulls = [self._pull(*pair) for pair in zip(params, grads, strict=True)]
        # Nothing is changed before the last message has come: a step that a lost replica breaks is made again.
        measured = self._measured(used)
        known = [self._moved_on(layer, factors) for layer, factors in zip(used, measured, strict=True)]
        inverses = self._inverted(used, known)
        moves = self._moves(used, known, inverses, pulls)
        for layer, after, held in zip(used, known, inverses, strict=True):
            self._know(layer, after)
            layer.inverses, layer.must_invert = held, False
        scale = self._clipping(moves, used, pulls, lr)
        for layer, move in zip(used, moves, strict=True):
            if move is not None:
                self._put(pulls, layer, move * scale)
        super().step(params, pulls, lr)

    def _pull(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        if grad is None or (is_sparse(grad) and not self._decay_of_weights):
            return grad
        return dense(grad).add(parameter, alpha=self._decay_of_weights) if self._decay_of_weights else grad

    def _measured(self, used: Sequence[_Layer]) -> list[Factors | None]:
        """Return the factors of this step's batch, for each layer that is due."""
        due = [layer for layer in used if _is_due(layer.known, self._statistics_every)]
        if not due:
            return [None] * len(used)
        taken = [layer.sums.take() for layer in due]
        dtype = _common(taken)
        sums = torch.cat([tensor.to(dtype) for tensor in taken])
        if self._replicas is not None:
            self._replicas.all_reduce(sums)
        parts = dict(zip(map(id, due), torch.split(sums, [layer.sums.numel for layer in due]), strict=True))
        return [factors_of(parts[id(layer)], layer.sums.sizes) if id(layer) in parts else None for layer in used]

    def _moved_on(self, layer: _Layer, measured: Factors | None) -> _Curvature:
        """Return what is known of a layer after this step."""
        known = layer.known
        running = known.running
        if measured is not None:
            kept = min(1.0 - 1.0 / (known.num_steps // self._statistics_every + 1), self._decay)
            running = measured if running is None else _mean(running, measured, kept)
        is_due = _is_due(known, self._inverse_every) or known.inverted is None
        return _Curvature(known.num_steps + 1, running, running if is_due else known.inverted)

    def _inverted(self, used: Sequence[_Layer], known: Sequence[_Curvature]) -> list[Factors | None]:
        """Return the inverses that this replica holds after this step."""
        rank = 0 if self._replicas is None else self._replicas.rank
        held = [layer.inverses for layer in used]
        due = [
            index
            for index, (layer, after) in enumerate(zip(used, known, strict=True))
            if after.inverted is not None and (layer.must_invert or after.inverted is not layer.known.inverted)
        ]
        for index in due:
            factors = known[index].inverted
            if used[index].owners[0] == rank and factors is not None:
                held[index] = self._inverse(used[index].name, factors)
        if self._replicas is None or self._replicas.size == 1 or not due:
            return held
        owners = [used[index].owners for index in due]
        every = range(self._replicas.size)
        sources = [[own[0] if other in own else other for other in every] for own in owners]
        own = [_flat(held[index]) if owners[place][0] == rank else None for place, index in enumerate(due)]
        sizes = [used[index].sums.sizes for index in due]
        found = self._delivered(own, [a * a + g * g for a, g in sizes], sources, known)
        for place, index in enumerate(due):
            if (flat := found[place]) is not None:
                a, g = sizes[place]
                of_inputs, of_outputs = torch.split(flat, [a * a, g * g])
                held[index] = of_inputs.view(a, a), of_outputs.view(g, g)
        return held

    def _inverse(self, name: str, factors: Factors) -> Factors:
        try:
            return damped_inverses(factors, self._damping)
        except torch.linalg.LinAlgError as error:
            raise OrchestrayError(
                f"kfac cannot invert the curvature of {name!r}, whose statistics are not finite; use a lower "
                "train.optimizer.lr or a larger train.optimizer.damping"
            ) from error

    def _moves(
        self,
        used: Sequence[_Layer],
        known: Sequence[_Curvature],
        inverses: Sequence[Factors | None],
        pulls: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the step of each layer; None for a layer without statistics."""
        moves = [
            None if held is None else stepped(*self._of(pulls, layer), held)
            for layer, held in zip(used, inverses, strict=True)
        ]
        size = 1 if self._replicas is None else self._replicas.size
        moved = [index for index, after in enumerate(known) if after.inverted is not None]
        if all(len(used[index].owners) == size for index in moved):
            return moves
        sources = [[owner_for(used[index].owners, other) for other in range(size)] for index in moved]
        own = [None if (move := moves[index]) is None else move.reshape(-1) for index in moved]
        sizes = [used[index].sums.sizes for index in moved]
        found = self._delivered(own, [a * g for a, g in sizes], sources, known)
        for place, index in enumerate(moved):
            if (flat := found[place]) is not None:
                moves[index] = flat.view(sizes[place][1], sizes[place][0])
        return moves

    def _delivered(
        self,
        own: Sequence[Tensor | None],
        sizes: Sequence[int],
        sources: Sequence[Sequence[int]],
        known: Sequence[_Curvature],
    ) -> list[Tensor | None]:
        assert self._replicas is not None
        like = next(after.inverted[0] for after in known if after.inverted is not None)
        return deliver(self._replicas, own, sizes, sources, like)

    def _clipping(
        self, moves: Sequence[Tensor | None], used: Sequence[_Layer], pulls: Sequence[Tensor | None], lr: float
    ) -> float:
        """Return the factor by which the step keeps the predicted change of the model's outputs below `kl_clip`."""
        if self._kl_clip is None or lr == 0.0:
            return 1.0
        change = 0.0
        for layer, move in zip(used, moves, strict=True):
            if move is not None:
                weight, bias = self._of(pulls, layer)
                rest = move[:, : weight[0].numel()]
                change += float((rest * weight.flatten(1)).sum(dtype=torch.float64))
                change += 0.0 if bias is None else float((move[:, -1] * bias).sum(dtype=torch.float64))
        change *= lr * lr
        return min(1.0, (self._kl_clip / change) ** 0.5) if change > 0.0 else 1.0

    @staticmethod
    def _of(pulls: Sequence[Tensor | None], layer: _Layer) -> tuple[Tensor, Tensor | None]:
        weight = pulls[layer.weight]
        assert weight is not None
        return weight, None if layer.bias is None else pulls[layer.bias]

    @staticmethod
    def _put(pulls: list[Tensor | None], layer: _Layer, move: Tensor) -> None:
        weight = pulls[layer.weight]
        assert weight is not None
        num_columns = weight[0].numel()
        pulls[layer.weight] = move[:, :num_columns].reshape(weight.shape).to(weight.dtype)
        if layer.bias is not None:
            pulls[layer.bias] = move[:, -1].to(weight.dtype).contiguous()

    def held_inverses(self) -> frozenset[str]:
        """Return the names of the weights whose inverses this replica holds."""
        return frozenset(layer.name for layer in self._layers if layer.inverses is not None)

    # -- state ---------------------------------------------------------------------------------------------------------

    def step_metrics(self) -> dict[str, float]:
        """Return the number of steps since the inverses in use were computed, of the oldest ones."""
        ages = [
            (layer.known.num_steps - 1) % self._inverse_every
            for layer in self._layers
            if layer.known.running is not None
        ]
        return {"inverse_age": float(max(ages))} if ages else {}

    def state_tensors(self) -> dict[str, Tensor]:
        found = super().state_tensors()
        for layer in self._layers:
            known = layer.known
            found[f"{layer.name}.{_COUNT}"] = torch.tensor(float(known.num_steps), dtype=torch.float64)
            if known.running is not None and known.inverted is not None:
                found |= {f"{layer.name}.{slot}": t for slot, t in zip(_RUNNING, known.running, strict=True)}
                if known.inverted is not known.running:
                    found |= {f"{layer.name}.{slot}": t for slot, t in zip(_INVERTED, known.inverted, strict=True)}
        return found

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        left = dict(tensors)
        loaded = [self._loaded_of(layer, left) for layer in self._layers]
        super().load_state_tensors(left)
        for layer, known in zip(self._layers, loaded, strict=True):
            self._know(layer, known)
            layer.inverses, layer.must_invert = None, True
            layer.sums.take()

    def _loaded_of(self, layer: _Layer, left: dict[str, Tensor]) -> _Curvature:
        """Return the saved state of a layer, and take it out of `left`."""
        count = left.pop(f"{layer.name}.{_COUNT}", None)
        if count is None:
            raise CheckpointError(
                f"The saved optimizer state lacks '{layer.name}.{_COUNT}'; it was saved by another optimizer or model."
            )
        running, inverted = (self._loaded_pair(layer, slots, left) for slots in (_RUNNING, _INVERTED))
        return _Curvature(int(count.item()), running, inverted or running)

    def _loaded_pair(self, layer: _Layer, slots: tuple[str, str], left: dict[str, Tensor]) -> Factors | None:
        saved = [left.pop(f"{layer.name}.{slot}", None) for slot in slots]
        pair = [tensor for tensor in saved if tensor is not None]
        if not pair:
            return None
        shapes = [tuple(tensor.shape) for tensor in pair]
        if shapes != [(size, size) for size in layer.sums.sizes]:
            raise CheckpointError(
                f"The saved optimizer state has factors of {layer.name!r} of shapes {shapes}; this model needs "
                f"{[(size, size) for size in layer.sums.sizes]}."
            )
        device = self._templates[layer.weight].device
        return pair[0].detach().clone().to(device), pair[1].detach().clone().to(device)


def _is_due(known: _Curvature, every: int) -> bool:
    return known.num_steps % every == 0


def _mean(running: Factors, measured: Factors, kept: float) -> Factors:
    of_inputs, of_outputs = (torch.lerp(new, old, kept) for old, new in zip(running, measured, strict=True))
    return of_inputs, of_outputs


def _flat(factors: Factors | None) -> Tensor | None:
    return None if factors is None else torch.cat([factor.reshape(-1) for factor in factors])


def _common(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype that holds those of all tensors."""
    dtypes: Iterator[torch.dtype] = (tensor.dtype for tensor in tensors)
    common = next(dtypes)
    for dtype in dtypes:
        common = torch.promote_types(common, dtype)
    return common
