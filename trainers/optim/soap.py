"""SOAP: AdamW in the eigenbasis of Shampoo's two matrices, whose decompositions are spread over the replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.comm.solo import SoloCollective
from orchestray.trainers.optim.adaptive import AdamW
from orchestray.trainers.optim.spread import spread

_SIDES = ("left", "right")
_BASES = ("left_basis", "right_basis")
_SHIFT = 1e-4
"""Part of the mean eigenvalue that is added to each: the basis of what no gradient has reached yet would be noise."""
_FIRST_ITERATIONS = 4
_ROUNDINGS = 3e4
"""Roundings of an entry of the turned gradient that it has to be above: a step of more than four digits."""


class SOAP(AdamW):
    """Shampoo with Adam in its eigenbasis (Vyas et al. 2024, "SOAP", algorithm 3).

    For a matrix w with gradient g, and bases P and Q of the running means L of g g^T and R of g^T g:

        w <- w - lr P adam(P^T m Q, (P^T g Q)^2) Q^T

    The second moment v is of other bases' entries, and may be next to nothing where a direction has since turned to the
    gradient. So it is raised to the least that it can be beside that mean in a basis that stays.

    A turned gradient has small entries beside large ones, and is rounded by the size of the large. Adam would scale
    this noise up to steps of full size, other ones for each order of a sum. So each entry of its step is multiplied by
    v / (v + n^2), the part of signal (Wiener's filter); n is 3e4 times the rounding that comes from the elements of g.
    L and R are kept in float64, so that small eigenvalues beside large ones have digits.

    The bases follow L and R by one step of orthogonal iteration every `every_steps` steps (section 4 of the paper); the
    first ones begin from the identity. Each is computed by one replica and sent to the others. A side larger than
    `max_size` keeps its own axes: its basis is I (the paper's one-sided version). Parameters of other forms, and
    matrices that are larger on both sides, move by AdamW.
    """

    slots = ("step", "exp_avg", "exp_avg_sq", *_SIDES, *_BASES)
    has_fused_kernel = False
    takes_parts = False
    takes_complex = False

    def __init__(
        self,
        betas: Sequence[float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        every_steps: int = 10,
        max_size: int = 1024,
    ) -> None:
        """
        Args:
            betas: decays of the gradient's mean, and of its square and of the two matrices.
            eps: added to the denominator.
            weight_decay: part of the weights, times the rate, that is subtracted at each step.
            every_steps: steps between two changes of the bases.
            max_size: largest side that has a basis.
        """
        super().__init__(betas, eps, weight_decay)
        self._every, self._max_size = every_steps, max_size
        self.whole_slots = {**self.whole_slots, **dict.fromkeys((*_SIDES, *_BASES), ())}
        self._world: Collective = SoloCollective()

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        self._world = replicas if is_alike else SoloCollective()

    def whole_shape(self, name: str, slot: str) -> tuple[int, ...]:
        if slot not in (*_SIDES, *_BASES):
            return super().whole_shape(name, slot)
        parameter, side = self._templates[self._names.index(name)], _side_of(slot)
        return (parameter.shape[side],) * 2 if side in self._sides(parameter) else ()

    def _sides(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the sides of a parameter that have bases: 0 for the left one, 1 for the right one."""
        if parameter.ndim != 2:
            return ()
        return tuple(side for side, size in enumerate(parameter.shape) if size <= self._max_size)

    def _fresh(self, slot: str, parameter: Tensor) -> Tensor | None:
        sides = self._sides(parameter)
        is_of_side = slot in (*_SIDES, *_BASES)
        if slot == "step" or not sides:
            return None if is_of_side else super()._fresh(slot, parameter)
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32  # less has no decompositions
        if not is_of_side:
            return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        if _side_of(slot) not in sides:
            return None
        num = parameter.shape[_side_of(slot)]
        if slot in _SIDES:
            return torch.zeros(num, num, dtype=torch.float64, device=parameter.device)
        return torch.eye(num, dtype=dtype, device=parameter.device)

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        sides = [self._sides(parameter) for parameter in params]
        chosen = [index for index in range(len(params)) if sides[index]]
        due = [index for index in chosen if int(state["step"][index]) % self._every == 0]
        # All that waits for other replicas comes before the first change: a step in which one is lost leaves no trace.
        self._change_bases([(index, side) for index in due for side in sides[index]], grads, state)
        if rest := [index for index in range(len(params)) if index not in chosen]:
            of_rest = {slot: [tensors[index] for index in rest] for slot, tensors in state.items()}
            super()._update([params[i] for i in rest], [grads[i] for i in rest], of_rest, lr, fused=False)
        for index in chosen:
            self._move(params[index], grads[index], {slot: tensors[index] for slot, tensors in state.items()}, lr)

    def _move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        left, right = state["left_basis"], state["right_basis"]
        state["step"] += 1
        step = float(state["step"])
        grad = grad.to(state["exp_avg"].dtype)
        state["exp_avg"].lerp_(grad, 1.0 - self._beta1)
        for side in _SIDES:
            if state[side] is not None:
                state[side].lerp_(_product(grad, side), 1.0 - self._beta2)
        turned = _turned_by(grad, left, right)
        state["exp_avg_sq"].mul_(self._beta2).addcmul_(turned, turned, value=1.0 - self._beta2)
        first = _turned_by(state["exp_avg"], left, right) / (1.0 - self._beta1**step)
        second = state["exp_avg_sq"] / (1.0 - self._beta2**step)
        second = torch.maximum(second, first.square() / self._largest_ratio(step))
        parameter.mul_(1.0 - lr * self._weight_decay)
        root, noise = second.sqrt(), _noise(state, second.dtype) / (1.0 - self._beta2**step)
        adam = first * root / (second + self._eps * root + noise).clamp_min_(torch.finfo(second.dtype).tiny)
        back = (basis if basis is None else basis.T for basis in (left, right))
        parameter.sub_(_turned_by(adam, *back).to(parameter.dtype), alpha=lr)

    def _largest_ratio(self, step: float) -> float:
        """Return the largest ratio that the squared mean of gradients can have to the mean of their squares.

        It is the sum over the gradients of squared weight in the mean / weight in the squares (Cauchy and Schwarz).
        """
        if self._beta1**2 >= self._beta2:
            return math.inf
        decay = self._beta1**2 / self._beta2
        of_mean, of_squares = ((1.0 - beta) / (1.0 - beta**step) for beta in (self._beta1, self._beta2))
        return float(of_mean**2 / of_squares * (1.0 - decay**step) / (1.0 - decay))

    def _change_bases(
        self, work: Sequence[tuple[int, int]], grads: Sequence[Tensor], state: dict[str, list[Any]]
    ) -> None:
        """Turn bases, each by its parameter and side, towards their matrices. All replicas call, with the same ones."""
        owners = spread([state[_BASES[side]][index].shape[0] ** 3 for index, side in work], self._world.size)
        changed: list[Tensor] = []
        for (index, side), owner in zip(work, owners, strict=True):
            basis, mean = state[_BASES[side]][index], state[_SIDES[side]][index]
            if owner != self._world.rank:
                changed.append(basis.clone())  # a dry run, which receives nothing, goes on with it
            elif int(state["step"][index]):
                changed.append(_turned(basis, mean, 1))
            else:
                changed.append(_turned(basis, _product(grads[index], _SIDES[side]), _FIRST_ITERATIONS))
        for owner in dict.fromkeys(owners) if self._world.size > 1 else ():
            own = [basis for basis, whose in zip(changed, owners, strict=True) if whose == owner]
            flat = flatten(own)
            self._world.broadcast(flat, owner)
            torch._foreach_copy_(own, unflatten(flat, own))
        for (index, side), basis in zip(work, changed, strict=True):
            state[_BASES[side]][index].copy_(basis)


def _side_of(slot: str) -> int:
    return 0 if slot.startswith("left") else 1


def _product(grad: Tensor, side: str) -> Tensor:
    """Return g g^T, or g^T g, in float64."""
    grad = grad.double()
    return grad @ grad.T if side == "left" else grad.T @ grad


def _turned_by(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return P^T matrix Q; None stands for the identity."""
    matrix = matrix if left is None else left.T @ matrix
    return matrix if right is None else matrix @ right


def _noise(state: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the second moment n^2 of each entry of the turned gradient below which it is taken for rounding.

    An element of the gradient is rounded in proportion to its size, and that rounding is turned. The squares of the
    elements are about those of their row times those of their column over all (Adafactor: Shazeer and Stern 2018).
    """
    noise = torch.ones((), dtype=torch.float64)
    sums = []
    for side, basis in zip(_SIDES, _BASES, strict=True):
        if state[side] is not None:
            squares = state[side].diagonal()
            sums.append(squares.sum())
            turned = state[basis].double().square().T @ squares
            noise = noise * (turned[:, None] if side == "left" else turned)
        else:
            noise = noise / state["exp_avg"].shape[_side_of(side)]
    if len(sums) == 2:
        noise = noise / sums[0].clamp_min(torch.finfo(torch.float64).tiny)
    return ((_ROUNDINGS * torch.finfo(dtype).eps) ** 2 * noise).to(dtype)


def _turned(basis: Tensor, mean: Tensor, iterations: int) -> Tensor:
    """Return a basis after steps of orthogonal iteration towards the eigenvectors of a mean in float64, `[n, n]`."""
    shifted = mean + _SHIFT * mean.trace() / len(mean) * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    turned = basis.double()
    for _ in range(iterations if float(mean.trace()) > 0.0 else 0):
        turned = torch.linalg.qr(shifted @ turned).Q
    return turned.to(basis.dtype)
