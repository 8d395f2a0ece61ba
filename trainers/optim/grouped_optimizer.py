"""Groups of parameters, chosen by patterns of their names, that an optimizer treats with other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from orchestray.platform.config.problems import nearest
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.optimizers import Optimizer


@dataclass
class Group:
    """Some parameters and their optimizer."""

    pattern: str
    """Pattern of the names, as in file names: `*` stands for any text."""
    optimizer: Optimizer
    rate: float
    """Learning rate relative to that of the run."""


class GroupedOptimizer(Optimizer):
    """An optimizer for each group of parameters; a parameter belongs to the first group whose pattern its name has."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """
        Args:
            groups: groups, the last of which takes every parameter.
        """
        super().__init__()
        self._groups = list(groups)
        self._indices: list[list[int]] = []
        """Places of each group's parameters among all."""
        optimizers = [group.optimizer for group in groups]
        self.slots = tuple(dict.fromkeys(slot for one in optimizers for slot in one.slots))
        self.whole_slots = {slot: shape for one in optimizers for slot, shape in one.whole_slots.items()}
        self.uses_norms = any(one.uses_norms for one in optimizers)
        self.takes_parts = all(one.takes_parts for one in optimizers)

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._names = [name for name, _ in named]
        self._indices = [[] for _ in self._groups]
        for index, (name, _) in enumerate(named):
            self._indices[_first(name, self._groups)].append(index)
        for group, indices in zip(self._groups, self._indices, strict=True):
            group.optimizer.norm_reducer, group.optimizer.total_reducer = self.norm_reducer, self.total_reducer
            group.optimizer.init([named[index] for index in indices])

    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        for group, indices in zip(self._groups, self._indices, strict=True):
            optimizer = group.optimizer
            optimizer.norm_reducer, optimizer.total_reducer = self.norm_reducer, self.total_reducer
            if indices:
                chosen = [params[index] for index in indices], [grads[index] for index in indices]
                optimizer.step(*chosen, lr * group.rate)

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        """Do nothing: each group has an optimizer."""

    def state_tensors(self) -> dict[str, Tensor]:
        return {key: tensor for group in self._groups for key, tensor in group.optimizer.state_tensors().items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        left = dict(tensors)
        for group, indices in zip(self._groups, self._indices, strict=True):
            names = {self._names[index] for index in indices}
            own = {key: left.pop(key) for key in tensors if key.rpartition(".")[0] in names}
            group.optimizer.load_state_tensors(own)
        if left:
            raise CheckpointError(
                f"The saved optimizer state has {next(iter(left))!r}, which this model has not. Go on with the model "
                "it was saved with."
            )


def make_groups(
    make: Callable[..., Optimizer], groups: Sequence[Mapping[str, Any]], lr: float, **arguments: Any
) -> GroupedOptimizer:
    """Return the optimizer of a section with `groups`.

    Args:
        make: makes an optimizer of the section's other keys.
        groups: the `match` of each group, and the keys whose values are others there.
        lr: learning rate of the run.
        arguments: the section's other keys.
    """
    made = []
    for group in groups:
        own = {key: value for key, value in group.items() if key != "match"}
        rate = float(own.get("lr", lr)) / lr
        made.append(Group(str(group["match"]), make(**{**arguments, "lr": lr, **own}), rate))
    return GroupedOptimizer([*made, Group("*", make(**arguments, lr=lr), 1.0)])


def check_matches(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Refuse patterns that no parameter has.

    Args:
        groups: groups of an optimizer's section.
        names: names of all trainable parameters of the plain model.

    Raises:
        ConfigError: names the pattern, and the nearest name.
    """
    for index, group in enumerate(groups):
        if not any(fnmatchcase(name, group["match"]) for name in names):
            hint = nearest(group["match"], names) or f"; the first is {names[0]!r}" if names else ""
            raise ConfigError(
                f"config: train.optimizer.groups.{index}.match: no parameter has a name like {group['match']!r}{hint}"
            )


def _first(name: str, groups: Sequence[Group]) -> int:
    plain = name.partition(":")[0]  # a server's part of a parameter has its place behind the name
    return next(index for index, group in enumerate(groups) if fnmatchcase(plain, group.pattern))
