"""A split of a model by a plan, all or nothing: a plan that does not fit leaves the model as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import Split, style_of
from orchestray.trainers.parallel.tensor.partial_gradients import GradientShares
from orchestray.trainers.parallel.tensor.parts import joined
from orchestray.trainers.parallel.tensor.region import children_range
from orchestray.trainers.parallel.tensor.resolve import resolve_plan
from orchestray.trainers.parallel.tensor.sequence import finish_regions, link_regions
from orchestray.trainers.parallel.tensor.unseeded_rng import Draws, drawn_for_parts, drawn_warning, own_draws
from orchestray.trainers.parallel.tensor.verify import Checker

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.parallel.tensor.base import Plan

_SEQUENCE = "sequence"


def split_model(
    model: nn.Module,
    plan: Plan,
    group_ref: Callable[[], Collective],
    rank: int,
    size: int,
    *,
    example: Any = None,
) -> Split:
    """Split the modules a plan names, in place; all others stay whole. Every worker of the group calls this.

    Args:
        model: the model, with the same weights on every worker; modules keep their names.
        plan: style, or styles joined by a plus, by the name of a module or a pattern of names.
        group_ref: returns this worker's current tensor group.
        rank: this worker's rank in the group.
        size: number of workers in the group.
        example: inputs of one micro-batch, the same on every worker (in the run's precision). The split model's output
            in evaluation mode is compared with the plain one's, and so are the gradients of whole parameters.

    Raises:
        ConfigError: a name or style is unknown, a part does not fit the degree, or the plan changes what the model
            computes or splits a gradient wrongly. The model is then whole again.
        PeerLostError: another worker is gone.
    """
    styles = resolve_plan(model, plan)
    split = Split(group_ref, rank, size)
    if size == 1 or not styles:
        return split
    before = Snapshot(model)
    checker = None if example is None else Checker(model, example)
    shares = None if example is None else GradientShares(model, example, styles)
    plain_draws = {} if example is None else _own_draws(model, example)
    try:
        _apply(model, styles, split)
        if checker is not None and shares is not None:
            checker.check(split, styles, before)
            shares.find(split)
            if plain_draws:  # the same on every worker
                names = drawn_for_parts(plain_draws, own_draws(model, example))
                split.warnings += filter(None, [drawn_warning(model, names)])
    except BaseException:
        before.restore()
        raise
    return split


def _own_draws(model: nn.Module, example: Any) -> Draws:
    """Return what the plain model draws; nothing if it cannot be trained on the example."""
    try:
        return own_draws(model, example)
    except Exception:  # noqa: BLE001 - the user's code, on one micro-batch: the first step reports the error
        return {}


def _apply(model: nn.Module, styles: Mapping[str, Sequence[str]], split: Split) -> None:
    tied = _tied(model)
    modules = dict(model.named_modules())
    sequences = [name for name, of_module in styles.items() if _SEQUENCE in of_module]
    for name in sequences:
        style_of(_SEQUENCE)(modules[name], name, split)
    link_regions(model, sequences, split)
    for name, of_module in styles.items():
        for style in of_module:
            if style != _SEQUENCE:
                style_of(style)(modules[children_range(name)[0]], name, split)
    if split.regions:
        finish_regions(model, split)
    for names in tied:
        _tie_again(model, names, split)
    _name_everywhere(model, split)
    _close_short_cuts(model, split)


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one tensor in several modules, in the order of `state_dict`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied: list[list[str]] = []
    for of_one in names.values():
        # A module that occurs twice has one name in the plan.
        owners = {id(model.get_submodule(name.rpartition(".")[0])): name for name in reversed(of_one)}
        if len(owners) > 1:
            tied.append([name for name in of_one if name in owners.values()])
    return tied


def _tie_again(model: nn.Module, names: Sequence[str], split: Split) -> None:
    first, *others = names
    pieces = [split.pieces.get(name) for name in names]
    ranges = {None if piece is None else piece.ranges for piece in pieces}
    shares = {name in split.partial for name in names}
    if len(ranges) > 1 or len(shares) > 1:
        raise ConfigError(
            f"{' and '.join(names)} are one tensor (tied), but the plan splits them in different ways. Split all of "
            "them by the same dimension (an embedding with 'embedding' and its output layer with 'output_gathered'), "
            "or none."
        )
    if ranges == {None}:
        return
    owner, _, tensor = first.rpartition(".")
    parameter = model.get_submodule(owner)._parameters[tensor]
    for name in others:
        owner, _, tensor = name.rpartition(".")
        model.get_submodule(owner)._parameters[tensor] = parameter
    for name in names:
        split.pieces[name] = replace(split.pieces[name], name=first)


def _name_everywhere(model: nn.Module, split: Split) -> None:
    """Register the slices of a module that occurs twice under all of its names."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    found = {id(tensor): split.pieces[name] for name, tensor in tensors if name in split.pieces}
    for name, tensor in tensors:
        if id(tensor) in found:
            split.pieces.setdefault(name, found[id(tensor)])


def _close_short_cuts(model: nn.Module, split: Split) -> None:
    """Turn off the fast paths of torch's encoder layers: in evaluation they read
    the parameters of split layers directly.
    """
    for name, module in model.named_modules():
        inside = joined(name, "")
        if not any(piece.startswith(inside) for piece in split.pieces):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # not one that the fast path knows
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


class Snapshot:
    """The contents of a model's modules, to restore it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (module, type(module), [(name, value, _contents(name, value)) for name, value in vars(module).items()])
            for module in model.modules()
        ]

    def restore(self) -> None:
        for module, kind, attributes in self._modules:
            module.__class__ = kind
            vars(module).clear()
            for name, value, contents in attributes:
                if contents is not None:  # the same object, because the handles of hooks refer to it
                    value.clear()
                    value.update(contents)
                vars(module)[name] = value


def _contents(name: str, value: Any) -> Any:
    """Return a copy of a collection that torch keeps in a module: parameters, buffers, children or hooks, by name."""
    return value.copy() if name.startswith("_") and isinstance(value, dict | set) else None
