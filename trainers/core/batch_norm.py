"""Batch normalisation (Ioffe and Szegedy 2015) over the samples of all replicas, or separately on each.

`synchronize` makes a model's batch normalisation equal to that of one process that sees the whole batch: forward,
backward, gradients of gradients and running statistics. Shares may differ in size and may be empty, as long as every
replica runs every pass. A replica with an empty share passes a sample that is `not_counted`. `sync_statistics` is for
replicas that normalise separately: it makes their statistics equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.comm.pending import Pending
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import TrainingError

_GROUP = "batch_norm"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NORMALISATIONS = _BatchNorm
"""Class of the modules that normalise by a batch, torch's and others'."""
CollectiveRef = Callable[[], Collective]


def synchronize(model: nn.Module, collective_ref: CollectiveRef) -> nn.Module:
    """Make every batch normalisation of the model normalise over all replicas, and return the model.

    The modules stay the same objects with the same parameters, buffers and names. Only their class changes, to a
    subclass. Their operations run in a separate group, so they need no order relative to the gradients' operations.
    A module with a `forward` of its own normalises where it calls `torch.nn.functional.batch_norm`.

    Args:
        model: changed in place.
        collective_ref: returns the replica's current collective.
    """
    for module in model.modules():
        if isinstance(module, NORMALISATIONS) and not _is_synchronized(module):
            module.__class__ = cast(Any, _synchronized(cast(Any, type(module))))
            cast(_Synchronized, module).collective_ref = collective_ref
    return model


def without_torchs_group(model: nn.Module) -> nn.Module:
    """Make every `nn.SyncBatchNorm` normalise in its own process, as others do before `synchronize`.

    Torch's would look for a process group, and finds none here, or one of other workers than the replicas.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward:
            module.__class__ = cast(Any, _alone(cast(Any, type(module))))
    return model


@cache
def _alone(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": _BatchNorm.forward})


def leave_the_others(model: nn.Module) -> None:
    """Make synchronized normalisations of a copy normalise without the other replicas, which take no part in it."""
    for module in model.modules():
        if isinstance(module, _Synchronized):
            module.collective_ref = SoloCollective


def has_synchronized(model: nn.Module) -> bool:
    """Return True if every pass of the model in training mode needs every replica."""
    return any(_is_synchronized(module) for module in model.modules())


def normalised_alone(model: nn.Module) -> dict[str, int]:
    """Return, by the name of their class, how many batches of its own this worker's normalisations have seen."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and not _is_synchronized(each)]
    found: dict[str, int] = {}
    for norm in norms:
        num_batches = 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
        found[type(norm).__name__] = max(num_batches, found.get(type(norm).__name__, 0))
    return {name: number for name, number in found.items() if number}


def needs_every_pass(model: nn.Module) -> bool:
    """Return True if a replica without samples must make a pass as well.

    So it is if batch normalisation spans all replicas, or if the model has buffers besides its running statistics.
    """
    return has_synchronized(model) or any(
        tensor is not None and not (isinstance(module, _BatchNorm) and name in _STATISTICS)
        for module in model.modules()
        for name, tensor in module._buffers.items()
    )


@contextlib.contextmanager
def not_counted(model: nn.Module) -> Iterator[None]:
    """Let passes inside take part in what every replica must, without an effect: no statistics, gradients of zero.

    Modules that have an attribute `is_counted` see there that it is one.
    """
    counting: list[Any] = [module for module in model.modules() if hasattr(module, "is_counted")]
    # What the loss makes of a sample that it never sees alone may be NaN, and 0 x NaN is NaN.
    hooks = [p.register_hook(torch.zeros_like) for p in model.parameters() if p.requires_grad]  # type: ignore[no-untyped-call]
    for module in counting:
        module.is_counted = False
    try:
        yield
    finally:
        for module in counting:
            module.is_counted = True
        for hook in hooks:
            hook.remove()


def agreed_statistics(module: nn.Module, batch_norm: str) -> Collection[str]:
    """Return the names of a module's buffers that `train.batch_norm` makes equal on all replicas."""
    is_agreed = _is_synchronized(module) or (batch_norm == "local" and isinstance(module, _BatchNorm))
    return _STATISTICS if is_agreed else ()


def sync_statistics(model: nn.Module, collective: Collective, num_samples: int, batch_samples: int) -> None:
    """Make the running statistics of replicas that normalise separately equal; see `average_buffers`."""
    Averaging(running_statistics(model.modules()), collective, num_samples, batch_samples).wait()


def running_statistics(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the running statistics of those modules that normalise batches in training mode; others keep theirs."""
    norms = [module for module in modules if isinstance(module, _BatchNorm) and module.training]
    buffers = [norm._buffers[name] for norm in norms for name in _STATISTICS]
    return [buffer for buffer in buffers if buffer is not None]


def average_buffers(buffers: Sequence[Tensor], collective: Collective, num_samples: int, batch_samples: int) -> None:
    """Make the replicas' buffers equal, in place; see `Averaging`."""
    Averaging(buffers, collective, num_samples, batch_samples).wait()


class Averaging:
    """A pending operation that makes the replicas' buffers equal.

    Floating-point and complex buffers become the average weighted by samples, sum(num_samples x buffer) /
    batch_samples. Integer and boolean buffers become the maximum.
    """

    @torch.no_grad()
    def __init__(self, buffers: Sequence[Tensor], collective: Collective, num_samples: int, batch_samples: int) -> None:
        """Start to send the buffers, which keep their values until `wait`.

        Args:
            buffers: the same on every replica, in dtypes and shapes.
            collective: all its members must make one of these.
            num_samples: number of samples this replica's buffers come from.
            batch_samples: sum of `num_samples` over the replicas, above 0.
        """
        if collective.size == 1:
            buffers = []
        buffers = [torch.view_as_real(each) if each.is_complex() else each for each in buffers if each.numel()]
        self._batch_samples = batch_samples
        self._floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._others = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self._pending: list[Pending] = []
        if self._floats:
            flat = _in_double(self._floats)
            # A replica without samples must add 0, and 0 x infinity would be NaN.
            self._sums = flat.mul_(num_samples) if num_samples else flat.zero_()
            self._pending.append(collective.start_all_reduce(self._sums))
        if self._others:
            self._most = flatten([buffer.long() for buffer in self._others])
            self._pending.append(collective.start_all_reduce(self._most, "max"))

    @torch.no_grad()
    def wait(self) -> None:
        """Write the results into the buffers.

        Raises:
            PeerLostError: another replica is gone; the buffers have their old values.
        """
        for pending in self._pending:
            pending.wait()
        if self._floats:
            torch._foreach_copy_(self._floats, unflatten(self._sums.div_(self._batch_samples), self._floats))
        if self._others:
            torch._foreach_copy_(self._others, unflatten(self._most, self._others))


def _in_double(buffers: list[Tensor]) -> Tensor:
    """Return copies of floating-point buffers as one flat tensor in double precision."""
    if len({buffer.dtype for buffer in buffers}) == 1:
        return flatten(buffers).double()
    return flatten([buffer.double() for buffer in buffers])


def _is_synchronized(module: nn.Module) -> bool:
    return isinstance(module, _Synchronized)


class _Synchronized(_BatchNorm):
    """A mixin whose `forward` normalises over all replicas; `synchronize` mixes it into a module's own class."""

    collective_ref: CollectiveRef
    has_own_forward: bool
    is_counted: bool = True

    def run_report(self) -> dict[str, int]:
        """Return the number of `batches` that were normalised to learn; empty without any."""
        num_batches = 0 if self.num_batches_tracked is None else int(self.num_batches_tracked)
        return {"batches": num_batches} if num_batches else {}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        collective = self.collective_ref() if self.training else None
        if collective is None or collective.size == 1:
            return super().forward(input)
        if self.has_own_forward:
            with _OverReplicas(self, collective) as over_replicas:
                result = super().forward(input)
            over_replicas.check()
            return result
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalized, mean, variance, count = cast(Any, _Normalize.apply)(
            input, self.weight, self.bias, self.eps, collective.sibling(_GROUP), self.is_counted
        )
        if self.track_running_stats:
            self._track(mean, variance, count)
        return cast(Tensor, normalized)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics like `_BatchNorm.forward`: the running variance is the unbiased one."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        _update(self.running_mean, mean, factor or 0.0)
        _update(self.running_var, variance * (count / (count - 1)), factor or 0.0)


@torch.no_grad()
def _update(running: Tensor | None, value: Tensor, factor: float) -> None:
    if running is not None:
        running.mul_(1.0 - factor).add_((value * factor).to(running.dtype))


@cache
def _synchronized(kind: type[nn.Module]) -> type[nn.Module]:
    own = {"__module__": __name__, "has_own_forward": kind.forward is not _BatchNorm.forward}
    return type(f"Synchronized{kind.__name__}", (_Synchronized, kind), own)


class _OverReplicas(TorchFunctionMode):
    """A context in which a module's own calls of `torch.nn.functional.batch_norm` normalise over all replicas."""

    def __init__(self, module: _Synchronized, collective: Collective) -> None:
        super().__init__()
        self._module, self._collective = module, collective
        self._is_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._normalize if func is functional.batch_norm else func
        return call(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise a TrainingError if the module has normalised in another way."""
        if not self._is_called:
            raise TrainingError(
                f"A module of class {type(self._module).__mro__[2].__name__} defines its own batch normalisation "
                "without torch.nn.functional.batch_norm, so it cannot be synchronized over the workers. Have its "
                "forward call that, or set train.batch_norm to local."
            )

    def _normalize(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        self._is_called = True
        if not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        group, is_counted = self._collective.sibling(_GROUP), self._module.is_counted
        normalized, mean, variance, count = cast(Any, _Normalize.apply)(input, weight, bias, eps, group, is_counted)
        _update(running_mean, mean, momentum)
        _update(running_var, variance * (count / (count - 1)), momentum)
        return cast(Tensor, normalized)


class _Normalize(torch.autograd.Function):
    """The function y = (x - mean) / sqrt(variance + eps) * weight + bias, with the statistics of all replicas' samples.

    The forward pass exchanges each replica's count, mean and squared deviations, and combines them by Chan, Golub and
    LeVeque 1983, equation 1.5. The backward pass exchanges the sums of dy and of dy x_hat. Where it is differentiated
    too, it goes back through the function written out, and exchanges what that needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        collective: Collective,
        is_counted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, mean, variance = _global_statistics(x, collective, is_counted=is_counted)
        kind = weight.dtype if weight is not None else _of_statistics(x.dtype)
        mean_x, variance_x = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(x, weight, mean_x, variance_x, count)
        ctx.eps, ctx.collective, ctx.is_counted = eps, collective, is_counted
        ctx.has_bias = bias is not None
        if x.numel() == 0:
            normalized = torch.empty_like(x)
        else:
            normalized = functional.batch_norm(x, mean_x, variance_x, weight, bias, training=False, eps=eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, dy, x, weight, count)
        inverse = torch.rsqrt(variance + ctx.eps)
        sum_dy_hat, sum_dy = _local_gradient_sums(dy, x, mean, variance, ctx.eps)
        # The parameters' gradients stay this replica's part: the exchange sums them with all other gradients.
        d_weight = sum_dy_hat if weight is not None else None
        d_bias = sum_dy if ctx.has_bias else None
        if d_weight is not None:
            d_weight = d_weight.clone()
        sums = torch.stack([sum_dy_hat, sum_dy]).double()
        if not ctx.is_counted:
            sums.zero_()
        ctx.collective.all_reduce(sums)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None, None
        scale = inverse if weight is None else inverse * weight
        if not ctx.is_counted:  # the statistics do not depend on it
            return (dy * _wide(scale, x)).to(x.dtype), d_weight, d_bias, None, None, None
        mean_dy_hat, mean_dy = (sums / count).to(mean.dtype)
        dx = (x - _wide(mean, x)).mul_(_wide(-scale * inverse * mean_dy_hat, x))
        dx = dx.addcmul_(dy, _wide(scale, x)).sub_(_wide(scale * mean_dy, x))
        return dx.to(x.dtype), d_weight, d_bias, None, None, None


def _differentiable_backward(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, count: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the result of `_Normalize.backward`, of which gradients may be taken. All replicas call."""
    channels = [0, *range(2, x.dim())]
    with torch.enable_grad():
        wide = x.double()
        mean = _sum_over_replicas(wide.sum(channels), ctx) / count
        centred = wide - _wide(mean, x)
        variance = _sum_over_replicas(centred.square().sum(channels), ctx) / count
        normalized = centred * _wide(torch.rsqrt(variance + ctx.eps), x)
        if weight is not None:
            normalized = normalized * _wide(weight.double(), x)
        wanted: list[Any] = [tensor for tensor, needs in zip((x, weight), ctx.needs_input_grad, strict=False) if needs]
        found = iter(torch.autograd.grad(normalized, wanted, dy.double(), create_graph=True) if wanted else ())
        d_x, d_weight = (next(found) if needs else None for needs in ctx.needs_input_grad[:2])
        return d_x, d_weight, dy.sum(channels) if ctx.has_bias else None, None, None, None


def _sum_over_replicas(part: Tensor, ctx: Any) -> Tensor:
    return cast(Tensor, cast(Any, _Sum.apply)(part, ctx.collective, ctx.is_counted))


class _Sum(torch.autograd.Function):
    """The sum of each replica's part, any number of times differentiable. A part that is not counted is zero."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, collective: Collective, is_counted: bool) -> Tensor:
        ctx.collective, ctx.is_counted = collective, is_counted
        total = part.contiguous().clone() if is_counted else torch.zeros_like(part)
        collective.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total: Tensor = cast(Any, _Sum.apply)(gradient, ctx.collective, ctx.is_counted)
        return total if ctx.is_counted else total * 0.0, None, None


def _global_statistics(x: Tensor, collective: Collective, *, is_counted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of elements per channel, the mean and the biased variance over all replicas.

    They have dtype float64; mean and variance have shape `[channels]`. The number is on the device: to read it in each
    layer would stop a GPU there.
    """
    num_channels, own_count = x.shape[1], 0
    own = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device=x.device)
    if x.numel() and is_counted:
        # Given others, it computes its own in their precision; in that of bfloat16 a mean has three digits.
        running = x.new_zeros(2, num_channels, dtype=_of_statistics(x.dtype))
        mean, variance = torch.batch_norm_update_stats(x, running[0], running[1], 0.0)
        own_count = x.numel() // num_channels
        own = torch.cat([mean.double(), variance.double(), own[-1:].fill_(own_count)])
    rows = collective.all_gather(own)
    counts, means, variances = rows[:, -1:], rows[:, :num_channels], rows[:, num_channels:-1]
    count = counts.sum()
    if own_count <= 1 and count <= 1:
        raise ValueError(f"Expected more than 1 value per channel over all workers when training, got {int(count)}.")
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


def _of_statistics(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch keeps the statistics of such inputs: that of the inputs, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _local_gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return this replica's sums of dy x_hat and of dy, each of shape `[channels]`."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    ones = torch.ones_like(mean)
    _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, mean, variance, None, None, False, eps, [False, True, True]
    )
    return d_weight, d_bias


def _wide(channels: Tensor, x: Tensor) -> Tensor:
    """Return a view of shape `[1, C, 1, ...]` of `channels` `[C]`, which broadcasts against `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def aggregation_conflict(kind: str) -> str:
    """Return the error message for an aggregation that chooses among gradients under synchronized batch normalisation.

    Synchronized batch normalisation makes the workers' gradients parts of one gradient, so no choice among them is
    possible. The message names the config key and the reason.
    """
    return (
        f"strategy.aggregation: {kind} chooses among the workers' gradients, which batch normalisation over the "
        "samples of all of them makes parts of one; set train.batch_norm to local"
    )
