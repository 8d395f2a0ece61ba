"""Optimizers over torch's functional kernels.

The classes of `torch.optim` import the compiler at construction, which costs every worker more than a second; the
kernels they call do not. The fused kernels are used, which pass through memory once per update. The results are bitwise
those of `torch.optim` with `fused=True`, faster on models of up to a million elements (benchmarks/train/optimizers.py).

The fused kernels round the last few elements of a tensor differently from the others. So a tensor that is cut may
differ in the last bit from the whole tensor. An optimizer here accepts any list of tensors: a model's parameters, or
the shard of a parameter server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, strided
from torch.optim.sgd import sgd

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.sparse import dense, is_sparse

if TYPE_CHECKING:
    from orchestray.trainers.layout.tensor_slice import TensorSlice

NormReducer = Callable[[Sequence[str], Tensor], Tensor]
"""Sums squared norms over the workers that hold parts of the same parameters.

Its arguments are the names of the parameters updated in this step, and the squared norms of this worker's parts of
them. The names are in the order of `init` and the same on all these workers. The squares have shape `[any, number of
names]` and dtype float64. The result has the same shape, and is bitwise equal on all workers.
"""

_WHOLE_VECTORS = 64
"""Number of elements: a multiple of the elements of any vector register."""


class Optimizer(ABC):
    """Updates parameters by their gradients; keeps a few named slots of state per parameter."""

    slots: tuple[str, ...] = ()
    """Names of the state tensors per parameter. "step" is a scalar, the others have the parameter's shape."""
    has_fused_kernel: bool = False
    """True if torch has a kernel that updates parameter and state in one pass over memory."""
    whole_slots: Mapping[str, tuple[int, ...]] = {"step": ()}
    """Shapes of the slots that are not split with their parameter: each holder of a part has the whole slot."""
    uses_norms: bool = False
    """True if it uses norms of whole parameters: `norm_reducer` must be set if workers hold parts of them."""
    takes_sparse: bool = False
    """True if it moves the rows of a sparse gradient alone; otherwise sparse gradients are made dense."""
    takes_complex: bool = True
    """True if it moves complex parameters as torch's optimizers do: by their real and imaginary parts."""
    takes_parts: bool = True
    """True if it may be given parts of parameters; False if it has to see whole ones."""
    measures: bool = False
    """True if it watches layers while they compute, and steps by what it measures."""
    mixes_parameters: bool = False
    """True if a parameter's step depends on the others: it has to see all of a model."""
    first_names: Mapping[str, str] = {}
    """The first name in the plain model of each parameter that is known here by another one (a tied weight's)."""
    norm_reducer: NormReducer | None = None
    """Reducer for optimizers that use norms of whole parameters; set if workers hold parts of parameters."""
    total_reducer: NormReducer | None = None
    """Reducer for optimizers that use the norm of the whole gradient; set together with `norm_reducer`.

    Its arguments are the same. It returns the sums over all parameters of the model, `[any]`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._updated_names: list[str] = []
        """Names of the parameters that `_update` receives."""
        self._templates: list[Tensor] = []
        self._is_fusible: list[bool] = []
        """True for each parameter that a fused kernel may update."""
        self._has_complex = False
        self._state: dict[str, list[Tensor | None]] = {}

    @property
    def needs_whole(self) -> bool:
        """True if a part of a parameter does not move alone as it moves in the whole one."""
        return self.uses_norms or not self.takes_parts

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Create fresh state for these parameters; `step` expects them in this order from then on.

        Raises:
            ConfigError: one is of complex numbers, and the optimizer cannot move it.
        """
        named = list(named_params)
        self._names = [name for name, _ in named]
        self._templates = [parameter for _, parameter in named]
        self._is_fusible = [self._fuses(parameter) for parameter in self._templates]
        self._has_complex = any(parameter.is_complex() for parameter in self._templates)
        if self._has_complex and not self.takes_complex:
            name = next(name for name, parameter in named if parameter.is_complex())
            raise ConfigError(
                f"config: train.optimizer.type: the parameter {name!r} is of complex numbers, for which "
                f"{type(self).__name__.lower()} is not defined; use another optimizer"
            )
        self._state = {slot: [self._fresh(slot, parameter) for _, parameter in named] for slot in self.slots}

    def _fuses(self, parameter: Tensor) -> bool:
        """Return True if a fused kernel may update the parameter."""
        return _is_dense(parameter) and not parameter.is_complex()

    def replaced(self, change: Callable[[Optimizer], Optimizer]) -> Optimizer:
        """Return what `change` makes of this optimizer, or this one with what it makes of each one that it is made of.

        `init` has to follow.
        """
        return change(self)

    def prepare(self, model: nn.Module, names: Container[str] | None = None) -> None:
        """Look at the plain model, before a layout cuts it.

        Args:
            model: the plain model.
            names: names of the parameters that this optimizer will see; default: all.
        """
        return

    def observe(
        self,
        model: nn.Module,
        pieces: Mapping[str, TensorSlice],
        tensor_group: Collective | None = None,
        partial: Container[str] = (),
    ) -> None:
        """Watch the layers of a worker's part of the model while they compute. Called before `init`.

        Args:
            model: the part of the model, whose parameters are updated from now on.
            pieces: position of its tensors in the plain model, by their names in `model`; those left out are whole.
            tensor_group: workers that the layers are split over; None if they are not split.
            partial: names of parameters of which each worker of that group computes a part of the gradient.

        Raises:
            ConfigError: the optimizer cannot see a layer's whole inputs and errors in this layout.
        """
        return

    def moves_with(self, name: str) -> str:
        """Return the name of the parameter that has to be on the worker that moves the one of this name."""
        return name

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        """Join the replicas that share each batch. All of them call this, after `init`.

        Args:
            replicas: the replicas.
            is_alike: True if all move the same parameters, and are the same after each step: they can share work.
        """
        return

    def begin_step(self, step: int, num_samples: int, batch_samples: int) -> None:
        """Prepare for the forward and backward passes of a step.

        Args:
            step: number of the step, from 1.
            num_samples: samples of this replica's share.
            batch_samples: samples of the whole batch.
        """
        return

    def num_measurements(self, step: int) -> int:
        """Return the number of elements of `measurements` in a step; 0: nothing is measured then."""
        del step
        return 0

    def measurements(self, names: Container[str] | None = None) -> Tensor:
        """Return the sums that this worker has measured since `begin_step`, float64 `[num_measurements]`.

        Added up over the workers they are for `take_measurements` of the optimizer that makes the steps, on a server.
        Those of workers that layers are split over are added up by `combine_measurements` before.

        Args:
            names: names of the parameters that this server moves, for which its optimizer is prepared; default: all.
        """
        del names
        return torch.empty(0, dtype=torch.float64)

    def combine_measurements(self) -> None:
        """Add up what the workers have measured that the layers are split over. All of them call, before they send."""
        return

    def take_measurements(self, step: int, sums: Tensor) -> None:
        """Take the sums over all samples of a step's batch, `[num_measurements]`, before `step` is called for it."""
        return

    @torch.no_grad()
    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        """Update the parameters in place.

        A parameter whose gradient is None keeps its value and its state.

        Args:
            params: parameters, in the order of `init`.
            grads: their gradients.
            lr: learning rate of this step.
        """
        if len(params) != len(self._names) or len(grads) != len(params):
            raise ValueError(f"Expected {len(self._names)} parameters and gradients, got {len(params)}, {len(grads)}.")
        used = [index for index, grad in enumerate(grads) if grad is not None]
        if sparse := [index for index, grad in enumerate(grads) if grad is not None and grad.layout is not strided]:
            if self.takes_sparse:
                self._update_some(sparse, params, grads, lr, fused=False)
                used = [index for index in used if index not in sparse]
            else:
                grads = [grad if grad is None else dense(grad) for grad in grads]
        if not used:
            return
        if not self.has_fused_kernel:
            self._update_some(used, params, grads, lr, fused=False)
            return
        for fused in (True, False):
            if some := [index for index in used if self._is_fusible[index] is fused]:
                self._update_some(some, params, grads, lr, fused=fused)

    @torch.no_grad()
    def step_into(
        self, targets: Sequence[Tensor], params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float
    ) -> None:
        """Compute the same bits as `step`, with the results in `targets`; the parameters keep their values."""
        torch._foreach_copy_(list(targets), list(params))
        self.step(targets, grads, lr)

    def _update_some(
        self, indices: list[int], params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float, *, fused: bool
    ) -> None:
        present = [grad for index in indices if (grad := grads[index]) is not None]
        if len(indices) == len(self._names):  # all of them, as in most steps: nothing is chosen, or put back
            chosen, state, self._updated_names = list(params), self._state, self._names
        else:
            chosen = [params[index] for index in indices]
            state = {slot: [tensors[index] for index in indices] for slot, tensors in self._state.items()}
            self._updated_names = [self._names[index] for index in indices]
        if fused:
            present = [_alike(*pair) for pair in zip(present, chosen, strict=True)]
        self._update(chosen, present, state, lr, fused=fused)
        if state is not self._state:
            for slot, tensors in state.items():
                for index, tensor in zip(indices, tensors, strict=True):
                    self._state[slot][index] = tensor

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state as "<parameter>.<slot>", without unset slots.

        The tensors are the optimizer's own memory, not copies.
        """
        return {
            f"{name}.{slot}": tensor
            for slot, tensors in self._state.items()
            for name, tensor in zip(self._names, tensors, strict=True)
            if tensor is not None
        }

    def slots_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the slots that the parameter of that name has, or will have."""
        del name
        return self.slots

    def whole_shape(self, name: str, slot: str) -> tuple[int, ...]:
        """Return the shape of one of `whole_slots`, which may depend on the parameter of that name."""
        del name
        return self.whole_slots[slot]

    def slot_piece(self, name: str, slot: str, piece: TensorSlice) -> TensorSlice:
        """Return the part of the plain slot that this worker holds, given its piece of the parameter of that name."""
        plain = f"{piece.name}.{slot}"
        if slot in self.whole_slots:
            return piece.whole(plain, self.whole_shape(name, slot), is_counted=piece.is_counted)
        return replace(piece, name=plain)

    def step_metrics(self) -> dict[str, float]:
        """Return the values that the optimizer tuned itself, for the metric line of the step."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from a copy of the result of `state_tensors`, for the same parameters and the same kind of optimizer.

        Raises:
            CheckpointError: a tensor is missing, has another shape or belongs to no parameter; the state is unchanged.
        """
        loaded: dict[str, list[Tensor | None]] = {slot: [] for slot in self.slots}
        known = set()
        for slot in self.slots:
            for name, parameter in zip(self._names, self._templates, strict=True):
                key = f"{name}.{slot}"
                known.add(key)
                loaded[slot].append(self._loaded(key, slot, parameter, tensors.get(key)))
        if unknown := [key for key in tensors if key not in known]:
            raise CheckpointError(
                f"The saved optimizer state has {unknown[0]!r}, which {type(self).__name__} or this model has not. "
                "Go on with the optimizer and the model it was saved with."
            )
        self._state = loaded

    def _fresh(self, slot: str, parameter: Tensor) -> Tensor | None:
        if slot == "step":
            # A fused kernel of a GPU reads it there; other updates read it on the CPU, without waiting for a GPU.
            device = parameter.device if self.has_fused_kernel else None
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            return torch.zeros((), dtype=dtype, device=device)
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _loaded(self, key: str, slot: str, parameter: Tensor, saved: Tensor | None) -> Tensor | None:
        fresh = self._fresh(slot, parameter)
        if saved is None:
            if fresh is None:
                return None
            raise CheckpointError(
                f"The saved optimizer state lacks {key!r}; it was saved by another optimizer or model."
            )
        target = torch.empty_like(parameter) if fresh is None else fresh
        if saved.shape != target.shape:
            raise CheckpointError(
                f"The saved optimizer state has {key!r} of shape {list(saved.shape)}; this model needs "
                f"{list(target.shape)}."
            )
        return target.detach().copy_(saved)

    @abstractmethod
    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        """Update parameters and state in place; all lists have the same order and length.

        `fused` is True only for a class with a fused kernel; then the parameters fill their memory without gaps.
        """


def _is_dense(parameter: Tensor) -> bool:
    """Return True if the parameter fills its memory without gaps."""
    # torch's own test for it imports its compiler, which costs 0.5 s.
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return parameter.is_contiguous() or like.stride() == parameter.stride()


def _alike(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the dtype and memory layout of its parameter, which the fused kernels do not check."""
    if grad.dtype == parameter.dtype and grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum as `torch.optim.SGD` defines it (the first step sets the buffer)."""

    has_fused_kernel = True

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.slots = ("momentum_buffer",) if momentum else ()
        self.takes_sparse = not (momentum or weight_decay)
        self._momentum, self._nesterov, self._weight_decay = momentum, nesterov, weight_decay
        self._adds: dict[torch.dtype, bool] = {}
        self._rule: dict[str, Any] = {}
        """Momentum and look-ahead of the last step, as the kernel was given them."""

    def run_report(self) -> dict[str, Any]:
        """Return `momentum` and `nesterov` of the last step; empty before the first one."""
        return dict(self._rule)

    def _fuses(self, parameter: Tensor) -> bool:
        # On a CPU the kernel leaves numbers of 16 bits as they are, without a word.
        return super()._fuses(parameter) and (parameter.device.type != "cpu" or parameter.element_size() >= 4)

    def _fresh(self, slot: str, parameter: Tensor) -> Tensor | None:
        return None

    @torch.no_grad()
    def step_into(
        self, targets: Sequence[Tensor], params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float
    ) -> None:
        if self._momentum or self._weight_decay:
            super().step_into(targets, params, grads, lr)
            return
        ends: list[Tensor] = []
        left: list[Tensor | None] = []
        for target, parameter, grad in zip(targets, params, grads, strict=True):
            to, old, whole = target.view(-1), parameter.view(-1), 0
            if grad is not None and grad.dtype == parameter.dtype and self._adds_alike(parameter.dtype):
                whole = old.numel() - old.numel() % _WHOLE_VECTORS
                torch.add(old[:whole], grad.view(-1)[:whole], alpha=-lr, out=to[:whole])
            to[whole:].copy_(old[whole:])
            ends.append(to[whole:])
            left.append(None if grad is None or whole == old.numel() else grad.view(-1)[whole:])
        self.step(ends, left, lr)

    def _adds_alike(self, dtype: torch.dtype) -> bool:
        """Return True if `torch.add` rounds like the fused kernel, except in the last few elements of a tensor.

        Both compile to fused multiply-add on processors that have it; this method checks that they do.
        """
        if dtype not in self._adds:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(2, 16 * _WHOLE_VECTORS, generator=generator, dtype=torch.float64).to(dtype)
            parameter, grad = drawn.unbind()
            added = torch.add(parameter, grad, alpha=-0.1)
            self._update([parameter], [grad], {}, 0.1, fused=True)
            self._adds[dtype] = torch.equal(added, parameter)
        return self._adds[dtype]

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        buffers = state.get("momentum_buffer") or [None] * len(params)
        if self._momentum:
            for index, buffer in enumerate(buffers):
                if buffer is None:  # starting from zeros makes the first gradient the first buffer
                    buffers[index] = torch.zeros_like(params[index], memory_format=torch.preserve_format)
        self._rule = {"momentum": self._momentum, "nesterov": self._nesterov}
        sgd(
            params,
            grads,
            buffers,
            # The foreach kernel of Nesterov overwrites the gradients.
            foreach=not (fused or self._nesterov or is_sparse(grads[0])),
            fused=fused,
            weight_decay=self._weight_decay,
            lr=lr,
            dampening=0.0,
            maximize=False,
            **self._rule,
        )
