"""The choice of model parts that are recomputed in the backward pass.

`blocks`: each repeated block of the model keeps only its input.

`sqrt`: the n layers of a chain form about sqrt(n) groups, each of which keeps only its input. The backward pass holds
one group's activations at a time. So about 2 sqrt(n) layers' activations are kept instead of n, for one more forward
pass (Chen et al. 2016, section 4.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.recompute.chain import Chain, holds_parameters, units_of
from orchestray.trainers.parallel.recompute.checkpointed import Segment

if TYPE_CHECKING:
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.parallel.recompute.meter import ActivationMeter

HOWS = ("none", "blocks", "sqrt")
_LISTS = (nn.Sequential, nn.ModuleList)
_FEW = 4
"""Minimum number of units in a plain sequence; one with fewer is traced, because it would make only one group."""
_LAYERS_WANTED = 16
"""Number of layers to group: the modules of a model that is not a sequence are opened up until there are as many."""


class Recomputed:
    """A record of what was changed in a model; `undo` reverts it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        """Readable name of each part that is recomputed."""
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Revert the changes: all activations are kept from now on."""
        while self._undo:
            self._undo.pop()()
        self.parts.clear()

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replace a module's `forward`; `undo` restores it."""
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
    draw: RngKey | None = None,
    meter: ActivationMeter | None = None,
    blocks: Collection[str] | None = None,
    num_live: int = 1,
    inputs: Callable[[], Any] | None = None,
) -> Recomputed:
    """Compute parts of a model again in the backward pass, in place: names, parameters and results stay the same.

    Outputs, gradients, running statistics and what dropout draws are those without it, bit for bit. `forward` of the
    modules concerned is wrapped, so whatever else wraps it (tensor parallelism, say) does so before.

    Args:
        model: a model, or a stage of a pipeline (`pipeline.stage.Stage`).
        how: "none", "blocks" or "sqrt"; "sqrt" falls back to the blocks if no chain of layers is found.
        draw: key that the random numbers of the modules seeded by `core.rng.seed_modules` depend on.
        meter: counts the tensors that are restored.
        blocks: names of the modules to recompute with "blocks"; names that do not exist are ignored, because a stage
            has only some of the model's modules. Default: those of `find_blocks(model)`.
        num_live: most micro-batches at once between their forward and their backward pass: a pipeline's stage holds
            several. 1 means that the backward pass comes right after the forward pass.
        inputs: returns inputs of the model, by whose form it is traced; default: one tensor.

    Returns:
        A record of the changes; `parts` is empty if there was nothing to recompute.

    Raises:
        ConfigError: `how` is unknown; or it is "sqrt", and the model has no chain of layers, cannot be traced to one,
            and has no blocks.
    """
    if how not in HOWS:
        raise ConfigError(f"train.recompute: must be one of {', '.join(HOWS)}, got {how!r}")
    done = Recomputed()
    if how == "sqrt":
        _recompute_groups(done, model, num_live, draw, meter, inputs)
    if how == "blocks" or (how == "sqrt" and not done.parts):
        _recompute_blocks(done, model, find_blocks(model) if blocks is None else blocks, draw, meter)
    return done


def _recompute_blocks(
    done: Recomputed, model: nn.Module, blocks: Collection[str], draw: RngKey | None, meter: ActivationMeter | None
) -> None:
    named = dict(model.named_modules())
    for name in blocks:
        if (module := named.get(name)) is not None:
            label = f"module {name!r} ({type(module).__name__})"
            done.replace_forward(module, Segment(label, module.forward, [module], draw=draw, meter=meter))
            done.parts.append(label)


def _recompute_groups(
    done: Recomputed,
    model: nn.Module,
    num_live: int,
    draw: RngKey | None,
    meter: ActivationMeter | None,
    inputs: Callable[[], Any] | None,
) -> None:
    try:
        chain = _chain_of(model, num_live, draw, meter, inputs)
    except ConfigError as error:
        if find_blocks(model):
            return
        raise ConfigError(f"train.recompute: sqrt needs the model as a chain of layers. {error}") from error
    # A single group whose backward pass comes next would save nothing.
    if len(chain.groups) > (1 if num_live == 1 else 0):
        done.parts += [segment.name for segment in chain.groups]
        done.replace_forward(model, _in_training(model, chain))


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the model's repeated blocks, outermost ones only.

    A block is an item of a sequence or list with several items of its class; it has parameters and more than one part.
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


def _chain_of(
    model: nn.Module,
    num_live: int,
    draw: RngKey | None,
    meter: ActivationMeter | None,
    inputs: Callable[[], Any] | None,
) -> Any:
    layers = flat(model) if is_plain_sequence(model) else []
    if len(units_of([holds_parameters(layer) for _, layer in layers])) >= _FEW:
        names = [name for name, _ in layers]
        return Chain([layer for _, layer in layers], names, num_live=num_live, draw=draw, meter=meter)
    # Imported late: most models need no tracing.
    from orchestray.trainers.parallel.pipeline.cutting import layers_of
    from orchestray.trainers.parallel.pipeline.stage import Stage
    from orchestray.trainers.parallel.recompute.graph import StageChain

    if isinstance(model, Stage):
        return StageChain(model, num_live=num_live, draw=draw, meter=meter)
    traced = layers_of(None, model, _LAYERS_WANTED, inputs=None if inputs is None else inputs())
    whole = traced.stage(0, len(traced))
    return StageChain(whole, model, form=traced.form, num_live=num_live, draw=draw, meter=meter)


def _in_training(model: nn.Module, chain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs the chain in training, and the model's own forward otherwise."""
    own = model.forward

    def forward(*values: Any, **named: Any) -> Any:
        return chain(*values, **named) if model.training else own(*values, **named)

    return forward


def is_plain_sequence(module: nn.Module) -> bool:
    """Return True if calling the module just calls its children one after the other."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and len(module) > 0
    )


def flat(sequence: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the layers of a sequence with their names; nested sequences are replaced by their layers."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in sequence.named_children():
        has_hooks = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks
        if is_plain_sequence(child) and not has_hooks:
            found += flat(child, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", child))
    return found
