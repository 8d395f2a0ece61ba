"""Attention blocks as users write them: their projection layers, and the attribute with the number of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import AlphaDropout, FeatureAlphaDropout, _DropoutNd

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.dropout import HeadsWay, drop_split
from orchestray.trainers.parallel.tensor.linear import Entrance, cut_input, cut_output, enter_split
from orchestray.trainers.parallel.tensor.parts import (
    SplitModule,
    become,
    bounds,
    check_plain,
    joined,
    kind_of,
    scaled,
    shown,
    sizes_of,
)
from orchestray.trainers.parallel.tensor.rng import WholeDraws

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

HEADS = ("heads", "num_heads", "n_heads", "n_head", "nheads", "num_attention_heads")
KEY_VALUE_HEADS = ("kv_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")
_INNER_WIDTHS = ("all_head_size", "inner_dim", "inner_width")
"""Names of integer attributes that hold the width of all heads together, if they have its value."""
_PACKED = re.compile(r"qkv|query_key_value|c_attn|in_proj|kqv", re.IGNORECASE)
_ROLES = {
    "query": {"q", "query", "queries", "wq", "toq", "qproj"},
    "key": {"k", "key", "keys", "wk", "tok", "kproj"},
    "value": {"v", "value", "values", "wv", "tov", "vproj"},
}
ADVICE = (
    "Such a block must compute its shapes from what its layers give, for example "
    "`self.qkv(x).unflatten(-1, (3, self.heads, self.head_width))` and `.flatten(-2)` before the output layer, never "
    "from the width of its input."
)


@dataclass(frozen=True)
class Attention:
    """The parts of an attention block; names are relative to it."""

    packed: str | None
    """Name of the layer that computes queries, keys and values one after the other."""
    separate: tuple[str, ...]
    """Names of the layers that compute queries, keys and values."""
    output: str
    heads_attribute: str
    num_heads: int
    key_value_heads_attribute: str | None
    num_key_value_heads: int
    head_width: int

    @property
    def layers(self) -> tuple[str, ...]:
        return (*([self.packed] if self.packed else self.separate), self.output)


def find_attention(module: nn.Module) -> Attention | None:
    """Return the parts of a user-written attention block; None if it is not recognized as one."""
    attribute = _integer(module, HEADS)
    if attribute is None:
        return None
    linears = dict(_linears(module))
    packed = next((name for name in linears if _PACKED.search(name)), None)
    separate = tuple(name for role in _ROLES.values() for name in linears if set(_words(name)) & role)
    num_heads: int = getattr(module, attribute)
    if packed is not None:
        width, rest = divmod(linears[packed].out_features, 3)
        projections: tuple[str, ...] = (packed,)
    elif len(separate) == 3:
        width, rest = linears[separate[0]].out_features, 0
        projections = separate
    else:
        return None
    if rest or num_heads < 1 or width % num_heads:
        return None
    order = list(linears)
    after = order[max(order.index(name) for name in projections) + 1 :]
    output = next((name for name in after if linears[name].in_features == width), None)
    if output is None:
        return None
    head_width = width // num_heads
    key_value_heads, attribute_kv = num_heads, None
    if packed is None:
        key_value_heads, rest = divmod(linears[separate[1]].out_features, head_width)
        same = linears[separate[1]].out_features == linears[separate[2]].out_features
        attribute_kv = _integer(module, KEY_VALUE_HEADS)
        if rest or not same or num_heads % key_value_heads:
            return None
        if key_value_heads != num_heads and attribute_kv is None:
            return None
    return Attention(
        packed if packed is not None else None,
        () if packed is not None else separate,
        output,
        attribute,
        num_heads,
        attribute_kv,
        key_value_heads,
        head_width,
    )


class _Block(SplitModule):
    entrance: Entrance
    heads_cut: Cut
    split_rank: int
    draws_itself: bool
    """True if it drops attention weights by a function in training; assumed until its first call."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        try:
            if not (self.training and self.draws_itself):
                return super().forward(*arguments, **options)
            with WholeDraws(self.heads_cut, self.split_rank) as draws:
                output = super().forward(*arguments, **options)
            self.draws_itself = draws.num_draws > 0
            return output
        finally:
            self.entrance.forget()


def split_block(module: nn.Module, name: str, split: Split) -> None:
    """Split a user-written attention block: split its layers by heads, and set its number of heads to this worker's."""
    found = find_attention(module)
    if found is None:
        raise ConfigError(_unseen(module, name))
    linears = dict(module.named_modules())
    # Heads that share keys and values stay on one worker.
    groups = bounds(name, _what(found), found.num_key_value_heads, split)
    queries_each = found.num_heads // found.num_key_value_heads
    heads = scaled(groups, queries_each)
    own = scaled([heads[split.rank]], found.head_width)[0]
    own_group = scaled([groups[split.rank]], found.head_width)[0]
    width = found.num_heads * found.head_width
    if found.packed is not None:
        ranges = {found.packed: [(own[0] + third * width, own[1] + third * width) for third in range(3)]}
    else:
        ranges = {found.separate[0]: [own], found.separate[1]: [own_group], found.separate[2]: [own_group]}
    entrance = Entrance(split.group, split.region_of(name), is_shared=True)
    block = become(module, _Block)
    block.entrance, block.draws_itself = entrance, True
    block.heads_cut, block.split_rank = Cut(1, sizes_of(heads)), split.rank
    for layer in found.layers:
        linear, full_name = linears[layer], joined(name, layer)
        check_plain(linear, full_name, "heads", nn.Linear)
        assert isinstance(linear, nn.Linear)
        if layer == found.output:
            cut_input(linear, full_name, split, own)
        else:
            cut_output(linear, full_name, split, ranges[layer])
            enter_split(linear, split, full_name, entrance)
    sizes = sizes_of(heads)
    setattr(module, found.heads_attribute, sizes[split.rank])
    if found.key_value_heads_attribute is not None:
        setattr(module, found.key_value_heads_attribute, sizes_of(groups)[split.rank])
    for attribute in _INNER_WIDTHS:
        if vars(module).get(attribute) == width:
            setattr(module, attribute, own[1] - own[0])
    for inner_name, inner in module.named_modules():
        if isinstance(inner, _DropoutNd) and not isinstance(inner, AlphaDropout | FeatureAlphaDropout):
            drop_split(inner, joined(name, inner_name), split, HeadsWay(sizes))


def _what(found: Attention) -> str:
    return "heads" if found.num_key_value_heads == found.num_heads else "heads of keys and values"


def _unseen(module: nn.Module, name: str) -> str:
    layers = ", ".join(layer for layer, _ in _linears(module)) or "none"
    return (
        f"{shown(name)} ({kind_of(module)}) cannot be split by heads: it must have an integer attribute of the "
        f"name {', '.join(HEADS[:-1])} or {HEADS[-1]}, and nn.Linear layers for queries, keys and values (one named "
        "like 'qkv' with 3 x width outputs, or three named like 'q', 'k', 'v'), then one that takes width inputs; "
        f"it has the layers: {layers}."
    )


def _integer(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if type(vars(module).get(name)) is int), None)


def _linears(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Linear]]:
    """Yield the fully connected layers in the order of definition, except those of attention blocks inside."""
    for name, child in module.named_children():
        full_name = f"{prefix}{name}"
        if isinstance(child, nn.Linear):
            yield full_name, child
        elif _integer(child, HEADS) is None:
            yield from _linears(child, f"{full_name}.")


def _words(name: str) -> list[str]:
    return re.split(r"[._]", name.lower())
