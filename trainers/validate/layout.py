"""Checks that a model can be laid out as its config requires, before a process starts.

Only checks that need the model are here; rules between keys are checked with the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.settings import ReplicaSettings, num_micro_batches
from orchestray.trainers.core.batch_norm import NORMALISATIONS, aggregation_conflict
from orchestray.trainers.core.plain_model import build_plain

if TYPE_CHECKING:
    from orchestray.platform.task import Task
    from orchestray.trainers.config.schema import TrainConfig


def layout_problems(config: TrainConfig) -> list[str]:
    """Return the problems of the layout for this model, as lines "config: <key>: <sentence>".

    A task that cannot be built here (only the cluster's machines may have its data) yields none.
    """
    built = _built(config)
    if built is None:
        return []
    task, model = built
    problems: list[str] = []
    network = config.strategy.network  # unsplit models fit any number of workers
    if network.pipeline > 1:
        problems += _pipeline_problems(config, task, model)
    if network.tensor > 1:
        problems += _tensor_problems(config, task, model)
    return problems


def shard_problems(config: TrainConfig) -> list[str]:
    """Return the problem if the model has too few parameters, or elements of them, for the servers' shards.

    The form is that of `layout_problems`.
    """
    from orchestray.trainers.ps.protocol.partition import Partition
    from orchestray.trainers.ps.protocol.settings import CentralSettings

    central = CentralSettings.of(ReplicaSettings.from_config(config, storage="", model_directory=""))
    built = _built(config)
    if built is None:
        return []
    try:
        Partition.of(built[1], central.shards, unit=central.unit)
    except ConfigError as error:
        return [_at("strategy.exchange.shards", problem.partition(": ")[2]) for problem in error.problems]
    return []


def aggregation_problems(config: TrainConfig) -> list[str]:
    """Return the problem if no choice among the workers' gradients is possible.

    The form is that of `layout_problems`.
    """
    if config.train.batch_norm == "local":
        return []
    built = _built(config)
    if built is None or not any(isinstance(module, NORMALISATIONS) for module in built[1].modules()):
        return []
    return [f"config: {aggregation_conflict(config.strategy.aggregation.type)}"]


def _built(config: TrainConfig) -> tuple[Task, nn.Module] | None:
    """Return the config's task and model; None if they cannot be built here."""
    try:
        task = tasks.build(TaskSource.from_config(config.task, config.train))
        return task, build_plain(task, config.train.seed)
    except (OrchestrayError, OSError):
        return None


def _pipeline_problems(config: TrainConfig, task: Task, model: nn.Module) -> list[str]:
    from orchestray.trainers.parallel.pipeline.balance import by_names
    from orchestray.trainers.parallel.pipeline.cutting import layers_of
    from orchestray.trainers.parallel.pipeline.schedules import default_stages_per_worker, problems

    network = config.strategy.network
    stages_per_worker = network.stages_per_worker or default_stages_per_worker(network.schedule)
    found = problems(network.schedule, network.pipeline, stages_per_worker, num_micro_batches(config))
    if found:
        return [f"config: strategy.network.schedule: {sentence}" for sentence in found]
    num_stages = network.pipeline * stages_per_worker
    split = network.split if isinstance(network.split, list) else []
    try:
        layers = layers_of(task, model, num_stages, split)
        layers.check_count(num_stages)
        if split:
            by_names(layers.names, split, num_stages)
    except ConfigError as error:
        return [_at("strategy.network.pipeline", problem) for problem in error.problems]
    return []


def _tensor_problems(config: TrainConfig, task: Task, model: nn.Module) -> list[str]:
    """Return the problems of a plan tried on one worker's part.

    When the run starts, real values verify that the plan does not change the results.
    """
    from orchestray.trainers.parallel.tensor.assemble import make_plan

    network = config.strategy.network
    try:
        plan = make_plan(task, model, network.plan, network.tensor)
    except ConfigError as error:
        return [_at("strategy.network.plan", problem) for problem in error.problems]
    if plan:
        return []
    nothing = f"nothing in the model was found to split over {network.tensor} workers (plan: {network.plan})"
    advice = "give the task a tensor_plan(model), use a smaller degree, or use data or pipeline"
    return [f"config: strategy.network.tensor: {nothing}; {advice}"]


def _at(key: str, problem: str) -> str:
    """Return the problem, with its config key."""
    return problem if problem.startswith("config: ") else f"config: {key}: {problem}"
