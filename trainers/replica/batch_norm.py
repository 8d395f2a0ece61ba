"""Batch normalisation (Ioffe and Szegedy 2015) over the samples of all replicas, or apart on each.

`synchronize` makes a model's batch normalisation that of one process that sees the whole batch: forward, backward and
running statistics. Shares may differ in size and may be empty, as long as every replica runs every pass (an empty share
as a batch of no samples). `sync_buffers` is for replicas that normalise apart: it brings their statistics together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.collective import Collective
from orchestray.platform.errors import TrainingError

_GROUP = "batch_norm"
CollectiveRef = Callable[[], Collective]


def synchronize(model: nn.Module, collective_ref: CollectiveRef) -> nn.Module:
    """Make every `nn.BatchNorm1d`, `2d` and `3d` of the model normalise over all replicas; returns the model.

    The modules stay the same objects with the same parameters, buffers and names; only their class changes, to a
    subclass. Their operations run in a group of their own, so they need no order among the gradients' operations.

    Args:
        model: changed in place.
        collective_ref: gives the replica's collective of the moment.

    Raises:
        TrainingError: a batch normalisation has a forward of its own, which cannot be kept.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and not _is_synchronized(module):
            if type(module).forward is not _BatchNorm.forward:
                raise TrainingError(
                    f"The module {name!r} ({type(module).__name__}) defines its own batch normalisation, which cannot "
                    "be synchronized over the workers. Set train.batch_norm to local."
                )
            module.__class__ = cast(Any, _synchronized(cast(Any, type(module))))
            cast(_Synchronized, module).collective_ref = collective_ref
    return model


def has_synchronized(model: nn.Module) -> bool:
    """Whether every pass of the model in training mode needs every replica."""
    return any(_is_synchronized(module) for module in model.modules())


@torch.no_grad()
def sync_buffers(model: nn.Module, collective: Collective, num_samples: int, batch_samples: int) -> None:
    """Bring the replicas' buffers together: the same on every replica afterwards.

    Floating-point buffers become the average weighted by samples, sum(num_samples x buffer) / batch_samples; integer
    and boolean ones the largest. Buffers that are equal everywhere stay as they are.

    Args:
        model: its buffers are changed in place.
        collective: all its members call.
        num_samples: samples this replica's buffers come from.
        batch_samples: their sum over the replicas, above 0.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if collective.size == 1 or not buffers:
        return
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    others = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
    if floats:
        flat = torch.cat([buffer.reshape(-1).double() for buffer in floats])
        # A replica without a sample adds nothing, not 0 x infinity.
        flat = flat.mul_(num_samples) if num_samples else flat.zero_()
        collective.all_reduce(flat)
        _scatter(flat.div_(batch_samples), floats)
    if others:
        flat = torch.cat([buffer.reshape(-1).long() for buffer in others])
        collective.all_reduce(flat, "max")
        _scatter(flat, others)


def _scatter(flat: Tensor, buffers: list[Tensor]) -> None:
    start = 0
    for buffer in buffers:
        buffer.copy_(flat[start : start + buffer.numel()].view(buffer.shape))
        start += buffer.numel()


def _is_synchronized(module: nn.Module) -> bool:
    return isinstance(module, _Synchronized)


class _Synchronized(_BatchNorm):
    """The forward of a batch normalisation over all replicas; mixed into the module's own class."""

    collective_ref: CollectiveRef

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        collective = self.collective_ref() if self.training else None
        if collective is None or collective.size == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalized, mean, variance, count = cast(Any, _Normalize.apply)(
            input, self.weight, self.bias, self.eps, collective.sibling(_GROUP)
        )
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        return cast(Tensor, normalized)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics, as `_BatchNorm.forward` does: the variance there is the unbiased one."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1.0 - (factor or 0.0)).add_((value * (factor or 0.0)).to(running.dtype))


@cache
def _synchronized(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Synchronized{kind.__name__}", (_Synchronized, kind), {"__module__": __name__})


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with the statistics of all replicas' samples.

    One exchange forward (each replica's count, mean and squared deviations, combined by Chan, Golub and LeVeque 1983,
    equation 1.5), one backward (the sums of dy and of dy x_hat).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, collective: Collective
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        count, mean, variance = _global_statistics(x, collective)
        kind = weight.dtype if weight is not None else x.dtype
        mean_x, variance_x = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(x, weight, mean_x, variance_x)
        ctx.eps, ctx.collective, ctx.count = eps, collective, count
        ctx.has_bias = bias is not None
        if x.numel() == 0:
            normalized = torch.empty_like(x)
        else:
            normalized = functional.batch_norm(x, mean_x, variance_x, weight, bias, training=False, eps=eps)
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, variance = ctx.saved_tensors
        inverse = torch.rsqrt(variance + ctx.eps)
        sum_dy_hat, sum_dy = _local_gradient_sums(dy, x, mean, variance, ctx.eps)
        # The parameters' gradients stay this replica's part: the exchange adds them up with all the others.
        d_weight = sum_dy_hat if weight is not None else None
        d_bias = sum_dy if ctx.has_bias else None
        if d_weight is not None:
            d_weight = d_weight.clone()
        sums = torch.stack([sum_dy_hat, sum_dy]).double()
        ctx.collective.all_reduce(sums)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None
        mean_dy_hat, mean_dy = (sums / ctx.count).to(mean.dtype)
        scale = inverse if weight is None else inverse * weight
        dx = (x - _wide(mean, x)).mul_(_wide(-scale * inverse * mean_dy_hat, x))
        dx = dx.addcmul_(dy, _wide(scale, x)).sub_(_wide(scale * mean_dy, x))
        return dx.to(x.dtype), d_weight, d_bias, None, None


def _global_statistics(x: Tensor, collective: Collective) -> tuple[int, Tensor, Tensor]:
    """Elements a channel, mean and biased variance over all replicas, the latter two of shape `[channels]`, float64."""
    num_channels = x.shape[1]
    own = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        own = torch.cat([mean.double(), variance.double(), own[-1:].fill_(x.numel() // num_channels)])
    rows = collective.all_gather(own)
    counts, means, variances = rows[:, -1:], rows[:, :num_channels], rows[:, num_channels:-1]
    count = int(counts.sum())
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel over all workers when training, got {count}.")
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


def _local_gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """This replica's sums of dy x_hat and of dy, shape `[channels]` each."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    ones = torch.ones_like(mean)
    _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, mean, variance, None, None, False, eps, [False, True, True]
    )
    return d_weight, d_bias


def _wide(channels: Tensor, x: Tensor) -> Tensor:
    """`[C]` as `[1, C, 1, ...]`, to go with x."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))
