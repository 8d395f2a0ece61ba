"""Members of an ensemble that differ by config (`strategy.exchange.members`): what may differ, and what each one's is.

What would change the number of steps, or which samples there are, has to be the same for all: members are trained in
step with each other, and validated together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from orchestray.platform.config import overrides
from orchestray.platform.config.exchanges import Independent
from orchestray.platform.config.problems import Problem, nearest, translate
from orchestray.platform.config.schema import TrainConfig
from orchestray.platform.config.tasks import BUILT_IN
from orchestray.platform.config.view import View

_PATH = "strategy.exchange.members"
_OF_TRAIN = ("train.optimizer", "train.lr_schedule", "train.grad_clip", "train.seed")
"""Keys that may differ, and all that is in them."""
_OF_TASK = {
    "digits": ("hidden", "model", "batch_norm", "dropout"),
    "python_source": ("width", "depth", "heads", "dropout"),
    "parquet": ("hidden",),
}
"""Arguments of the built-in tasks that make the model, not the data."""

FindProblems = Callable[..., list[Problem]]


def member_config(config: TrainConfig, member: int) -> TrainConfig:
    """The config of a run that trains this member alone; its seed is the ensemble's, unless the member has its own.

    Args:
        config: of the ensemble, checked.
        member: its number, from 0.
    """
    data = _data_of(config, _changes(config.strategy.exchange, member))
    return TrainConfig.model_validate(data)


def _changes(exchange: Any, member: int) -> Mapping[str, Any]:
    """What a member has of its own: dotted keys and their values."""
    members = exchange.members if isinstance(exchange, Independent) else ()
    return members[member] if member < len(members) else {}


def _data_of(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a member's config; `config` has at least `task`, `train` and `strategy`.

    Raises:
        ValueError: a key is in no section.
    """
    network = {**config.strategy.network.model_dump(mode="json"), "data": 1}
    data = {
        "name": "member",
        "task": config.task.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "strategy": {"network": network},
    }
    for key, value in changes.items():
        if (problem := overrides.apply(data, tuple(key.split(".")), value)) is not None:
            raise ValueError(problem.text)
    return data


def member_problems(view: View, find_problems: FindProblems, *, look_at_task: bool) -> Iterator[Problem]:
    """What is wrong with the members of an ensemble.

    Args:
        view: of its config.
        find_problems: applies the rules between keys to the view of a member's config.
        look_at_task: as of `find_problems`.
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
    """The sections of a config that a member's is made of."""

    def __init__(self, task: Any, train: Any, strategy: Any) -> None:
        self.task, self.train, self.strategy = task, train, strategy


def _refused(changes: Mapping[str, Any], task_type: str, path: str, *, has_trunk: bool) -> Iterator[Problem]:
    """The keys that may not differ."""
    for key in changes:
        place = f"{path}.{key}"
        section, _, name = key.partition(".")
        if section == "task" and name:
            argument = name.partition(".")[0]
            of_model = _OF_TASK.get(task_type, (argument,) if task_type not in BUILT_IN else ())
            if argument == "type":
                yield Problem(place, "the members learn the same task; give it arguments of a member's own instead")
                continue
            if argument not in of_model:
                text = "makes the data, which all members see"
                if argument not in BUILT_IN[task_type].model_fields:
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
