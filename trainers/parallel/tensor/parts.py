"""Helpers of every style: keep a part of a parameter, give a module another forward, refuse what does not fit."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor, nn

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.trainers.layout.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

Mixin = TypeVar("Mixin", bound="SplitModule")


class SplitModule(nn.Module):
    """A mixin for the class of every module whose forward changes when it is split; a leaf for any tracer."""

    plain_kind: type[nn.Module]
    """Class of the module before the split."""


def become(module: nn.Module, mixin: type[Mixin]) -> Mixin:
    """Change the module's class to a subclass of its own and of `mixin`, whose
    methods come first; return the same object.
    """
    module.__class__ = _mixed(cast(Any, mixin), cast(Any, type(module)))
    return cast(Mixin, module)


@cache
def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    plain: type[nn.Module] = kind.plain_kind if issubclass(kind, SplitModule) else kind
    name = f"{mixin.__name__.lstrip('_')}{kind.__name__}"
    return type(name, (mixin, kind), {"__module__": __name__, "plain_kind": plain})


def kind_of(module: nn.Module) -> str:
    """Return the name of the class that the module was written as."""
    kind = type(module)
    return (kind.plain_kind if issubclass(kind, SplitModule) else kind).__name__


def joined(name: str, tensor: str) -> str:
    """Return the name in the model of a tensor of the module `name`."""
    return f"{name}.{tensor}" if name else tensor


def keep(module: nn.Module, name: str, split: Split, tensor: str, dim: int, *ranges: tuple[int, int]) -> None:
    """Replace a parameter or buffer of the module by its part at `ranges` of
    `dim`, and record its slice in `split.pieces`.
    """
    held: Tensor | None = getattr(module, tensor)
    if held is None:
        return
    full_name = joined(name, tensor)
    if held._backward_hooks or cast(Any, held)._post_accumulate_grad_hooks:
        raise ConfigError(
            f"The parameter {full_name!r} has a hook on its gradient, of which each worker would have a part alone. "
            f"Leave {shown(name)} out of the plan, or take the hook away."
        )
    piece = split.pieces.get(full_name) or TensorSlice.whole(full_name, held.shape)
    part = TensorSlice.whole("", held.shape).narrow(dim, *ranges).take(held)
    if tensor in module._parameters:
        module._parameters[tensor] = nn.Parameter(part, requires_grad=held.requires_grad)
    else:
        module._buffers[tensor] = part
    split.pieces[full_name] = piece.narrow(dim, *ranges)


def check_plain(module: nn.Module, name: str, style: str, kind: type[nn.Module]) -> None:
    """Refuse a module that is not of `kind`, or that computes or stores its parameters in its own way."""
    if not isinstance(module, kind):
        raise ConfigError(
            f"The plan splits the module {name!r} in the style {style!r}, which is for nn.{kind.__name__}; it is a "
            f"{kind_of(module)}."
        )
    if isinstance(module, SplitModule):
        raise ConfigError(f"The plan splits the module {name!r} twice; give it one style.")
    if type(module).forward is not kind.forward or "forward" in vars(module) or _is_parametrized(module, kind):
        raise ConfigError(
            f"{shown(name)} ({kind_of(module)}) computes in a way of its own, which the style {style!r} cannot "
            f"keep. Use a plain nn.{kind.__name__} there, or leave it out of the plan."
        )


def _is_parametrized(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True if a parameter is computed from others (weight normalisation and the like)."""
    usual = "out_proj" if kind is nn.MultiheadAttention else "weight"
    return usual not in module._parameters and usual not in module._modules


def bounds(name: str, what: str, count: int, split: Split) -> list[tuple[int, int]]:
    """Divide `count` items into one range for each worker; each gets at least one."""
    if count < split.size:
        raise ConfigError(
            f"{shown(name)} has {count} {what}, too few for a tensor degree of {split.size}: a degree of up to {count} "
            "fits. Lower strategy.network.tensor, or leave the module out of the plan."
        )
    return split_evenly(count, split.size)


def sizes_of(ranges: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def scaled(ranges: list[tuple[int, int]], factor: int) -> list[tuple[int, int]]:
    return [(start * factor, stop * factor) for start, stop in ranges]


def shown(name: str) -> str:
    """Return the module's name for the begin of a sentence."""
    return f"The module {name!r}" if name else "The model itself"
