"""Rules between the keys of a config, each of which reports its problem in a sentence with the reason.

A rule reads values through a `View`, which knows the values that have problems already. A rule that needs one of those
reports nothing, so that one mistake gives one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orchestray.platform.config.paths import KNOWN_SCHEMES, scheme_of
from orchestray.platform.config.problems import Problem, nearest, shown
from orchestray.trainers.config.batch_checks import BATCH_RULES
from orchestray.trainers.config.checked_view import Rule, Unusable, View
from orchestray.trainers.config.compression_checks import COMPRESSION_RULES
from orchestray.trainers.config.ensemble_checks import ENSEMBLE_RULES
from orchestray.trainers.config.exchange_checks import EXCHANGE_RULES
from orchestray.trainers.config.fault_checks import FAULT_RULES, find_teacher
from orchestray.trainers.config.members import member_problems
from orchestray.trainers.config.modes import GOALS, mode_is_missing
from orchestray.trainers.config.network_checks import NETWORK_RULES
from orchestray.trainers.config.quantize_checks import QUANTIZE_RULES
from orchestray.trainers.config.resource_checks import RESOURCE_RULES
from orchestray.trainers.config.solver_checks import SOLVER_RULES
from orchestray.trainers.config.task_lint import metric_names, own_class_problems, problems_of
from orchestray.trainers.optim.params import Cosine, Linear, Muon, Sgd, YellowFin, values_of_groups
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.local.params import Averaging
from orchestray.trainers.tasks.params import ParquetTask, PythonSourceTask
from orchestray.trainers.tasks.registry import TASKS
from orchestray.trainers.trackers.registry import problems_of as tracker_problems


def find_problems(view: View, *, look_at_task: bool) -> list[Problem]:
    """Return a problem for every rule between keys that the config breaks.

    Args:
        view: view of the config.
        look_at_task: True to check the files that the config names as well: a user's own task and the teacher's run.
    """
    problems: list[Problem] = []
    for rule in (_own_task, _own_classes, *_RULES, _until, find_teacher) if look_at_task else _RULES:
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


def _initial(view: View) -> Iterator[Problem]:
    """Refuse keys of the model's start that have no meaning without another one, and slices of normalised weights."""
    if view("train.init_gain") != 1 and view("train.init") is None:
        yield Problem("train.init_gain", "is a factor on the weights that train.init draws; give that, or take it out")
    if view("train.init_except") and view("train.init_from") is None:
        yield Problem("train.init_except", "leaves out weights of train.init_from; give that, or take it out")
    if view("train.weight_norm") and (tensor := view("strategy.network.tensor")) > 1:
        text = (
            f"keeps each layer's weights as lengths and directions, and strategy.network.tensor ({tensor}) cuts them "
            "into slices; set tensor to 1, and use strategy.network.data or pipeline"
        )
        yield Problem("train.weight_norm", text)


def _trackers(view: View) -> Iterator[Problem]:
    yield from tracker_problems(view("trackers"))


def _accumulate(view: View) -> Iterator[Problem]:
    batch_size, accumulate = view("train.batch_size"), view("train.accumulate")
    if accumulate > batch_size:
        text = f"cannot split a batch of {batch_size} (train.batch_size) into {accumulate} micro-batches"
        yield Problem("train.accumulate", text)


def _nesterov(view: View) -> Iterator[Problem]:
    optimizer = view("train.optimizer")
    if isinstance(optimizer, YellowFin) and optimizer.groups:
        yield Problem("train.optimizer.groups", "yellowfin tunes by the whole gradient; take them out, or use sgd")
    if isinstance(optimizer, Muon) and optimizer.groups:
        text = "muon has groups of its own: matrices, and what adamw names; take them out"
        yield Problem("train.optimizer.groups", text)
    for place, values in values_of_groups(optimizer):
        if isinstance(optimizer, Sgd) and values["nesterov"] and values["momentum"] == 0:
            text = "needs a momentum: without one there is nothing to look ahead by"
            yield Problem(f"{place}.nesterov", text)


def _schedule(view: View) -> Iterator[Problem]:
    schedule = view("train.lr_schedule")
    if not isinstance(schedule, Cosine | Linear) or schedule.total_steps is None:
        return
    if schedule.total_steps <= schedule.warmup_steps:
        text = f"must be more than warmup_steps ({schedule.warmup_steps}), got {schedule.total_steps}"
        yield Problem("train.lr_schedule.total_steps", text)


def _cudnn_benchmark(view: View) -> Iterator[Problem]:
    if view("train.deterministic") and view("train.cudnn_benchmark"):
        text = "chooses algorithms by their time, so bits differ from run to run; leave it out, or train.deterministic"
        yield Problem("train.cudnn_benchmark", text)


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
    if task.type in TASKS:
        return
    arguments = task.model_extra or {}
    for name, value in arguments.items():
        if not _is_plain(value):
            text = f"must be plain data (numbers, text, true, false, null, lists, mappings), got {shown(value)}"
            yield Problem(f"task.{name}", text)
    yield from problems_of(task.type, arguments)


def _own_classes(view: View) -> Iterator[Problem]:
    keys = ["train.lr_schedule.type"]
    if view("train.optimizer") is not None:
        keys.insert(0, "train.optimizer.type")
    exchange = view("strategy.exchange")
    if isinstance(exchange, Averaging) and exchange.outer_optimizer is not None:
        keys.append("strategy.exchange.outer_optimizer.type")
    for key in keys:
        if ":" in (name := view(key)):
            yield from own_class_problems(key, name)


def _until(view: View) -> Iterator[Problem]:
    """Refuse a goal on a metric that the task does not report, as far as its source shows.

    The first validation catches the rest.
    """
    there_are = _reported(view)
    for key in GOALS:
        goal = view(key)
        if goal is not None and there_are is not None and goal.metric not in there_are:
            hint = nearest(goal.metric, there_are)
            text = f"the task has no metric {goal.metric!r}{hint} (it has: {', '.join(there_are)})"
            yield Problem(f"{key}.metric", text)


def _reported(view: View) -> list[str] | None:
    """Return the metrics of a validation, as far as the task's source shows; None if it does not."""
    task = view("task")
    names = metric_names(task.type) if task.metric_names is None else task.metric_names
    return None if names is None else sorted({*names, "loss", *(() if view("distill") is None else ("task_loss",))})


def _modes(view: View) -> Iterator[Problem]:
    """Refuse a goal of which nothing says whether higher or lower is better."""
    for key in GOALS:
        goal = view(key)
        if goal is not None and goal.mode is None and goal.metric in (_reported(view) or [goal.metric]):
            yield Problem(f"{key}.mode", mode_is_missing(goal.metric))


def _is_plain(value: object) -> bool:
    """Return True if a value survives being written as YAML or JSON and read back."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, str | int | float)


def _python_source(view: View) -> Iterator[Problem]:
    task = view("task")
    if not isinstance(task, PythonSourceTask):
        return
    if task.model == "transformer":
        if task.width % task.heads:
            yield Problem("task.heads", f"must divide width ({task.width}) evenly, got {task.heads}")
        for key in ("bptt", "streams"):
            if getattr(task, key) is not None:
                yield Problem(
                    f"task.{key}", "is for recurrent models; set task.model to elman, lstm or gru, or drop it"
                )
    elif task.streams is not None:
        yield from _streams(view, task.streams)


def _streams(view: View, streams: int) -> Iterator[Problem]:
    """Refuse what would not give each stream one sample of each batch, or would average the states of streams."""
    batch_size, network, exchange = view("train.batch_size"), view("strategy.network"), view("strategy.exchange")
    parts = network.data * view("train.accumulate")
    if streams != batch_size:
        text = (
            f"a batch has the next sample of each stream, so it must be train.batch_size ({batch_size}), got {streams}"
        )
        yield Problem("task.streams", text)
    elif streams % parts:
        text = f"must be a multiple of replicas times micro-batches ({parts}), got {streams}"
        yield Problem("task.streams", text)
    if network.pipeline > 1:
        text = "carries the states of streams in one model; set strategy.network.pipeline to 1, and use data"
        yield Problem("task.streams", text)
    if view("train.batch_schedule") is not None:
        text = "a batch that grows would have several samples of a stream, whose states go on one after the other"
        yield Problem("task.streams", f"{text}; take train.batch_schedule out, or streams")
    if view("train.solver") is not None:
        text = "states go on with each look at a batch, and a solver looks at one several times; use train.optimizer"
        yield Problem("task.streams", text)
    if not isinstance(exchange, AllReduce):
        text = f"states go on in each stream, and {exchange.type} would take means of them; use type: allreduce"
        yield Problem("task.streams", text)


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
    _initial,
    _modes,
    _accumulate,
    _nesterov,
    _schedule,
    *BATCH_RULES,
    *NETWORK_RULES,
    *EXCHANGE_RULES,
    *COMPRESSION_RULES,
    *FAULT_RULES,
    *SOLVER_RULES,
    *QUANTIZE_RULES,
    *RESOURCE_RULES,
    *ENSEMBLE_RULES,
    _storage,
    _spares,
    _cudnn_benchmark,
    _trackers,
)
