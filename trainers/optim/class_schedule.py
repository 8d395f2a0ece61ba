"""Learning rates of a class of `torch.optim.lr_scheduler`, or of a user's own, as a function of the step."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from orchestray.platform.errors import ConfigError
from orchestray.platform.task import TaskSource, load_class

_NO_ARGUMENTS = ("type", "file", "source", "modules", "warmup_steps")


def rate_at(schedule: Mapping[str, Any], base_lr: float, num_done: int) -> float:
    """Return the rate that a class gives after some steps.

    Args:
        schedule: `type`, the `file`, `source` and `modules` of a user's class, and the arguments of its constructor.
        base_lr: the optimizer's rate.
        num_done: number of steps of the schedule that are done.

    Raises:
        ConfigError: the class is not a schedule, refuses its arguments, needs more than the step, moves more than the
            rate, or has ended.
    """
    return _rates(json.dumps(dict(schedule), sort_keys=True), base_lr).at(num_done)


class _Rates:
    """The rates of a schedule that is moved on as far as it was asked for."""

    def __init__(self, schedule: Mapping[str, Any], base_lr: float) -> None:
        self._name = name = str(schedule["type"])
        source = TaskSource(name, {}, schedule.get("file"), schedule.get("source"), schedule.get("modules", {}))
        made = load_class(source, key="train.lr_schedule.type")
        if not issubclass(made, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigError(f"config: train.lr_schedule.type: {name} is not a torch.optim.lr_scheduler.LRScheduler")
        arguments = {key: value for key, value in schedule.items() if key not in _NO_ARGUMENTS}
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=base_lr)
        try:
            self._scheduler: Any = made(self._optimizer, **arguments)
            self._known = [self._rate()]
            self._go_on()
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            accepted = [key for key in inspect.signature(made).parameters if key not in ("self", "optimizer")]
            raise ConfigError(
                f"config: train.lr_schedule: {name} cannot be used with these arguments: {error}; it takes "
                f"{', '.join(accepted)}, and learns of nothing but the step"
            ) from error
        self._refuse_more_than_rates()

    def at(self, num_done: int) -> float:
        try:
            while len(self._known) <= num_done:
                self._go_on()
        except Exception as error:
            raise ConfigError(
                f"config: train.lr_schedule: {self._name} has no rate after {len(self._known)} steps, and {num_done} "
                f"are wanted ({type(error).__name__}: {error}); give it more steps, or train fewer"
            ) from error
        self._refuse_more_than_rates()
        return self._known[num_done]

    def _go_on(self) -> None:
        self._optimizer.step()
        self._scheduler.step()
        self._known.append(self._rate())

    def _refuse_more_than_rates(self) -> None:
        [group], fresh = self._optimizer.param_groups, self._optimizer.defaults
        if moved := [key for key in fresh if key != "lr" and group[key] != fresh[key]]:
            advice = "give it cycle_momentum: false" if moved == ["momentum"] else "take another one"
            raise ConfigError(
                f"config: train.lr_schedule: {self._name} moves {' and '.join(moved)} as well, and only the rate "
                f"follows a schedule here; {advice}"
            )

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


@functools.lru_cache(maxsize=32)
def _rates(schedule: str, base_lr: float) -> _Rates:
    return _Rates(json.loads(schedule), base_lr)
