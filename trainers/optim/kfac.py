"""K-FAC: steps by Kronecker-factored curvature, whose inverses are spread over the replicas."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.optim.kronecker import FactoredLayer, damped_inverses, factored_layers
from orchestray.trainers.optim.named_values import NamedValues, first_match
from orchestray.trainers.optim.optimizers import SGD
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.optim.spread import holders, send_from_holders, spread

if TYPE_CHECKING:
    from orchestray.trainers.layout.tensor_slice import TensorSlice

_FACTORS = ("inputs", "errors")
_IN_USE = ("used_inputs", "used_errors")
Pair = tuple[Tensor, Tensor]
"""The inverses of a layer's two factors, or the factors."""


class KFAC(SGD):
    """Kronecker-factored approximate curvature (Martens and Grosse 2015), for replicas that share each batch.

    For a layer with the gradient V, `[out, in]`, damped factors A, `[in, in]`, and G, `[out, out]`:

        step = G^-1 V A^-1;  v <- m v + step;  w <- w - lr v

    Parameters of other layers move by momentum SGD. The factors are means over the whole batch, summed over the
    replicas, so that N replicas make the step of one. Each layer's inverses are computed by one replica, and held by a
    fraction of them, which send the others the step of the layer (KAISA: Pauloski et al., SC 2021). Where stages of a
    pipeline hold the layers, `total_reducer` must be set: the length of a step is that of all layers.

    With `statistics_workers`, only the last ones measure, on their shares of the batch, and invert. The others compute
    gradients alone (Ba, Grosse and Martens, ICLR 2017).

    The saved state has the factors that the inverses in use were made of, so that the inverses can be made again.
    """

    takes_parts = False
    takes_complex = False
    measures = True

    def __init__(
        self,
        damping: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decay: float = 0.95,
        statistics_every_steps: int = 1,
        inverse_every_steps: int = 10,
        kl_clip: float | None = 1e-3,
        inverse_fraction: float = 1.0,
        statistics_workers: int | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """
        Args:
            damping: damping of the curvature.
            momentum: part of the last update that is kept.
            weight_decay: L2 penalty added to the gradient, before it is multiplied by the inverses.
            decay: decay of the running means of the factors.
            statistics_every_steps: steps between two measurements of the factors.
            inverse_every_steps: steps between two inversions; a multiple of `statistics_every_steps`.
            kl_clip: largest squared length of a step, measured by the curvature; None: any.
            inverse_fraction: fraction of the replicas that holds a layer's inverses.
            statistics_workers: number of replicas that measure and invert; None: all.
            groups: parameters with another penalty or rate, see `NamedValues.of_groups`. The inverses of a layer are
                those of all its parameters.
        """
        super().__init__(momentum=momentum)
        self._plain_slots = self.slots
        self.slots = (*self.slots, *_FACTORS, *_IN_USE)
        self.whole_slots = {**self.whole_slots, **dict.fromkeys((*_FACTORS, *_IN_USE), ())}
        self._damping, self._decay, self._kl_clip = damping, decay, kl_clip
        self._values = NamedValues.of_groups(groups, weight_decay)
        self._value_of: list[NamedValues] = []
        """Rate and penalty of each parameter."""
        self._statistics_every, self._inverse_every = statistics_every_steps, inverse_every_steps
        self._fraction, self._num_measuring = inverse_fraction, statistics_workers
        self._replicas: Collective = SoloCollective()
        self._tensor_group: Collective = SoloCollective()
        """Workers that the layers are split over."""
        self._peers: Collective = SoloCollective()
        """Replicas that move the same layers, and share the work."""
        self._all_layers: list[FactoredLayer] | None = None
        """Layers of the plain model; None: it has not been seen."""
        self._layers: list[FactoredLayer] = []
        """Layers of this worker's part of the model, which it measures."""
        self._moved: list[FactoredLayer] = []
        """Layers that this worker moves."""
        self._place: dict[str, int] = {}
        """Index of each parameter by its name."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._holders: list[list[int]] = []
        """Replicas that hold each layer's inverses; the first computes them."""
        self._measures = True
        """True if this replica measures the factors."""
        self._own_measurements = 0
        """Number of steps in which this replica has measured."""
        self._held: dict[int, Pair] | None = None
        """Inverses that this replica holds, by the layer; None: they have to be made of the saved factors first."""
        self._shapes: dict[int, FactoredLayer] = {}
        """Layer of each weight, by the weight's `id`."""
        self._step, self._samples, self._batch = 0, 0, 1
        self._given: Tensor | None = None
        """Sums that workers have measured, on a server; None: this worker measures with the others."""

    # -- the model -----------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, names: Container[str] | None = None) -> None:
        layers = factored_layers(model)
        self._all_layers = self._layers = [one for one in layers if names is None or one.weight_name in names]
        if not layers:
            raise ConfigError(
                "config: train.optimizer.type: kfac knows the curvature of nn.Linear and nn.Conv2d, and the model has "
                "none that is trained; use another optimizer"
            )

    def observe(
        self,
        model: nn.Module,
        pieces: Mapping[str, TensorSlice],
        tensor_group: Collective | None = None,
        partial: Container[str] = (),
    ) -> None:
        self._tensor_group = group = tensor_group or SoloCollective()
        for handle in self._handles:
            handle.remove()
        parameters = dict(model.named_parameters())
        self._layers = [layer for layer in self._all_layers or () if parameters.keys() & set(layer.names)]
        layer_of = {id(parameters.get(layer.weight_name)): layer for layer in self._layers}
        modules = [(module, layer_of.get(id(module._parameters.get("weight")))) for _, module in model.named_modules()]
        for index, layer in enumerate(self._layers):
            held = [pieces[name] for name in layer.names if name in pieces]
            if not parameters.keys() >= set(layer.names) or (group.rank == 0 and any(not p.is_counted for p in held)):
                raise ConfigError(
                    "config: train.optimizer.type: kfac measures a layer on the worker that computes it, and several "
                    f"use {layer.weight_name!r}; cut the pipeline elsewhere by strategy.network.split, or use another "
                    "optimizer"
                )
            splits_rows = any(getattr(module, "splits_rows", False) for module, other in modules if other is layer)
            if layer.weight_name in partial and not splits_rows:
                raise ConfigError(
                    "config: train.optimizer.type: kfac measures layers whose features or rows workers share, and of "
                    f"{layer.weight_name!r} this plan has workers compute parts of the gradient in another way; use "
                    "another strategy.network.plan, or another optimizer"
                )
            layer.divide(pieces.get(layer.weight_name), group, index, splits_rows=splits_rows)
        self._handles = [layer.watch(module) for module, layer in modules if layer is not None]

    def moves_with(self, name: str) -> str:
        return next((layer.weight_name for layer in self._layers if layer.bias_name == name), name)

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        self._replicas, self._peers = replicas, replicas if is_alike else SoloCollective()
        size = self._peers.size
        first = self._first_of(self._peers)
        owners = [first + worker for worker in spread([layer.cost for layer in self._moved], size - first)]
        self._holders = [holders(owner, self._fraction, size, first) for owner in owners]
        self._measures = replicas.rank >= self._first_of(replicas)
        self._held = None

    def _first_of(self, replicas: Collective) -> int:
        """Return the first of the replicas that measures; there may be fewer, once some are lost for good."""
        return max(0, replicas.size - (self._num_measuring or replicas.size))

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        if self._all_layers is None:
            raise ConfigError(
                "config: train.optimizer.type: kfac looks at the layers of a model while they compute, which nothing "
                "but the loop of a training lets it do; use another optimizer here"
            )
        self._place = {self.first_names.get(name, name): index for index, (name, _) in enumerate(named)}
        self._value_of = [first_match(self._values, self.first_names.get(name, name)) for name, _ in named]
        self._moved = [layer for layer in self._layers if layer.weight_name in self._place]
        self._shapes = {id(named[self._place[layer.weight_name]][1]): layer for layer in self._moved}
        super().init(named)
        self._held = None

    def _fresh(self, slot: str, parameter: Tensor) -> Tensor | None:
        layer = self._shapes.get(id(parameter))
        return None if slot in self._plain_slots or layer is None else layer.zeros(_size(layer, slot))

    def slots_of(self, name: str) -> tuple[str, ...]:
        return self._plain_slots if self._layer_of(name) is None else self.slots

    def whole_shape(self, name: str, slot: str) -> tuple[int, ...]:
        layer = self._layer_of(name)
        return super().whole_shape(name, slot) if layer is None else (_size(layer, slot),) * 2

    def _layer_of(self, name: str) -> FactoredLayer | None:
        """Return the layer whose weight has that name."""
        return self._shapes.get(id(self._templates[self._place[self.first_names.get(name, name)]]))

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_tensors(tensors)
        self._held = None

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, num_samples: int, batch_samples: int) -> None:
        self._step, self._samples, self._batch = step, num_samples, batch_samples
        is_due = self._is_due(self._statistics_every)
        for layer in self._layers:
            layer.is_watched = is_due and self._measures
            if is_due:
                layer.clear()
        self._own_measurements += is_due and self._measures

    def _is_due(self, every: int) -> bool:
        return (self._step - 1) % every == 0

    def run_report(self) -> dict[str, int]:
        """Return in how many steps this replica has `measured`, and the `inverses` it holds; empty before a step."""
        return {"measured": self._own_measurements, "inverses": len(self._held or ())} if self._step else {}

    def step_metrics(self) -> dict[str, float]:
        return {"inverse_age": float((self._step - 1) % self._inverse_every)}

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        factors, used, held = self._pairs(_FACTORS), self._pairs(_IN_USE), self._held
        if self._is_due(self._statistics_every) and self._layers:
            factors = self._averaged(factors)
        if self._is_due(self._inverse_every):
            used, held = factors, None
        if held is None:
            held = self._invert(used)
        pulls = [_pull(*each) for each in zip(params, grads, self._value_of, strict=True)]
        directions = self._directions(params, pulls, held, lr)
        # No replica is waited for from here on: a step in which one is lost has changed nothing.
        self._keep(_FACTORS, factors)
        self._keep(_IN_USE, used)
        self._held = held
        super().step(params, directions, lr)

    def _update_some(
        self, indices: list[int], params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float, *, fused: bool
    ) -> None:
        rates = [self._value_of[index].rate for index in indices]
        for rate in dict.fromkeys(rates):
            some = [index for index, own in zip(indices, rates, strict=True) if own == rate]
            super()._update_some(some, params, grads, lr * rate, fused=fused)

    def _pairs(self, slots: Sequence[str]) -> list[Pair]:
        """Return two slots of each layer."""
        of_layers = [self._place[layer.weight_name] for layer in self._moved]
        ones, others = ([self._state[slot][place] for place in of_layers] for slot in slots)
        return [(a, g) for a, g in zip(ones, others, strict=True) if a is not None and g is not None]

    def _keep(self, slots: Sequence[str], pairs: Sequence[Pair]) -> None:
        for kept, new in zip(self._pairs(slots), pairs, strict=True):
            for target, tensor in zip(kept, new, strict=True):
                if target is not tensor:
                    target.copy_(tensor)

    def _averaged(self, means: Sequence[Pair]) -> list[Pair]:
        """Return the running means of the factors with those of this batch, which are sums over the replicas."""
        own = self._own_sums(self._layers)
        if self._given is None:
            sums = flatten(own)
            for group in (self._tensor_group, self._replicas):
                group.all_reduce(sums)
        else:
            sums = self._given.to(own[0].dtype)
            self._batch = round(float(sums[-1]))
        *parts, num_samples = unflatten(sums, own)
        found = []
        for layer, pair in zip(self._moved, means, strict=True):
            index = 3 * self._layers.index(layer)
            inputs, errors, num_rows = parts[index : index + 3]
            if not float(num_rows):  # nobody has called the layer
                found.append(pair)
                continue
            # The loss is a mean over the batch, so a sample's own error is as many times that of the batch.
            measured = inputs / num_rows, errors * (self._batch**2 / num_samples)
            kept = min(1.0 - 1.0 / self._num_measured, self._decay) if _is_measured(pair) else 0.0
            new_inputs, new_errors = (
                mean * kept + new.to(mean.dtype) * (1.0 - kept) for mean, new in zip(pair, measured, strict=True)
            )
            found.append((new_inputs, new_errors))
        return found

    def _own_sums(self, layers: Sequence[FactoredLayer]) -> list[Tensor]:
        """Return what this worker has measured of each layer, and the number of its samples."""
        own = [part for layer in layers for part in (layer.inputs, layer.errors, layer.num_rows)]
        num_samples = self._samples if self._measures and self._tensor_group.rank == 0 else 0
        return [*own, own[0].new_tensor([num_samples])]

    def num_measurements(self, step: int) -> int:
        if (step - 1) % self._statistics_every or not self._layers:
            return 0
        return 1 + sum(layer.num_inputs**2 + layer.num_outputs**2 + 1 for layer in self._layers)

    def measurements(self, names: Container[str] | None = None) -> Tensor:
        layers = [layer for layer in self._layers if names is None or layer.weight_name in names]
        is_due = layers and self.num_measurements(self._step)
        if not is_due:
            return super().measurements()
        *own, num_samples = self._own_sums(layers)  # these are the same on all workers of a tensor group
        return flatten([*own, torch.full_like(num_samples, self._samples)]).double()

    def combine_measurements(self) -> None:
        if self._tensor_group.size > 1 and self.num_measurements(self._step):
            own = self._own_sums(self._layers)
            sums = flatten(own)
            self._tensor_group.all_reduce(sums)
            torch._foreach_copy_(own[:-1], unflatten(sums, own)[:-1])

    def take_measurements(self, step: int, sums: Tensor) -> None:
        self._step, self._given = step, sums
        for layer in self._layers if len(sums) else ():
            layer.clear()

    @property
    def _num_measured(self) -> int:
        """Number of measurements, with that of this step."""
        return (self._step - 1) // self._statistics_every + 1

    def _invert(self, used: Sequence[Pair]) -> dict[int, Pair]:
        """Compute this replica's part of the inverses; return those that it holds. All peers call."""
        held: dict[int, Pair] = {}
        for index, pair in enumerate(used):
            owner, *others = self._holders[index]
            if owner == self._peers.rank:
                held[index] = self._inverses(pair) if _is_measured(pair) else _identities(pair)
            elif self._peers.rank in others:
                held[index] = torch.empty_like(pair[0]), torch.empty_like(pair[1])
        send_from_holders(self._peers, self._holders, held, [others for _, *others in self._holders])
        return held

    def _inverses(self, factors: Pair) -> Pair:
        return damped_inverses(*factors, self._damping)

    def _directions(
        self, params: Sequence[Tensor], pulls: list[Tensor | None], held: Mapping[int, Pair], lr: float
    ) -> list[Tensor | None]:
        """Return the gradients multiplied by the inverses, and those of other parameters as they are."""
        rank, size = self._peers.rank, self._peers.size
        matrices: dict[int, Tensor] = {}
        for index, layer in enumerate(self._moved):
            of_weight = pulls[self._place[layer.weight_name]]
            of_bias = None if layer.bias_name is None else pulls[self._place[layer.bias_name]]
            if of_weight is not None and (of_bias is not None or layer.bias_name is None):
                matrices[index] = layer.join(of_weight, of_bias)
        steps: dict[int, Tensor] = {}
        for index, matrix in matrices.items():
            if rank in self._holders[index]:
                of_inputs, of_errors = held[index]
                steps[index] = of_errors @ matrix @ of_inputs
            else:
                steps[index] = torch.empty_like(matrix)
        outside = [
            [peer for peer in range(size) if peer not in self._holders[index]] if index in matrices else []
            for index in range(len(self._moved))
        ]
        send_from_holders(self._peers, self._holders, {index: [step] for index, step in steps.items()}, outside)
        factor = self._clip_factor(matrices, steps, lr)
        found = list(pulls)
        for index, step in steps.items():
            layer = self._moved[index]
            weight, bias = self._place[layer.weight_name], self._place.get(layer.bias_name or "")
            of_bias = None if bias is None else params[bias]
            found[weight], new_bias = layer.split(step.mul_(factor), params[weight], of_bias)
            if bias is not None:
                found[bias] = new_bias
        return found

    def _clip_factor(self, matrices: Mapping[int, Tensor], steps: Mapping[int, Tensor], lr: float) -> float:
        """Return min(1, sqrt(kl_clip / (lr^2 sum of step . gradient))) (Ba et al. 2017, section 5).

        Each parameter's part of the sum counts by its own rate.
        """
        if self._kl_clip is None:
            return 1.0
        names = [self._moved[index].weight_name for index in matrices]
        products = torch.tensor(
            [[self._product(index, steps[index] * matrix) for index, matrix in matrices.items()]], dtype=torch.float64
        )
        total = products.sum(dim=1) if self.total_reducer is None else self.total_reducer(names, products)
        length = lr**2 * float(total)
        return min(1.0, (self._kl_clip / length) ** 0.5) if length > 0.0 else 1.0

    def _product(self, index: int, products: Tensor) -> float:
        """Return the sum of a layer's products of step and gradient, `[out, in]`, by the squared rates of its parts."""
        layer = self._moved[index]
        of_weight, *of_bias = [self._value_of[self._place[name]].rate ** 2 for name in layer.names]
        if not of_bias or of_bias == [of_weight]:
            return of_weight * float(products.sum())
        return of_weight * float(products[:, :-1].sum()) + of_bias[0] * float(products[:, -1].sum())


def _pull(parameter: Tensor, grad: Tensor | None, values: NamedValues) -> Tensor | None:
    """Return the gradient of a parameter, with that of the penalty."""
    if grad is None or not values.weight_decay:
        return grad
    return dense(grad).add(parameter, alpha=values.weight_decay)


def _size(layer: FactoredLayer, slot: str) -> int:
    return layer.num_inputs if slot.endswith("inputs") else layer.num_outputs


def _is_measured(factors: Pair) -> bool:
    return float(factors[0].trace()) > 0.0


def _identities(factors: Pair) -> Pair:
    """Return what leaves a gradient as it is, for a layer that nobody has called yet."""
    one, other = (torch.eye(len(factor), dtype=factor.dtype, device=factor.device) for factor in factors)
    return one, other
