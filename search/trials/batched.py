"""A population of models of one architecture as one batched computation, with stacked weights.

It uses `torch.func.stack_module_state` and `vmap`. The updates are those of `trainers.optimizers`, with the learning
rate, momentum and weight decay of each member as vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap

from orchestray.platform.errors import ConfigError
from orchestray.platform.task import OF_THE_LOSS
from orchestray.search.trials.batched_layers import StackedModel
from orchestray.search.trials.batched_losses import ShortRows
from orchestray.search.trials.program import MODEL, OPTIMIZER
from orchestray.trainers.core.forward import user_code
from orchestray.trainers.core.inputs import described
from orchestray.trainers.core.modes import evaluating
from orchestray.trainers.core.rng import RngKey, draws, seed_modules
from orchestray.trainers.core.task_calls import refuse

if TYPE_CHECKING:
    from orchestray.platform.data.stream import MicroBatch, Share
    from orchestray.trainers.core.forward import Forward

_CLIP_EPS = 1e-6


class Batched:
    """The weights and optimizer states of all members, each tensor `[members, *shape]`, and their joint updates."""

    def __init__(
        self,
        forward: Forward,
        num_members: int,
        optimizer: Mapping[str, Any],
        *,
        seed: int = 0,
        grad_clip: float | None = None,
    ) -> None:
        """Start all members with the weights of `forward.model`.

        Args:
            forward: model and task, as in a single run.
            num_members: number of members.
            optimizer: settings as for `make_optimizer`; values that vary between members are ignored.
            seed: seed of the run: all members draw the same numbers, like runs with one seed.
            grad_clip: maximum norm of a member's gradient.

        Raises:
            ConfigError: the model or the optimizer cannot be batched.
        """
        check_model(forward.model)
        refuse(forward.task, OF_THE_LOSS, "a population in one program", "set search.method.packed: false")
        self._forward, self._grad_clip = forward, grad_clip
        self._kind = str(optimizer["type"])
        self._fixed = dict(optimizer)
        trained = {name for name, parameter in forward.model.named_parameters() if parameter.requires_grad}
        stacked, buffers = stack_module_state([forward.model] * num_members)
        self.num_members = num_members
        self.weights: dict[str, Tensor] = {name: stacked[name].detach() for name in stacked if name in trained}
        self._others = {name: value.detach() for name, value in {**stacked, **buffers}.items() if name not in trained}
        slots = ("momentum_buffer",) if self._kind == "sgd" else ("exp_avg", "exp_avg_sq")
        self.state: dict[str, dict[str, Tensor]] = {
            slot: {name: torch.zeros_like(value) for name, value in self.weights.items()} for slot in slots
        }
        self.updates = 0
        """Number of updates so far, the same for every member."""
        self._draw = RngKey(seed=seed)
        seed_modules(forward.model, self._draw, forward.device)
        self._stacked = StackedModel(forward.model)

    def train(self, share: Share, hyper: Mapping[str, Tensor], step: int) -> Tensor:
        """Train every member one step on the same batch; return their losses, `[members]`.

        Args:
            share: the batch.
            hyper: hyper-parameters of the optimizer in this step, each `[members]`.
            step: number of the step, from 1.
        """
        self._draw.step = step
        losses = torch.zeros(self.num_members, dtype=torch.float64)
        names = list(self.weights)
        gradients: list[Tensor | None] = [None] * len(names)
        for number, micro_batch in enumerate(share.micro_batches):
            self._draw.micro_batch = number
            part = micro_batch.num_samples / share.batch_samples
            leaves = {name: value.requires_grad_() for name, value in self.weights.items()}
            with user_code(step, 0):
                loss = self._losses(leaves, micro_batch)
                found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
            for value in self.weights.values():
                value.requires_grad_(False)
            losses += part * loss.detach().double().cpu()
            gradients = [_added(sum_, new, part) for sum_, new in zip(gradients, found, strict=True)]
        used = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        with torch.no_grad():
            self._clip(used)
            self.updates += 1
            factors = {name: values.to(self._forward.device) for name, values in hyper.items()}
            decays = bool(hyper["weight_decay"].any())
            by_shape: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
            for name, gradient in used.items():
                kind = (gradient.dim(), gradient.dtype)
                if kind not in by_shape:
                    by_shape[kind] = {key: _along(values, gradient) for key, values in factors.items()}
                self._update(name, gradient, by_shape[kind], decays)
        return losses

    def _losses(self, weights: Mapping[str, Tensor], micro_batch: MicroBatch) -> Tensor:
        batch = self._forward.place(micro_batch.batch)

        def loss(outputs: Any) -> Tensor:
            return self._forward.task.loss(outputs, batch).reshape(())

        outputs = self._outputs(weights, batch)
        with ShortRows():
            made: Tensor = vmap(loss, randomness="same")(outputs)
        return made

    def _outputs(self, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Any:
        inputs = batch["inputs"]
        if not isinstance(inputs, Tensor):
            raise ConfigError(f"packed: the task's inputs are {described(inputs)}, not one tensor; use packed: false")
        return self._stacked.outputs({**weights, **self._others}, inputs, self.num_members)

    def metrics(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Return loss and task metrics of every member, each `[members]`."""
        batch = self._forward.place(micro_batch.batch)
        task = self._forward.task

        def metrics(outputs: Any) -> dict[str, Tensor]:
            found = {"loss": task.loss(outputs, batch), **task.metrics(outputs, batch)}
            return {name: value.reshape(()).double() for name, value in found.items()}

        with evaluating(self._forward.model), torch.no_grad():
            outputs = self._outputs(self.weights, batch)
            with ShortRows():
                made: dict[str, Tensor] = vmap(metrics)(outputs)
        return made

    def _clip(self, gradients: Mapping[str, Tensor]) -> None:
        if self._grad_clip is None or not gradients:
            return
        squares = torch.stack([gradient.double().flatten(1).square().sum(1) for gradient in gradients.values()])
        norms = squares.sum(0).sqrt()
        factors = torch.where(norms > self._grad_clip, self._grad_clip / (norms + _CLIP_EPS), torch.ones_like(norms))
        for gradient in gradients.values():
            gradient.mul_(_along(factors, gradient))

    def _update(self, name: str, gradient: Tensor, factors: Mapping[str, Tensor], decays: bool) -> None:
        """Update one weight; `factors` are learning rate, momentum and so on, broadcastable to the weight."""
        weight, rate = self.weights[name], factors["lr"]
        if decays and self._kind == "adamw":
            weight.mul_(1.0 - rate * factors["weight_decay"])
        elif decays:
            gradient = torch.addcmul(gradient, factors["weight_decay"], weight)
        if self._kind == "sgd":
            momentum, buffer = factors["momentum"], self.state["momentum_buffer"][name]
            torch.addcmul(gradient, momentum, buffer, out=buffer)  # fused into one pass over memory
            pull = torch.addcmul(gradient, momentum, buffer) if self._fixed["nesterov"] else buffer
            weight.addcmul_(rate, pull, value=-1.0)
            return
        beta1, beta2 = self._fixed["betas"]
        first, second = self.state["exp_avg"][name], self.state["exp_avg_sq"][name]
        first.lerp_(gradient, 1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        root = second.sqrt().div_((1.0 - beta2**self.updates) ** 0.5).add_(factors["eps"])
        weight.addcmul_(rate / (1.0 - beta1**self.updates), first / root, value=-1.0)

    # -- members apart -------------------------------------------------------------------------------------------------

    def copy(self, sources: Sequence[int]) -> None:
        """Replace every member by its source, weights and optimizer state, bit for bit."""
        index = torch.tensor(sources)
        for tensors in (self.weights, *self.state.values()):
            for value in tensors.values():
                value.copy_(value[index.to(value.device)])

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, without copying."""
        named = {MODEL + name: value for name, value in self.weights.items()}
        for slot, values in self.state.items():
            named |= {f"{OPTIMIZER}{name}.{slot}": value for name, value in values.items()}
        return named

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in the tensors that `tensors` returned."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    def of_member(self, member: int, hyper: Mapping[str, float]) -> dict[str, Tensor]:
        """Return a copy of one member's tensors, as an ordinary trial with these hyper-parameters stores them."""
        found = {name: value[member].clone() for name, value in self.tensors().items()}
        found |= {MODEL + name: value[member].clone() for name, value in self._others.items()}
        if self._kind == "sgd" and not hyper["momentum"]:
            return {name: value for name, value in found.items() if name.startswith(MODEL)}
        if self._kind != "sgd":
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            count = torch.tensor(float(self.updates), dtype=dtype)
            found |= {f"{OPTIMIZER}{name}.step": count.clone() for name in self.weights}
        return found


def check_model(model: nn.Module) -> None:
    """Reject models that cannot be batched.

    Raises:
        ConfigError: the text names the module and the reason.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(f"packed: the parameter {name!r} is of complex numbers; use packed: false")
    for name, module in model.named_modules():
        where = f"packed: the module {name or type(model).__name__!r} "
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{where}has batch normalisation, whose running averages are changed in place, which a batched program "
                "cannot do for each member; use packed: false, or another normalisation (group or layer)"
            )
        if isinstance(module, nn.RNNBase):
            raise ConfigError(f"{where}is recurrent, which torch cannot batch over members; use packed: false")
        if isinstance(module, nn.MultiheadAttention) and draws(module):
            raise ConfigError(f"{where}has dropout in its attention, which torch cannot batch; use packed: false")


def _added(total: Tensor | None, new: Tensor | None, part: float) -> Tensor | None:
    if new is None:
        return total
    if total is None:
        return new if part == 1.0 else new * part
    return total.add_(new, alpha=part)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """Reshape `[members]` so that it broadcasts with `[members, *shape]`."""
    return values.to(like.dtype).to(like.device).reshape(-1, *[1] * (like.dim() - 1))
