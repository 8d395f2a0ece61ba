"""Splitting a model by a plan, all or nothing: a plan that does not fit leaves the model as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.tensor.area import children_range
from orchestray.trainers.tensor.base import Split, style_of
from orchestray.trainers.tensor.check import Checker
from orchestray.trainers.tensor.own_draws import Draws, drawn_for_parts, drawn_warning, own_draws
from orchestray.trainers.tensor.parts import joined
from orchestray.trainers.tensor.resolve import resolve_plan
from orchestray.trainers.tensor.sequence import finish_regions, link_regions
from orchestray.trainers.tensor.shares import GradientShares

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.collective import Collective
    from orchestray.trainers.tensor.base import Plan

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
    """Split the modules a plan names, in place; all else stays whole. Every worker of the group calls it.

    Args:
        model: with the same weights on every worker; modules keep their names.
        plan: style, or styles joined by a plus, by the name of a module or a pattern of names.
        group_ref: this worker's tensor group of the moment.
        rank: in the group.
        size: of the group.
        example: inputs of one micro-batch, the same on every worker (in the run's precision): the split model's output
            in evaluation mode is held against the plain one's, and so are the gradients of what stays whole.

    Raises:
        ConfigError: a name or style is not known, a part does not fit the degree, or the plan changes what the model
            computes, or tears apart a gradient. The model is whole again.
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
    """What the plain model draws; nothing where it cannot be trained on the example."""
    try:
        return own_draws(model, example)
    except Exception:  # noqa: BLE001 - the user's code, on one micro-batch: the first step says what is wrong with it
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
    """Names of parameters that are one tensor in several modules, in the order of `state_dict`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied: list[list[str]] = []
    for of_one in names.values():
        # A module that is there twice has one name in the plan.
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
    """A module that is there twice has its tensors' pieces under all of their names."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    found = {id(tensor): split.pieces[name] for name, tensor in tensors if name in split.pieces}
    for name, tensor in tensors:
        if id(tensor) in found:
            split.pieces.setdefault(name, found[id(tensor)])


def _close_short_cuts(model: nn.Module, split: Split) -> None:
    """In evaluation, torch's encoder layers read the parameters of the layers within them: not of split ones."""
    for name, module in model.named_modules():
        inside = joined(name, "")
        if not any(piece.startswith(inside) for piece in split.pieces):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # not one that the short cut knows
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


class Snapshot:
    """What a model's modules are made of, to bring it back."""

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
                if contents is not None:  # the same object, which the handles of hooks know
                    value.clear()
                    value.update(contents)
                vars(module)[name] = value


def _contents(name: str, value: Any) -> Any:
    """A copy of what torch keeps in a module: its parameters, buffers, children and hooks, by name."""
    return value.copy() if name.startswith("_") and isinstance(value, dict | set) else None
