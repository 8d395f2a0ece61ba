"""The common types of splitting a model over a tensor group; each family of styles has its own file.

A plan maps the name of a module to its style: `{"blocks.0.feed_forward_input": "output"}`. A style changes the module
in place. It keeps this worker's part of the parameters under their own names. It changes `forward` so that the group's
workers together compute what the whole module would. Two styles of one module are joined by a plus: `{"blocks.0":
"heads+sequence"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from orchestray.platform.data.even_split import split_evenly

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.layout.tensor_slice import TensorSlice

Plan = Mapping[str, str]
"""Style by module name. Names are those of `model.named_modules()`, or a range of children of an `nn.Sequential`:
`features.0:5`, or `0:5` if the model is one. A range of the whole model's children keeps their names.
"""


@dataclass(frozen=True)
class Cut:
    """The split of an activation."""

    dim: int
    """Dimension that is split; counted from the end if negative."""
    sizes: tuple[int, ...]
    """Size of every worker's part."""


@dataclass
class Region:
    """A part of the model in which activations are split along the time."""

    dim: int
    """Time dimension."""
    num_parts: int
    length: int = 0
    """Length of the time in the current forward pass; set where the activation enters the region."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in split_evenly(self.length, self.num_parts))


@dataclass
class Split:
    """A model being split: which parts each worker holds, and who computes what of the gradients."""

    group: Callable[[], Collective]
    """Function that returns this worker's current tensor group; the group changes when the gang meets again."""
    rank: int
    """Rank in the group."""
    size: int
    pieces: dict[str, TensorSlice] = field(default_factory=dict)
    """Slice of each parameter and buffer that is not whole, by its name in the model. All others are whole
    and counted by rank 0 of the group.
    """
    partial: set[str] = field(default_factory=set)
    """Parameters of which each worker computes a part of the gradient; the parts are summed over the group after
    backward. For all others, a worker's gradient of what it holds is complete.
    """
    cuts: list[Cut] = field(default_factory=list)
    """Cuts of the activations that styles applied so far leave split, in the model's order. A dropout that follows gets
    an activation with the last one.
    """
    regions: dict[str, Region] = field(default_factory=dict)
    """Modules within which activations are split along the time, by name."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about the split model for the user."""

    def region_of(self, name: str) -> Region | None:
        """Return the region that a module is in, or begins."""
        inside = [top for top in self.regions if not top or name == top or name.startswith(f"{top}.")]
        return self.regions[max(inside, key=len)] if inside else None


Style = Callable[[nn.Module, str, Split], None]
"""Function that splits the module of that name within the model, in place; raises ConfigError if it cannot."""

STYLES: Mapping[str, str] = {
    # fully connected layers, attention, embeddings, norms
    "output": "orchestray.trainers.parallel.tensor.linear:split_output",
    "output_gathered": "orchestray.trainers.parallel.tensor.linear:split_output_gathered",
    "input": "orchestray.trainers.parallel.tensor.linear:split_input",
    "input_scattered": "orchestray.trainers.parallel.tensor.linear:split_input_scattered",
    "heads": "orchestray.trainers.parallel.tensor.attention:split_heads",
    "features": "orchestray.trainers.parallel.tensor.linear:split_features",
    "embedding": "orchestray.trainers.parallel.tensor.embedding:split_vocabulary",
    "sequence": "orchestray.trainers.parallel.tensor.sequence:split_sequence",
    "dropout": "orchestray.trainers.parallel.tensor.dropout:split_dropout",
    # convolutions
    "channels": "orchestray.trainers.parallel.tensor.convolution:split_output_channels",
    "channels_gathered": "orchestray.trainers.parallel.tensor.convolution:split_output_channels_gathered",
    "channels_in": "orchestray.trainers.parallel.tensor.convolution:split_input_channels",
    "height": "orchestray.trainers.parallel.tensor.spatial:split_height",
    "width": "orchestray.trainers.parallel.tensor.spatial:split_width",
    # independent branches of a block; parts of a network that split the batch
    "branches": "orchestray.trainers.parallel.tensor.branches:split_branches",
    "batch": "orchestray.trainers.parallel.tensor.one_weird_trick:split_batch",
}
"""Import path of each style's function."""


def style_of(name: str) -> Style:
    """Return the function of a style; raise a KeyError for an unknown one."""
    module, _, function = STYLES[name].partition(":")
    found: Style = getattr(import_module(module), function)
    return found
