"""Areas: parts of a model in which each worker of a tensor group computes a part of the samples, or of the image.

An area cuts its input along one dimension at its entrance, and gathers its output at its exit. Within, parameters are
whole and the same on every worker; each worker's gradient of them is a part of the whole (`partial`). Batch
normalisation takes its statistics over all workers, and dropout drops what one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from orchestray.platform.comm.collective import Collective, Operation
from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import _Synchronized, synchronize
from orchestray.trainers.core.rng import draws
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.dropout import drop_split
from orchestray.trainers.parallel.tensor.functions import gather, scatter
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, joined, shown, sizes_of

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split


class SplitRegion(Protocol):
    """The split in a part of the model, and the size of what is split."""

    split: Split
    dim: int
    num_samples: int
    """Number of samples of the current pass, over all workers."""

    def enter(self, x: Tensor) -> Tensor:
        """Return this worker's part of the area's input."""

    def leave(self, y: Any) -> Tensor:
        """Return the whole output, from this worker's part of it."""

    def whole_size(self, name: str) -> int:
        """Return the whole size along `dim` of the input of the area's module of that name, which is called now."""


class BatchArea:
    """An area in which each worker computes a part of the samples of every micro-batch."""

    dim = 0

    def __init__(self, split: Split, name: str) -> None:
        self.split = split
        self._name = name
        self.num_samples = 0

    def enter(self, x: Tensor) -> Tensor:
        self.num_samples = x.shape[0]
        return scatter(x, self.split.group, 0, even_sizes(self.num_samples, self.split))

    def leave(self, y: Any) -> Tensor:
        sizes = even_sizes(self.num_samples, self.split)
        if not isinstance(y, Tensor) or y.dim() == 0 or y.shape[0] != sizes[self.split.rank]:
            raise ConfigError(
                f"{shown(self._name)} is split by samples, and does not return one tensor with a row for each sample. "
                "Split a part of it that does."
            )
        return gather(y, self.split.group, 0, sizes)

    def whole_size(self, name: str) -> int:
        return self.num_samples


def even_sizes(size: int, split: Split) -> tuple[int, ...]:
    """Return how many of `size` each worker has."""
    return sizes_of(split_evenly(size, split.size))


def prepare(parts: Sequence[tuple[str, nn.Module]], area: SplitRegion, container: str) -> None:
    """Adapt the modules in an area: gradients, normalisation, dropout.

    Args:
        parts: the modules of the area, by their names in the container; the container itself by "".
        area: the area.
        container: the container's name in the model.
    """
    split = area.split
    for part_name, part in parts:
        for name, module in list(part.named_modules()):
            inner = inner_name(part_name, name)
            _check_unsplit(module, inner_name(container, inner))
            _keep_drawing(module, area, inner, inner_name(container, inner))
            cast(Any, module).splits_rows = True
        start = inner_name(container, part_name)
        split.partial.update(joined(start, name) for name, value in part.named_parameters() if value.requires_grad)
        _normalise_together(part, area)


def inner_name(container: str, name: str) -> str:
    """Return the name of a module in a container that itself has a name; either may be empty."""
    return f"{container}.{name}".strip(".")


def _normalise_together(part: nn.Module, area: SplitRegion) -> None:
    """Make batch normalisation take its statistics over the group, and also over all replicas if it did so before."""
    group = area.split.group
    for module in part.modules():
        if isinstance(module, _Synchronized):
            module.collective_ref = partial(_Product, group, module.collective_ref)
    before = {id(module) for module in part.modules() if isinstance(module, _Synchronized)}
    synchronize(part, group)
    for module in list(part.modules()):
        if isinstance(module, _Synchronized) and id(module) not in before:
            become(module, _LocalNorm).area = area


class _LocalNorm(SplitModule):
    """The batch normalisation of a replica that normalises on its own; a pass without samples does not count."""

    area: SplitRegion

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.area.num_samples:
            return cast(Tensor, super().forward(x))
        layer, shape = cast(_BatchNorm, self), (-1, *[1] * (x.dim() - 2))
        # An empty result that zero gradients go back through, as on the replicas with samples.
        return x * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else x


class _Product(Collective):
    """The workers of a group and the replicas of each, as far as batch normalisation needs a collective."""

    def __init__(self, one: Callable[[], Collective], other: Callable[[], Collective]) -> None:
        self._pair = (one(), other())
        self.rank = self._pair[1].rank * self._pair[0].size + self._pair[0].rank
        self.size = self._pair[0].size * self._pair[1].size

    def sibling(self, name: str) -> Collective:
        one, other = self._pair
        return _Product(lambda: one.sibling(name), lambda: other.sibling(name))

    def all_gather(self, tensor: Tensor) -> Tensor:
        one, other = self._pair
        return other.all_gather(one.all_gather(tensor)).flatten(0, 1)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        for group in self._pair:
            group.all_reduce(tensor, operation)


def _check_unsplit(module: nn.Module, name: str) -> None:
    if isinstance(module, SplitModule):
        raise ConfigError(
            f"The plan splits the module {name!r} twice: on its own, and as a part of a container whose samples or "
            "image are split. Leave one of them out of the plan."
        )


def _keep_drawing(module: nn.Module, area: SplitRegion, name: str, full_name: str) -> None:
    if isinstance(module, _DropoutNd):
        drop_split(module, full_name, area.split, _AreaWay(area, name), takes_whole=False)
    elif draws(module):
        raise ConfigError(
            f"The plan splits what {full_name!r} ({type(module).__name__}) is in, and its random numbers cannot be "
            "split so that they stay those of one process. Use nn.Dropout in its place, or split a smaller part."
        )


class _AreaWay:
    """The split of a dropout's input in an area."""

    def __init__(self, area: SplitRegion, name: str) -> None:
        self._area = area
        self._name = name

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        sizes = even_sizes(self._area.whole_size(self._name), self._area.split)
        return Cut(self._area.dim, sizes) if x.shape[self._area.dim] == sizes[rank] else None


# -- which modules of a container ------------------------------------------------------------------------------------


def children_range(name: str) -> tuple[str, slice | None]:
    """Return the container and the children of a name such as `features.0:5`; no children means the whole module."""
    container, _, last = name.rpartition(".")
    if ":" not in last:
        return name, None
    start, _, stop = last.partition(":")
    if not all(bound == "" or bound.isdecimal() for bound in (start, stop)):
        raise ConfigError(f"tensor_plan: {name!r} is no range of children; write it as 'features.0:5' or '0:5'.")
    return container, slice(int(start or 0), int(stop) if stop else None)


def is_sequence(module: nn.Module) -> bool:
    """Return True if the module just calls its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def sequence_range(module: nn.Module, name: str, chosen: slice) -> tuple[int, int]:
    """Return the children of a sequence that a plan chose; raise a ConfigError if
    the module is another, or lacks them.
    """
    if not isinstance(module, nn.Sequential) or not is_sequence(module):
        raise ConfigError(f"tensor_plan: {name!r} names a range of children, and its container is no nn.Sequential.")
    start, stop, _ = chosen.indices(len(module))
    if start >= stop:
        raise ConfigError(f"tensor_plan: {name!r} names none of the {len(module)} children there are.")
    return start, stop


def ends_are_unique(module: nn.Module) -> bool:
    """Return True if the first and the last child of a sequence are each called once."""
    children = list(module._modules.values())
    return bool(children) and all(
        sum(other is child for other in children) == 1 for child in (children[0], children[-1])
    )


def children_of(module: nn.Module, bounds: tuple[int, int], name: str) -> list[tuple[str, nn.Module]]:
    """Return some children of a sequence, by name; raise a ConfigError if the first or last of them occurs twice."""
    children = [(child_name, child) for child_name, child in module._modules.items() if child is not None]
    chosen = children[slice(*bounds)]
    for child_name, child in (chosen[0], chosen[-1]):
        if sum(other is child for _, other in children) > 1:
            raise ConfigError(
                f"tensor_plan: {name!r} begins or ends with the child {child_name!r}, which is called several times in "
                "its sequence. Make a module for each place."
            )
    return chosen


class _WhollySplit(SplitModule):
    """A module that is an area on its own."""

    area: SplitRegion

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        if any(isinstance(value, Tensor) for value in (*rest, *options.values())):
            raise ConfigError(
                f"The plan splits a {type(self).__name__}, which is called with several tensors: only the first would "
                "be split. Split a part of it that takes one."
            )
        return self.area.leave(super().forward(self.area.enter(x), *rest, **options))

    def own_input(self, x: Tensor) -> Tensor:
        """Return this worker's part of an input, which is computed with."""
        return _own_part(x, self.area)

    def own_output(self, y: Tensor) -> Tensor:
        """Return this worker's part of an output, or of its gradient."""
        return _own_part(y, self.area)


class _First(SplitModule):
    """The first of an area's children: its input is cut."""

    area_before: SplitRegion

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.area_before.enter(x))

    def own_input(self, x: Tensor) -> Tensor:
        """Return this worker's part of an input, which is computed with."""
        return _own_part(x, self.area_before)


class _Last(SplitModule):
    """The last of an area's children: its output is gathered."""

    area_after: SplitRegion

    def forward(self, x: Tensor) -> Tensor:
        return self.area_after.leave(super().forward(x))

    def own_output(self, y: Tensor) -> Tensor:
        """Return this worker's part of an output, or of its gradient."""
        return _own_part(y, self.area_after)


def _own_part(whole: Tensor, area: SplitRegion) -> Tensor:
    start, stop = split_evenly(whole.shape[area.dim], area.split.size)[area.split.rank]
    return whole.narrow(area.dim, start, stop - start)


def enclose(module: nn.Module, area: SplitRegion, bounds: tuple[int, int] | None) -> None:
    """Cut what enters an area, and gather what leaves it.

    In a sequence the children do so, not the sequence: it may be divided into a pipeline's layers.

    Args:
        module: the container.
        area: the area.
        bounds: in a sequence, the first child and the one after the last; None: the whole module.
    """
    if bounds is None:
        become(module, _WhollySplit).area = area
        return
    first, last = (list(module._modules.values())[index] for index in (bounds[0], bounds[1] - 1))
    become(cast(nn.Module, first), _First).area_before = area
    become(cast(nn.Module, last), _Last).area_after = area
