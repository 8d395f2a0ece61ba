"""Styles `height` and `width`: each worker computes a part of the image's rows or columns.

The style is put on a container, such as the convolutional part of a network. In an `nn.Sequential` it splits the first
children, as many as work on tiles: convolutions, pooling, elementwise layers, batch normalisation. The image is
gathered before a layer that needs the whole of it, such as `nn.Flatten` or adaptive pooling. In any other container
everything must work on tiles. `halo` describes what is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.rng import draws
from orchestray.trainers.parallel.tensor.functions import gather, scatter
from orchestray.trainers.parallel.tensor.halo import tiling_of
from orchestray.trainers.parallel.tensor.locality import LocallyConnected2d, Tiled
from orchestray.trainers.parallel.tensor.region import (
    children_of,
    children_range,
    enclose,
    even_sizes,
    inner_name,
    is_sequence,
    prepare,
    sequence_range,
)
from orchestray.trainers.parallel.tensor.shapes import has_forward_of, meta_copy, meta_like
from orchestray.trainers.parallel.tensor.tiles import (
    AVERAGE_POOLS,
    CONVOLUTIONS,
    ELEMENTWISE,
    MAX_POOLS,
    num_dims,
    tile_all,
    window_of,
)

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def split_height(module: nn.Module, name: str, split: Split) -> None:
    """Split a part of the network by the image's rows (the last dimension but one)."""
    _split(module, name, split, -2)


def split_width(module: nn.Module, name: str, split: Split) -> None:
    """Split a part of the network by the image's columns (the last dimension)."""
    _split(module, name, split, -1)


class ImageArea:
    """An area in which each worker computes a tile of every image."""

    def __init__(self, split: Split, name: str, dim: int, plain: nn.Module) -> None:
        self.split = split
        self.dim = dim
        self.num_samples = 0
        self._name = name
        self._plain = plain
        """Copy of the area on the meta device: it gives the sizes of whole inputs."""
        self._measured: dict[tuple[int, ...], dict[str, list[int]]] = {}
        self._sizes: dict[str, list[int]] = {}
        self._calls: dict[str, int] = {}

    def enter(self, x: Tensor) -> Tensor:
        key = tuple(x.shape)
        if key not in self._measured:
            self._measured[key] = measure(self._plain, x, self.dim, f"The {self.where}")
        self._sizes, self._calls, self.num_samples = self._measured[key], {}, x.shape[0]
        return scatter(x, self.split.group, self.dim, even_sizes(x.shape[self.dim], self.split))

    def leave(self, y: Any) -> Tensor:
        return gather(y, self.split.group, self.dim, even_sizes(self._sizes[_OUTPUT][0], self.split))

    def whole_size(self, name: str) -> int:
        if name not in self._sizes:
            raise ConfigError(
                f"The {self.where} was not entered where it begins: what is split by its image must stay on one stage "
                "of a pipeline. Cut the pipeline elsewhere (pipeline.split), or split a smaller part."
            )
        sizes, call = self._sizes[name], self._calls.get(name, 0)
        self._calls[name] = call + 1
        return sizes[call % len(sizes)]  # a recomputed pass starts again

    @property
    def where(self) -> str:
        return f"{'height' if self.dim == -2 else 'width'} split of {self._name or 'the model'!r}"


_OUTPUT = ":output"


def measure(plain: nn.Module, x: Tensor, dim: int, where: str) -> dict[str, list[int]]:
    """Return, along `dim`, the size of every module's input, in the order of its calls, and of the output.

    Args:
        plain: the module on the meta device.
        x: a tensor of the shape of the whole input.
        dim: dimension, counted from the end.
        where: name of what is measured, for errors.
    """
    found: dict[str, list[int]] = {}

    def note(name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() >= -dim:
            found.setdefault(name, []).append(inputs[0].shape[dim])

    hooks = [
        part.register_forward_pre_hook(partial(note, name))
        for name, part in plain.named_modules(remove_duplicate=False)
    ]
    try:
        with torch.no_grad():
            y = plain(meta_like(x, plain))
    except Exception as error:
        raise ConfigError(
            f"{where} cannot follow an image of shape {list(x.shape)} through it: {error}. Split a part of it that is "
            "made of modules alone."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(y, Tensor) or y.dim() != x.dim():
        raise ConfigError(
            f"{where} cannot put its output together again: it is no image. Split a part of it that turns an image "
            "into one."
        )
    found[_OUTPUT] = [y.shape[dim]]
    return found


def num_fitting(children: list[tuple[str, nn.Module]], dim: int, x: Tensor | None, num_workers: int) -> int:
    """Return how many of a sequence's first children can be split by the image.

    Args:
        children: the children, by name.
        dim: rows (-2) or columns (-1).
        x: a tensor of the shape of their input; None if it is not known, so that rows may turn out to be too few.
        num_workers: number of workers in the tensor group.
    """
    count = 0
    while count < len(children) and _obstacle(children[count][1], children[count][0], dim) is None:
        count += 1
    while count and (x is not None and not _rows_fit(children[:count], dim, x, num_workers)):
        count -= 1
    every = [child for _, child in children]
    while count and (isinstance(every[count - 1], DROPOUTS) or sum(one is every[count - 1] for one in every) > 1):
        count -= 1  # a dropout works as well on the whole; a layer that is used again cannot gather the image
    return count


def _rows_fit(children: list[tuple[str, nn.Module]], dim: int, x: Tensor, num_workers: int) -> bool:
    try:
        sizes = measure(meta_copy(nn.Sequential(OrderedDict(children))), x, dim, "The image")
        for child_name, child in children:
            for name, layer in child.named_modules():
                if (window := window_of(layer, dim)) is not None:
                    for size in sizes.get(inner_name(child_name, name), []):
                        tiling_of(window, size, num_workers, "")
    except ConfigError:
        return False
    return True


def _split(module: nn.Module, name: str, split: Split, dim: int) -> None:
    container, chosen = children_range(name)
    if not list(module.children()):
        raise ConfigError(
            f"tensor_plan: {name!r} is a single layer: put height and width on a container of layers, or on a range of"
            " children of an nn.Sequential, such as '0:5'."
        )
    if chosen is None and not is_sequence(module):
        parts, bounds, plain = [("", module)], None, meta_copy(module)
    else:
        start, stop = _works_on_tiles(module, name, dim) if chosen is None else sequence_range(module, name, chosen)
        bounds = (start, stop)
        parts = children_of(module, bounds, name)
        plain = meta_copy(nn.Sequential(OrderedDict(parts)))
    for part_name, part in parts:
        if (obstacle := _obstacle(part, inner_name(container, part_name), dim)) is not None:
            raise ConfigError(f"tensor_plan: {name!r} cannot be split by its image: {obstacle}")
    area = ImageArea(split, name, dim, plain)
    prepare(parts, area, container)
    for part_name, part in parts:
        tile_all(part, area, part_name, container)
    enclose(module, area, bounds)


def _works_on_tiles(module: nn.Module, name: str, dim: int) -> tuple[int, int]:
    """Return the range of the first children, as many as work on tiles."""
    stop, obstacle = 0, "it has no layers."
    for child_name, child in module._modules.items():
        found = "it has an empty place." if child is None else _obstacle(child, child_name, dim)
        if found is not None:
            obstacle = found
            break
        stop += 1
    if stop == 0:
        raise ConfigError(f"tensor_plan: {name!r} cannot be split by its image: {obstacle}")
    return 0, stop


def _obstacle(module: nn.Module, name: str, dim: int) -> str | None:
    """Return why a module does not work on tiles; None if it does."""
    if isinstance(module, Tiled):
        return _tiles_obstacle(module, name, dim)
    if list(module.children()) and not has_forward_of(module, (nn.Sequential,)):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own:
            return f"{name!r} ({type(module).__name__}) has parameters or buffers of its own."
    if list(module.children()):
        found = (
            _obstacle(child, f"{name}.{child_name}".strip("."), dim) for child_name, child in module.named_children()
        )
        return next((obstacle for obstacle in found if obstacle is not None), None)
    what = f"{name!r} ({type(module).__name__})"
    if has_forward_of(module, (*CONVOLUTIONS, *MAX_POOLS, *AVERAGE_POOLS, LocallyConnected2d)):
        return _windowed_obstacle(module, what, dim)
    if has_forward_of(module, (*ELEMENTWISE, *BATCH_NORMS, *DROPOUTS)) or _is_empty(module):
        return None
    return f"{what} needs the whole image, or is not known to work on a part of it."


def _tiles_obstacle(module: Tiled, name: str, dim: int) -> str | None:
    if dim != -2:
        return f"{name!r} is made of tiles of rows; use height."
    if any(isinstance(part, BATCH_NORMS) or draws(part) for part in module.modules()):
        return f"{name!r} normalises batches, or drops, within its tiles, which cannot be split."
    return None


def _is_empty(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module) == 0


def _windowed_obstacle(module: nn.Module, what: str, dim: int) -> str | None:
    if isinstance(module, LocallyConnected2d):
        return None if dim == -2 else f"{what} is split by rows alone; use height."
    if num_dims(module) < -dim:
        return f"{what} has one spatial dimension; use width."
    if isinstance(module, _ConvNd) and module.padding_mode != "zeros":
        return f"{what} pads with {module.padding_mode!r}; only zeros can be split."
    if isinstance(module, MAX_POOLS) and module.return_indices:
        return f"{what} returns indices, which are those of the whole image."
    return None
