"""Groups of parameters, chosen by patterns of their names, that an optimizer treats with other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.config.problems import nearest
from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.trainers.optim.optimizers import Optimizer

if TYPE_CHECKING:
    from orchestray.trainers.layout.tensor_slice import TensorSlice


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

        Raises:
            ConfigError: steps depend on parameters of other groups.
        """
        super().__init__()
        self._groups = list(groups)
        self._indices: list[list[int]] = []
        """Places of each group's parameters among all."""
        self._of_name: dict[str, Optimizer] = {}
        """Optimizer of each parameter."""
        optimizers = [group.optimizer for group in groups]
        if any(one.mixes_parameters for one in optimizers):
            raise ConfigError(
                "config: train.optimizer.groups: the step of a parameter depends on the gradients of all, and each "
                "group has an optimizer of its own; take the groups out, or use another optimizer"
            )
        self.slots = tuple(dict.fromkeys(slot for one in optimizers for slot in one.slots))
        self.whole_slots = {slot: shape for one in optimizers for slot, shape in one.whole_slots.items()}
        self.uses_norms = any(one.uses_norms for one in optimizers)
        self.takes_parts = all(one.takes_parts for one in optimizers)

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._names = [name for name, _ in named]
        self._indices = [[] for _ in self._groups]
        for index, (name, _) in enumerate(named):
            self._indices[self._group_of(index, name)].append(index)
        for group, indices in zip(self._groups, self._indices, strict=True):
            group.optimizer.norm_reducer, group.optimizer.total_reducer = self.norm_reducer, self.total_reducer
            group.optimizer.init([named[index] for index in indices])
            self._of_name |= {self._names[index]: group.optimizer for index in indices}

    def _group_of(self, index: int, name: str) -> int:
        """Return the group of a parameter, given its place among all and its name."""
        del index
        return _first(self.first_names.get(name, name), self._groups)

    def replaced(self, change: Callable[[Optimizer], Optimizer]) -> Optimizer:
        for group in self._groups:
            group.optimizer = group.optimizer.replaced(change)
        return self

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        for group in self._groups:
            group.optimizer.join(replicas, is_alike=is_alike)

    def slots_of(self, name: str) -> tuple[str, ...]:
        return self._of_name[name].slots_of(name)

    def slot_piece(self, name: str, slot: str, piece: TensorSlice) -> TensorSlice:
        return self._of_name[name].slot_piece(name, slot, piece)

    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        for group, indices in zip(self._groups, self._indices, strict=True):
            optimizer = group.optimizer
            optimizer.norm_reducer, optimizer.total_reducer = self.norm_reducer, self.total_reducer
            if indices or optimizer.uses_norms:  # others may have parameters of the group, and wait for these norms
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


def check_matches(
    groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Tensor]], key: str = "train.optimizer"
) -> None:
    """Refuse patterns that no trained parameter has.

    Args:
        groups: groups of an optimizer's section.
        named: all parameters of the plain model, by their first names.
        key: key of that section in the config.

    Raises:
        ConfigError: names the pattern, and the nearest name.
    """
    trained = {name: parameter.requires_grad for name, parameter in named}
    for index, group in enumerate(groups):
        pattern = group["match"]
        found = [name for name in trained if fnmatchcase(name, pattern)]
        if any(trained[name] for name in found):
            continue
        if found:
            reason = f"{pattern!r} matches only parameters that are not trained, such as {found[0]!r}"
        else:
            names = [name for name, is_trained in trained.items() if is_trained]
            hint = nearest(pattern, names) or f"; the first is {names[0]!r}" if names else ""
            reason = f"no parameter has a name like {pattern!r}{hint}"
        raise ConfigError(f"config: {key}.groups.{index}.match: {reason}")


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by the others."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _first(name: str, groups: Sequence[Group]) -> int:
    plain = name.partition(":")[0]  # a server's part of a parameter has its place behind the name
    return next(index for index, group in enumerate(groups) if fnmatchcase(plain, group.pattern))
