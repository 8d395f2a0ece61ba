"""Rules between the keys of a config, each a sentence with its reason.

A rule looks at values through a `View`, which knows which of them are unusable already: a rule that would need one of
those says nothing, so that one mistake gives one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orchestray.platform.config.compression_checks import COMPRESSION_RULES
from orchestray.platform.config.exchange_checks import EXCHANGE_RULES
from orchestray.platform.config.fault_checks import FAULT_RULES, find_teacher
from orchestray.platform.config.members import member_problems
from orchestray.platform.config.network_checks import NETWORK_RULES
from orchestray.platform.config.optimizers import Cosine, Linear, Sgd
from orchestray.platform.config.own_task import metric_names, problems_of
from orchestray.platform.config.paths import KNOWN_SCHEMES, scheme_of
from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.platform.config.tasks import BUILT_IN, ParquetTask, PythonSourceTask
from orchestray.platform.config.view import Rule, Unusable, View


def find_problems(view: View, *, look_at_task: bool) -> list[Problem]:
    """Every rule between keys that the config breaks.

    If asked for, the files it names are looked at too: that of a user's own task, and the run it is to learn from.
    """
    problems: list[Problem] = []
    for rule in (_own_task, *_RULES, _until, find_teacher) if look_at_task else _RULES:
        try:
            problems += rule(view)
        except Unusable:
            continue
    with contextlib.suppress(Unusable):
        problems += member_problems(view, find_problems, look_at_task=look_at_task)
    return problems


def _length(view: View) -> Iterator[Problem]:
    epochs, steps = view("train.epochs"), view("train.steps")
    if epochs is not None and steps is not None:
        yield Problem(
            "train.steps", "give either epochs or steps, not both (on the command line, train.epochs=null drops epochs)"
        )
    if epochs is None and steps is None:
        yield Problem("train.epochs", "is required, and missing: give either epochs or steps")


def _accumulate(view: View) -> Iterator[Problem]:
    batch_size, accumulate = view("train.batch_size"), view("train.accumulate")
    if accumulate > batch_size:
        text = f"cannot split a batch of {batch_size} (train.batch_size) into {accumulate} micro-batches"
        yield Problem("train.accumulate", text)


def _nesterov(view: View) -> Iterator[Problem]:
    optimizer = view("train.optimizer")
    if isinstance(optimizer, Sgd) and optimizer.nesterov and optimizer.momentum == 0:
        yield Problem("train.optimizer.nesterov", "needs a momentum: without one there is nothing to look ahead by")


def _schedule(view: View) -> Iterator[Problem]:
    schedule = view("train.lr_schedule")
    if not isinstance(schedule, Cosine | Linear) or schedule.total_steps is None:
        return
    if schedule.total_steps <= schedule.warmup_steps:
        text = f"must be more than warmup_steps ({schedule.warmup_steps}), got {schedule.total_steps}"
        yield Problem("train.lr_schedule.total_steps", text)


def _spares(view: View) -> Iterator[Problem]:
    if view("engine") == "ray_train" and view("resources.spares") > 0:
        text = "engine: ray_train keeps no spares, it restarts all its workers; use engine: actors, or spares: 0"
        yield Problem("resources.spares", text)


def _storage(view: View) -> Iterator[Problem]:
    scheme = scheme_of(view("checkpoint.storage") or "")
    if scheme is not None and scheme not in KNOWN_SCHEMES:
        text = f"has no scheme that pyarrow.fs knows ({', '.join(sorted(KNOWN_SCHEMES))}), got '{scheme}://'"
        yield Problem("checkpoint.storage", text)


def _own_task(view: View) -> Iterator[Problem]:
    task = view("task")
    if task.type in BUILT_IN:
        return
    arguments = task.model_extra or {}
    for name, value in arguments.items():
        if not _is_plain(value):
            text = f"must be plain data (numbers, text, true, false, null, lists, mappings), got {shown(value)}"
            yield Problem(f"task.{name}", text)
    yield from problems_of(task.type, arguments)


def _until(view: View) -> Iterator[Problem]:
    """A goal that no validation will ever tell of, as far as a look at the task shows; the first validation knows."""
    until, task = view("train.until"), view("task")
    names = metric_names(task.type) if task.metric_names is None else task.metric_names
    if until is None or names is None:
        return
    there_are = sorted({*names, "loss", *(() if view("distill") is None else ("task_loss",))})
    if until.metric not in there_are:
        hint = nearest(until.metric, there_are)
        text = f"the task has no metric {until.metric!r}{hint} (it has: {', '.join(there_are)})"
        yield Problem("train.until.metric", text)


def _is_plain(value: object) -> bool:
    """Whether a value can be written as YAML and JSON, and read back as it was."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, str | int | float)


def _python_source(view: View) -> Iterator[Problem]:
    task = view("task")
    if isinstance(task, PythonSourceTask) and task.width % task.heads:
        yield Problem("task.heads", f"must divide width ({task.width}) evenly, got {task.heads}")


def _parquet(view: View) -> Iterator[Problem]:
    task = view("task")
    if not isinstance(task, ParquetTask):
        return
    if task.features is not None and task.label in task.features:
        yield Problem("task.features", f"holds the label {task.label!r}: the network would be told what to predict")
    if task.features is not None and not task.features:
        yield Problem("task.features", "is an empty list; name a column, or leave it null for all numeric columns")
    if task.kind == "regression" and task.num_classes is not None:
        yield Problem("task.num_classes", "has no meaning for kind: regression; take it out")


_RULES: tuple[Rule, ...] = (
    _python_source,
    _parquet,
    _length,
    _accumulate,
    _nesterov,
    _schedule,
    *NETWORK_RULES,
    *EXCHANGE_RULES,
    *COMPRESSION_RULES,
    *FAULT_RULES,
    _storage,
    _spares,
)
