"""What splitting a model over a tensor group needs and leaves behind; one file per family of styles.

A plan says of a module, by its name, in which style it is split: `{"blocks.0.feed_forward_input": "output"}`. A style
changes the module in place: it keeps this worker's part of the parameters under their own names, and changes `forward`
so that the group's workers together compute what the whole module would. Two styles of one module are joined by a plus:
`{"blocks.0": "heads+sequence"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from orchestray.trainers.layout.pieces import split_evenly

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.trainers.layout.pieces import Piece

Plan = Mapping[str, str]
"""Style by module name; names are those of `model.named_modules()`, or of a range of children of an `nn.Sequential`:
`features.0:5`, or `0:5` where the model is one. A range of the whole model's children keeps their names."""


@dataclass(frozen=True)
class Cut:
    """How an activation is split."""

    dim: int
    """Counted from the end where negative."""
    sizes: tuple[int, ...]
    """Of every worker's part."""


@dataclass
class Region:
    """A part of the model in which activations are split along the time."""

    dim: int
    """The time's."""
    num_parts: int
    length: int = 0
    """Of the time in the current forward pass; known from its entrance on."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in split_evenly(self.length, self.num_parts))


@dataclass
class Split:
    """A model being split: where its parts lie, and who computes what of the gradients."""

    group: Callable[[], Collective]
    """This worker's tensor group of the moment; it changes when the gang meets again."""
    rank: int
    """In the group."""
    size: int
    pieces: dict[str, Piece] = field(default_factory=dict)
    """Of each parameter and persistent buffer that is not whole, by its name in the model. Not listed: whole, counted
    by rank 0 of the group."""
    partial: set[str] = field(default_factory=set)
    """Parameters of whose gradient each worker computes a part: the parts are added up over the group after backward.
    Not listed: a worker's gradient of what it holds is complete."""
    cuts: list[Cut] = field(default_factory=list)
    """What the styles applied so far leave split, in the model's order: the last one is what a dropout that follows
    is given."""
    regions: dict[str, Region] = field(default_factory=dict)
    """Modules in which what no layer splits is split along the time, by name."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know of the split model."""

    def region_of(self, name: str) -> Region | None:
        """The region a module is in, or begins."""
        inside = [top for top in self.regions if not top or name == top or name.startswith(f"{top}.")]
        return self.regions[max(inside, key=len)] if inside else None


Style = Callable[[nn.Module, str, Split], None]
"""Splits the module of that name within the model, in place; raises ConfigError where it cannot."""

STYLES: Mapping[str, str] = {
    # fully connected layers, attention, embeddings, norms
    "output": "orchestray.trainers.tensor.linear:split_output",
    "output_gathered": "orchestray.trainers.tensor.linear:split_output_gathered",
    "input": "orchestray.trainers.tensor.linear:split_input",
    "input_scattered": "orchestray.trainers.tensor.linear:split_input_scattered",
    "heads": "orchestray.trainers.tensor.attention:split_heads",
    "features": "orchestray.trainers.tensor.linear:split_features",
    "embedding": "orchestray.trainers.tensor.embedding:split_vocabulary",
    "sequence": "orchestray.trainers.tensor.sequence:split_sequence",
    "dropout": "orchestray.trainers.tensor.dropout:split_dropout",
    # convolutions
    "channels": "orchestray.trainers.tensor.convolution:split_output_channels",
    "channels_gathered": "orchestray.trainers.tensor.convolution:split_output_channels_gathered",
    "channels_in": "orchestray.trainers.tensor.convolution:split_input_channels",
    "height": "orchestray.trainers.tensor.spatial:split_height",
    "width": "orchestray.trainers.tensor.spatial:split_width",
    # independent branches of a block; parts of a network that split the batch
    "branches": "orchestray.trainers.tensor.branches:split_branches",
    "batch": "orchestray.trainers.tensor.one_weird_trick:split_batch",
}
"""Where each style's function is."""


def style_of(name: str) -> Style:
    """The function of a style; KeyError where there is none."""
    module, _, function = STYLES[name].partition(":")
    found: Style = getattr(import_module(module), function)
    return found
