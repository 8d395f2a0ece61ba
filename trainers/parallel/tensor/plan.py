"""The choice of layers to split and of their styles: as the task says, or as found by looking at the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import AlphaDropout, FeatureAlphaDropout, _DropoutNd

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.attention_blocks import find_attention
from orchestray.trainers.parallel.tensor.parts import joined
from orchestray.trainers.parallel.tensor.resolve import resolve_plan

_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU,
    nn.LeakyReLU, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink,
    nn.Softshrink, nn.Hardshrink, nn.Threshold,
)  # fmt: skip
_LARGE_TABLE = 2**20
"""Elements from which splitting an embedding is worth an all-reduce of its outputs."""
_LARGE_SHARE = 8
"""Divisor of the model's parameters: a table must hold at least 1/8 of them to be split."""
_ROWS = {"output", "output_gathered", "embedding"}
"""Styles that split a weight by its rows."""


def plan_of(task: Any, model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Return the plan of the task's model: its `tensor_plan(model)`, names or patterns to styles; otherwise as found.

    Args:
        task: the user's task.
        model: the plain model.
        size: number of workers in the tensor group.
        example: inputs of one micro-batch (see `find_plan`).

    Raises:
        ConfigError: the task's plan names modules or styles that do not exist.
    """
    own_plan = getattr(task, "tensor_plan", None)
    if own_plan is None:
        return find_plan(model, size=size, example=example)
    plan = own_plan(model)
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"The task's tensor_plan(model) must return a dictionary of styles by the names of modules; it returned a "
            f"{type(plan).__name__}."
        )
    return {name: "+".join(styles) for name, styles in resolve_plan(model, plan).items()}


def find_plan(model: nn.Module, *, size: int = 2, example: Any = None) -> dict[str, str]:
    """Return styles for what looks splittable: pairs of fully connected layers, attention, large embeddings.

    How a user's module uses its layers is only guessed, from their order, shapes and names. With an example each guess
    is tried and dropped if it is wrong; without one, `split_model` refuses a wrong one.

    Args:
        model: the plain model; not changed.
        size: number of workers; a layer with fewer parts stays whole.
        example: inputs of one micro-batch.
    """
    search = _Search(size, is_proven=example is not None)
    search.look_at(model, "")
    search.look_at_embeddings(model)
    guesses = _without_torn_ties(model, search.guesses)
    if example is not None:
        guesses = _proven(model, guesses, size, example)
    styles = {name: style for guess in guesses for name, style in guess.styles.items()}
    return {name: styles[name] for name, _ in model.named_modules() if name in styles}


@dataclass(frozen=True)
class _Guess:
    """Styles that belong together."""

    styles: dict[str, str]
    kind: tuple[Any, ...]
    """Kind of the guess: guesses of one kind (the same layers of the same class of
    module) are right or wrong together.
    """
    instead: tuple[str, ...] = field(default=())
    """Layers that may each be split alone if the guess is wrong."""


class _Search:
    def __init__(self, size: int, *, is_proven: bool) -> None:
        self._size = size
        self._is_proven = is_proven
        self._seen: set[int] = set()
        self.guesses: list[_Guess] = []

    def look_at(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if isinstance(module, nn.MultiheadAttention):
            if module.num_heads >= self._size and module.bias_k is None and not module.add_zero_attn:
                self._guess({name: "heads"}, nn.MultiheadAttention)
            return
        if isinstance(module, nn.Sequential):
            self._look_at_layers(list(_flattened(module, name)), nn.Sequential)
            return
        used: set[str] = set()
        attention = find_attention(module)
        if attention is not None:
            used = {joined(name, layer) for layer in attention.layers}
            layers = tuple(sorted(used))
            if attention.num_key_value_heads >= self._size:
                self.guesses.append(_Guess({name: "heads"}, (type(module), "heads", attention), layers))
            else:
                for layer in layers:
                    self._alone(layer, module.get_submodule(layer[len(name) :].lstrip(".")), type(module))
        children = [(joined(name, child), inner) for child, inner in module.named_children()]
        self._look_at_layers([(child, inner) for child, inner in children if child not in used], type(module))

    def _look_at_layers(self, layers: Sequence[tuple[str, nn.Module]], owner: type) -> None:
        """Guess the styles of layers, given in the order they are called in, or at least defined."""
        gated = _gated(layers) if owner is not nn.Sequential else None
        taken: set[str] = set()
        if gated is not None:
            self._guess(gated, owner)
            taken = set(gated)
        index = 0
        while index < len(layers):
            name, layer = layers[index]
            pair = self._pair(layers, index, owner) if type(layer) is nn.Linear and name not in taken else None
            if pair is not None:
                self._guess(pair, owner, [key for key, style in pair.items() if style in {"output", "input"}])
                index = max(position for position, (key, _) in enumerate(layers) if key in pair) + 1
                continue
            if type(layer) is nn.Linear and name not in taken:
                self._alone(name, layer, owner)
            elif not isinstance(layer, nn.Linear):
                self.look_at(layer, name)
            index += 1

    def _pair(self, layers: Sequence[tuple[str, nn.Module]], index: int, owner: type) -> dict[str, str] | None:
        """Return the styles of two fully connected layers, the first at `index`, and of what stands between them."""
        first_name, first = layers[index]
        assert isinstance(first, nn.Linear)
        styles = {first_name: "output"}
        for name, layer in layers[index + 1 :]:
            if type(layer) is nn.Linear:
                fits = layer.in_features == first.out_features >= self._size
                # Square layers defined one after the other may also be called in parallel.
                is_square = first.in_features == first.out_features == layer.out_features
                if not fits or (is_square and owner is not nn.Sequential and not self._is_proven):
                    return None
                return {**styles, name: "input"}
            between = _between(layer, first.out_features)
            if between is None:
                return None
            if between:
                styles[name] = between
        return None

    def _alone(self, name: str, layer: nn.Module, owner: type) -> None:
        if isinstance(layer, nn.Linear) and layer.out_features >= self._size:
            self._guess({name: "output_gathered"}, owner)

    def _guess(self, styles: dict[str, str], owner: type, instead: Sequence[str] = ()) -> None:
        ends = tuple((name.rpartition(".")[2], style) for name, style in styles.items())
        # The layers of a sequence are numbered: one number means different layers in different sequences.
        kind = (owner, tuple(styles.items()) if owner is nn.Sequential else ends)
        self.guesses.append(_Guess(styles, kind, tuple(instead)))

    def look_at_embeddings(self, model: nn.Module) -> None:
        total = sum(parameter.numel() for parameter in model.parameters())
        for name, module in model.named_modules():
            if type(module) is not nn.Embedding or module.num_embeddings < self._size:
                continue
            elements = module.weight.numel()
            is_large = elements >= _LARGE_TABLE and elements * _LARGE_SHARE >= total
            is_special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
            # Positional tables are often read directly, without a call of the module.
            if is_large and not is_special and "pos" not in name.lower():
                self.guesses.append(_Guess({name: "embedding"}, ("embedding", name)))


def _between(layer: nn.Module, width: int) -> str | None:
    """Return the style of a layer between two split layers: "" if it needs none, None if it cannot stand there."""
    if isinstance(layer, _ELEMENTWISE):
        return ""
    if isinstance(layer, _DropoutNd):
        return None if isinstance(layer, AlphaDropout | FeatureAlphaDropout) else "dropout"
    if isinstance(layer, nn.PReLU):
        return "features"
    if isinstance(layer, _BatchNorm):
        return "features" if layer.num_features == width else None
    return None


def _flattened(sequence: nn.Sequential, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in sequence.named_children():
        full_name = joined(name, child_name)
        if type(child) is nn.Sequential:
            yield from _flattened(child, full_name)
        else:
            yield full_name, child


def _gated(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, str] | None:
    """Find a gated feed-forward part (Shazeer, "GLU Variants Improve Transformer", 2020): two layers up, one down."""
    linears = [(name, layer) for name, layer in layers if type(layer) is nn.Linear]
    if len(linears) != 3:
        return None
    shapes = [(layer.in_features, layer.out_features) for _, layer in linears]
    for shape in set(shapes):
        if shapes.count(shape) == 2 and shapes.count(shape[::-1]) == 1 and shape[0] != shape[1]:
            return {
                name: "output" if of_layer == shape else "input"
                for (name, _), of_layer in zip(linears, shapes, strict=True)
            }
    return None


def _without_torn_ties(model: nn.Module, guesses: Sequence[_Guess]) -> list[_Guess]:
    """Drop the guesses that split a tied tensor in one of its places only, or in two ways."""
    styles = {name: style for guess in guesses for name, style in guess.styles.items()}
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    torn = {
        owner
        for owners in places.values()
        if len(owners) > 1 and not all(styles.get(owner) in _ROWS for owner in owners)
        for owner in owners
    }
    return [guess for guess in guesses if not torn & set(guess.styles)]


def _proven(model: nn.Module, guesses: Sequence[_Guess], size: int, example: Any) -> list[_Guess]:
    """Return the guesses that do not change what the model computes."""
    from orchestray.trainers.parallel.tensor.dry_run import rehearse

    def holds(tried: Sequence[_Guess]) -> bool:
        plan = {name: style for guess in tried for name, style in guess.styles.items()}
        return rehearse(model, plan, size, example) is None

    if not guesses or holds(guesses):
        return list(guesses)
    kinds: dict[tuple[Any, ...], list[_Guess]] = {}
    for guess in guesses:
        kinds.setdefault(guess.kind, []).append(guess)
    kept: list[_Guess] = []
    for kind, alike in kinds.items():
        if holds([*kept, *alike]):
            kept += alike
            continue
        alone = [
            _Guess({layer: "output_gathered"}, (*kind, layer))
            for guess in alike
            for layer in guess.instead
            if cast(nn.Linear, model.get_submodule(layer)).out_features >= size
        ]
        if alone and holds([*kept, *alone]):
            kept += alone
    return kept
