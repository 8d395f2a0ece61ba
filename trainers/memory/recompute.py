"""Which parts of a model are computed again in the backward pass in place of being kept.

`blocks`: each repeated block of the model keeps its input alone. `sqrt`: the layers of a chain of n are put together in
about sqrt(n) groups, each of which keeps its input alone; one group at a time is held whole while the backward pass
goes through it, so there are about 2 sqrt(n) layers' activations in place of n, for one more forward pass (Chen et al.
2016, section 4.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.memory.chain import Chain, holds_parameters, units_of
from orchestray.trainers.memory.segments import Segment

if TYPE_CHECKING:
    from orchestray.trainers.memory.meter import ActivationMeter
    from orchestray.trainers.replica.randomness import Draw

HOWS = ("none", "blocks", "sqrt")
_LISTS = (nn.Sequential, nn.ModuleList)
_FEW = 4
"""Layers of a sequence below which they are looked into: fewer make one group."""
_LAYERS_WANTED = 16
"""A model that is no sequence is looked into until there are so many layers to group, if it can be."""


class Recomputed:
    """What was changed in a model; `undo` takes it back."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        """What is computed again, each part by a name for people."""
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Keep all activations from now on."""
        while self._undo:
            self._undo.pop()()
        self.parts.clear()

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Have a module compute by `forward`."""
        own = vars(module).get("forward")
        module.forward = forward

        def put_back() -> None:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own

        self._undo.append(put_back)


def recompute(
    model: nn.Module,
    how: str,
    *,
    draw: Draw | None = None,
    meter: ActivationMeter | None = None,
    blocks: Collection[str] | None = None,
    num_live: int = 1,
) -> Recomputed:
    """Compute parts of a model again in the backward pass, in place: names, parameters and results stay the same.

    Outputs, gradients, running statistics and what dropout draws are those without it, bit for bit. `forward` of the
    modules concerned is wrapped, so whatever else wraps it (tensor parallelism, say) does so before.

    Args:
        model: a model, or a stage of a pipeline (`pipeline.stage.Stage`).
        how: "none", "blocks" or "sqrt"; by "sqrt" it is the blocks too, where no chain of layers is to be found.
        draw: what the random numbers of the modules seeded by `randomness.seed_modules` depend on.
        meter: counts what is brought back.
        blocks: names of the modules to compute again by "blocks", those that are not there being passed over: for a
            stage, whose structure is not the model's. Default: those of `find_blocks(model)`.
        num_live: micro-batches between their forward and their backward pass at once, at most: a pipeline's stage
            holds several. 1 says that the backward pass comes right after the forward pass.

    Returns:
        What was changed; `parts` is empty where there was nothing to compute again.

    Raises:
        ConfigError: there is no such way; or "sqrt", and the model has neither a chain of layers, nor can be traced to
            have one, nor blocks.
    """
    if how not in HOWS:
        raise ConfigError(f"train.recompute: must be one of {', '.join(HOWS)}, got {how!r}")
    done = Recomputed()
    if how == "sqrt":
        _recompute_groups(done, model, num_live, draw, meter)
    if how == "blocks" or (how == "sqrt" and not done.parts):
        _recompute_blocks(done, model, find_blocks(model) if blocks is None else blocks, draw, meter)
    return done


def _recompute_blocks(
    done: Recomputed, model: nn.Module, blocks: Collection[str], draw: Draw | None, meter: ActivationMeter | None
) -> None:
    named = dict(model.named_modules())
    for name in blocks:
        if (module := named.get(name)) is not None:
            label = f"module {name!r} ({type(module).__name__})"
            done.replace_forward(module, Segment(label, module.forward, [module], draw=draw, meter=meter))
            done.parts.append(label)


def _recompute_groups(
    done: Recomputed, model: nn.Module, num_live: int, draw: Draw | None, meter: ActivationMeter | None
) -> None:
    try:
        chain = _chain_of(model, num_live, draw, meter)
    except ConfigError as error:
        if find_blocks(model):
            return
        raise ConfigError(f"train.recompute: sqrt needs the model as a chain of layers. {error}") from error
    # The only group of a model whose backward pass comes next would be held whole, as it is without.
    if len(chain.groups) > (1 if num_live == 1 else 0):
        done.parts += [segment.name for segment in chain.groups]
        done.replace_forward(model, _in_training(model, chain))


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of a model: items of a sequence or list that holds several of their class, with
    parameters and more than one part.

    Blocks within blocks are not looked for.
    """
    found: list[str] = []
    _find_blocks(model, "", found)
    return found


def _find_blocks(module: nn.Module, prefix: str, found: list[str]) -> None:
    kinds = Counter(type(child) for child in module.children()) if isinstance(module, _LISTS) else Counter()
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if kinds[type(child)] > 1 and _is_block(child):
            found.append(path)
        else:
            _find_blocks(child, f"{path}.", found)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    parts = sum(1 for part in module.modules() if part is not module and not isinstance(part, _LISTS))
    return parts > 1 and holds_parameters(module)


def _chain_of(model: nn.Module, num_live: int, draw: Draw | None, meter: ActivationMeter | None) -> Any:
    layers = flat(model) if is_plain_sequence(model) else []
    if len(units_of([holds_parameters(layer) for _, layer in layers])) >= _FEW:
        names = [name for name, _ in layers]
        return Chain([layer for _, layer in layers], names, num_live=num_live, draw=draw, meter=meter)
    # Late: most models need no tracing.
    from orchestray.trainers.memory.graph import StageChain
    from orchestray.trainers.pipeline.cutting import layers_of
    from orchestray.trainers.pipeline.stage import Stage

    if isinstance(model, Stage):
        return StageChain(model, num_live=num_live, draw=draw, meter=meter)
    traced = layers_of(None, model, _LAYERS_WANTED)
    return StageChain(traced.stage(0, len(traced)), model, num_live=num_live, draw=draw, meter=meter)


def _in_training(model: nn.Module, chain: Callable[..., Any]) -> Callable[..., Any]:
    """The chain while training, the model's own forward otherwise."""
    own = model.forward

    def forward(*values: Any) -> Any:
        return chain(*values) if model.training else own(*values)

    return forward


def is_plain_sequence(module: nn.Module) -> bool:
    """Whether calling a module is calling its children one after the other, and nothing else is known of it."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and len(module) > 0
    )


def flat(sequence: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of a sequence by name, with those of sequences in it in their place."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in sequence.named_children():
        has_hooks = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks
        if is_plain_sequence(child) and not has_hooks:
            found += flat(child, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", child))
    return found
