"""Ensemble members with different configs (`strategy.exchange.members`): the keys that may differ, and their checks.

Members are trained in step with each other, and validated together. Keys that change the number of steps or the
samples must therefore be the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from orchestray.platform.config import overrides
from orchestray.platform.config.problems import Problem, nearest, translate
from orchestray.trainers.config.checked_view import View
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.sync.local.params import Independent
from orchestray.trainers.tasks.registry import TASKS

_PATH = "strategy.exchange.members"
_OF_TRAIN = ("train.optimizer", "train.lr_schedule", "train.grad_clip", "train.seed")
"""Keys that may differ between members, including all keys inside them."""
_OF_TASK = {
    "digits": ("hidden", "model", "batch_norm", "dropout"),
    "python_source": ("width", "depth", "heads", "dropout"),
    "parquet": ("hidden",),
}
"""Arguments of the built-in tasks that determine the model, not the data."""

FindProblems = Callable[..., list[Problem]]


def member_config(config: TrainConfig, member: int) -> TrainConfig:
    """Return the config of a run that trains one member alone, with the ensemble's seed unless the member has its own.

    Args:
        config: checked config of the ensemble.
        member: index of the member, from 0.
    """
    data = _data_of(config, _changes(config.strategy.exchange, member))
    return TrainConfig.model_validate(data)


def _changes(exchange: Any, member: int) -> Mapping[str, Any]:
    """Return the settings of one member that differ from the ensemble's, by dotted key."""
    members = exchange.members if isinstance(exchange, Independent) else ()
    return members[member] if member < len(members) else {}


def _data_of(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain data of a member's config; `config` needs only `task`, `train` and `strategy`.

    Raises:
        ValueError: a key of `changes` cannot be set in the config.
    """
    network = {**config.strategy.network.model_dump(mode="json"), "data": 1}
    data = {
        "name": "member",
        "task": config.task.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "strategy": {"network": network},
    }
    for key in sorted(changes, key=lambda key: key.count(".")):  # a section before the keys in it
        if (problem := overrides.apply(data, tuple(key.split(".")), changes[key], TrainConfig)) is not None:
            raise ValueError(problem.text)
    return data


def member_problems(view: View, find_problems: FindProblems, *, look_at_task: bool) -> Iterator[Problem]:
    """Yield the problems of the members of an ensemble, except those that the ensemble's own config has.

    Args:
        view: view of the ensemble's config.
        find_problems: function that applies the rules between keys to the view of a member's config.
        look_at_task: passed to `find_problems`.
    """
    exchange = view("strategy.exchange")
    if not isinstance(exchange, Independent) or not exchange.members:
        return
    data = view("strategy.network.data")
    if len(exchange.members) != data:
        text = f"must have {data} entries, one for each member (strategy.network.data), got {len(exchange.members)}"
        yield Problem(_PATH, f"{text}; an entry without keys, {{}}, is a member as the rest of the config has it")
    task, _ = view("task"), view("train")
    usual = set(find_problems(_view_of(view, {}), look_at_task=look_at_task))
    for index, changes in enumerate(exchange.members):
        path = f"{_PATH}.{index}"
        refused = list(_refused(changes, task.type, path, has_trunk=exchange.trunk > 0))
        yield from refused
        if refused:
            continue
        try:
            found = find_problems(_view_of(view, changes), look_at_task=look_at_task)
        except ValidationError as error:
            found = translate(error, TrainConfig)
        except ValueError as error:
            found = [Problem(", ".join(changes), str(error))]
        yield from (Problem(f"{path}.{problem.path}", problem.text) for problem in found if problem not in usual)


def _view_of(view: View, changes: Mapping[str, Any]) -> View:
    whole = _Sections(view("task"), view("train"), view("strategy"))
    return View(TrainConfig.model_validate(_data_of(whole, changes)))


class _Sections:
    """The sections of an ensemble's config that a member's config is made from."""

    def __init__(self, task: Any, train: Any, strategy: Any) -> None:
        self.task, self.train, self.strategy = task, train, strategy


def _refused(changes: Mapping[str, Any], task_type: str, path: str, *, has_trunk: bool) -> Iterator[Problem]:
    """Refuse keys that must be the same for all members."""
    for key in changes:
        place = f"{path}.{key}"
        section, _, name = key.partition(".")
        if section == "task" and name:
            argument = name.partition(".")[0]
            of_model = _OF_TASK.get(task_type, (argument,) if task_type not in TASKS else ())
            if argument == "type":
                yield Problem(place, "the members learn the same task; give it arguments of a member's own instead")
                continue
            if argument not in of_model:
                text = "makes the data, which all members see"
                if argument not in TASKS.params(task_type).model_fields:
                    text = f"is no argument of {task_type}{nearest(argument, of_model)}"
                yield Problem(place, f"{text}; a member may have its own {', '.join(of_model)}")
                continue
        elif not any(key == allowed or key.startswith(f"{allowed}.") for allowed in _OF_TRAIN):
            text = "is the same for all members, who train in step and are validated together"
            yield Problem(place, f"{text}; a member may have its own {', '.join(_OF_TRAIN)} and arguments of the task")
            continue
        if has_trunk and key != "train.seed":
            text = "members with a trunk take the same steps with their first layers"
            yield Problem(place, f"{text}; use trunk: 0, or let them differ by train.seed alone")
