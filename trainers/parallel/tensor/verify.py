"""A comparison of a split model with the plain one: a plan that changes what the model computes is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.platform.process.alike import torch_state
from orchestray.trainers.core import modes
from orchestray.trainers.core.every_tensor import every_tensor_in
from orchestray.trainers.core.inputs import call
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.tensor.attention_blocks import ADVICE
from orchestray.trainers.parallel.tensor.parts import joined, kind_of, shown
from orchestray.trainers.parallel.tensor.rng import draw_for_whole, watched_dropouts

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

Styles = Mapping[str, Sequence[str]]
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_SHORT = 5e-2
"""Tolerance relative to the largest number of the plain tensor, for types of 16 bits."""
_SEED = 20
_NOT_ZERO = 0.1
_HINT = (
    "Leave it out of the plan (or give it the style 'whole'); the styles 'output_gathered' and 'input_scattered' split "
    "a layer whatever surrounds it."
)


class Undo(Protocol):
    def restore(self) -> None: ...


class Checker:
    """The outputs of the plain model, recorded before it is split, to compare the split model with."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._example = example
        with evaluating(model), watched_dropouts(model) as shapes:
            self._plain = _tensors(call(model, example))
        self._plain_shapes = shapes

    def check(self, split: Split, styles: Styles, undo: Undo) -> None:
        """Raise a ConfigError that names the first module with a different output, if the outputs differ.

        Every worker gets the same result. On a difference, `undo` makes the model plain again.
        """
        with watched_dropouts(self._model) as shapes:
            outputs = self._split_outputs(styles)
        differs = not _same(outputs, self._plain)
        verdict = torch.tensor([float(differs)], device=self._plain[0].device if self._plain else None)
        split.group().all_reduce(verdict, "max")
        if verdict.item() == 0.0:
            draw_for_whole(self._model, split, self._plain_shapes, shapes)
            return
        calls_split = self._record()
        undo.restore()
        name, apart = _first_different(self._record(), calls_split, split)
        raise ConfigError(_sentence(self._model, name, apart, styles))

    def _split_outputs(self, styles: Styles) -> list[Tensor]:
        inside: list[str] = []
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(_enter, inside, name)))
            handles.append(module.register_forward_hook(partial(_leave, inside)))
        try:
            with evaluating(self._model):
                return _tensors(call(self._model, self._example))
        except (PeerLostError, ConfigError):
            raise
        except Exception as error:
            name = inside[-1] if inside else ""
            raise ConfigError(
                f"Split by this plan, the model fails in {_called(self._model, name, styles)}: {_cause(error)}. "
                f"{_advice(name, styles)}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _record(self) -> list[tuple[str, list[Tensor]]]:
        """Return each module's outputs, in the order the modules finish."""
        calls: list[tuple[str, list[Tensor]]] = []
        handles = [
            module.register_forward_hook(partial(_note, calls, name)) for name, module in self._model.named_modules()
        ]
        try:
            with evaluating(self._model):
                call(self._model, self._example)
        finally:
            for handle in handles:
                handle.remove()
        return calls


def _cause(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _enter(inside: list[str], name: str, _module: nn.Module, _inputs: Any) -> None:
    inside.append(name)


def _leave(inside: list[str], _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    inside.pop()


def _note(calls: list[tuple[str, list[Tensor]]], name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
    calls.append((name, _tensors(outputs, copied=True)))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside, without gradients, with the same random numbers on every worker."""
    state = torch_state()
    torch.default_generator.manual_seed(_SEED)
    try:
        with modes.evaluating(model), torch.no_grad():
            yield
    finally:
        torch.default_generator.set_state(state)


@contextlib.contextmanager
def nothing_hidden(model: nn.Module) -> Iterator[None]:
    """Give parameters that begin as zeros (a block's last layer, a gate) other values inside.

    Zeros would hide an error of the split in what they multiply, in outputs and in gradients. The model may be split
    inside: parameters of these names are zero again afterwards.
    """
    generator = torch.Generator().manual_seed(_SEED)
    hidden: list[str] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _NOT_ZERO)
                hidden.append(name)
    try:
        yield
    finally:
        with torch.no_grad():
            for name in hidden:
                model.get_parameter(name).zero_()


def _tensors(value: Any, *, copied: bool = False) -> list[Tensor]:
    return [tensor.detach().clone() if copied else tensor.detach() for tensor in every_tensor_in(value)]


def _same(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> bool:
    return len(ours) == len(plain) and all(_apart(a, b) == 0.0 for a, b in zip(ours, plain, strict=True))


def in_reals(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs; other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _apart(ours: Tensor, plain: Tensor) -> float:
    """Return the largest difference, 0 if it is within the tolerance."""
    if ours.shape != plain.shape:
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    a, b = in_reals(ours).double(), in_reals(plain).double()
    # Infinities (masks) and NaNs must be in the same places.
    usual = b.isfinite()
    if not torch.equal(a.isfinite(), usual) or not torch.equal(a[~usual].nan_to_num(7.0), b[~usual].nan_to_num(7.0)):
        return float("inf")
    apart = float((a - b)[usual].abs().max()) if usual.any() else 0.0
    size = float(b[usual].abs().max()) if usual.any() else 0.0
    kind = plain.dtype.to_real() if plain.is_complex() else plain.dtype
    tolerance = _TOLERANCES.get(kind, _TOLERANCE_SHORT) if kind.is_floating_point else 0.0
    return apart if apart > tolerance * size else 0.0


def _first_different(
    plain: Sequence[tuple[str, list[Tensor]]], ours: Sequence[tuple[str, list[Tensor]]], split: Split
) -> tuple[str, float]:
    """Return the first module whose output differs from the plain one's and from this worker's part of it."""
    left: dict[str, list[list[Tensor]]] = {}
    for name, outputs in ours:
        left.setdefault(name, []).append(outputs)
    for name, outputs in plain:
        if not left.get(name):
            continue  # not called any more once the model is split
        for mine, whole in zip(left[name].pop(0), outputs, strict=False):
            part = _part(whole, mine, split.pieces.get(joined(name, "weight")), split)
            apart = 0.0 if part is None else _apart(mine, part)
            if apart > 0.0:
                return name, apart
    return "", float("nan")


def _part(whole: Tensor, mine: Tensor, piece: TensorSlice | None, split: Split) -> Tensor | None:
    """Return the part of the plain output that the split module should give; None if it is not known."""
    if whole.shape == mine.shape or whole.dim() != mine.dim():
        return whole if whole.shape == mine.shape else None
    dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != mine.shape[dim]]
    if len(dims) != 1:
        return None
    (dim,) = dims
    if piece is not None and piece.shape[0] == whole.shape[dim] and piece.local_shape[0] == mine.shape[dim]:
        parts = [whole.narrow(dim, start, stop - start) for start, stop in piece.ranges[0]]
        return torch.cat(parts, dim)
    start, stop = split_evenly(whole.shape[dim], split.size)[split.rank]
    return whole.narrow(dim, start, stop - start) if stop - start == mine.shape[dim] else None


def _sentence(model: nn.Module, name: str, apart: float, styles: Styles) -> str:
    by = f", by up to {apart:.2g}," if 0.0 < apart < float("inf") else ""
    return (
        f"This plan changes what the model computes: the first output that differs{by} is that of "
        f"{_called(model, name, styles)}. {_advice(name, styles)}"
    )


def _called(model: nn.Module, name: str, styles: Styles) -> str:
    called = f"{shown(name)[0].lower()}{shown(name)[1:]} ({kind_of(model.get_submodule(name))})"
    planned = _planned(name, styles)
    if planned is None:
        return called
    style = "+".join(styles[planned])
    return (
        f"{called}, split in the style {style!r}" if planned == name else f"{called}, part of {planned!r} ({style!r})"
    )


def _advice(name: str, styles: Styles) -> str:
    planned = _planned(name, styles)
    if planned is not None and "heads" in styles[planned]:
        return f"{ADVICE} Or leave {planned!r} out of the plan."
    return _HINT


def _planned(name: str, styles: Styles) -> str | None:
    """Return the plan's module that `name` is, or is in."""
    found = [top for top in styles if not top or name == top or name.startswith(f"{top}.")]
    return max(found, key=len) if found else None
