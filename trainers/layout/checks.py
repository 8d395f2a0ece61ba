"""Whether a model can be laid out as a config asks: looked at before a process is started.

Only what needs the model is here; rules between keys are in the config's own checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.replica.randomness import seed_everything
from orchestray.trainers.replica.settings import num_micro_batches

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.platform.task import Task


def layout_problems(config: TrainConfig) -> list[str]:
    """What is wrong with the layout for this model, as lines "config: <key>: <sentence>".

    A task that cannot be built here (its data may be on the cluster's machines alone) is no problem of the layout:
    nothing is said of it.
    """
    built = _built(config)
    if built is None:
        return []
    task, model = built
    problems: list[str] = []
    network = config.strategy.network  # whole models fit any number of workers
    if network.pipeline > 1:
        problems += _pipeline_problems(config, task, model)
    if network.tensor > 1:
        problems += _tensor_problems(config, task, model)
    return problems


def shard_problems(config: TrainConfig) -> list[str]:
    """Whether the model has a parameter for each of the servers' shards; as `layout_problems`."""
    from orchestray.trainers.central.partition import Partition

    exchange: Any = config.strategy.exchange
    built = _built(config)
    if built is None:
        return []
    try:
        Partition.of(built[1], exchange.shards)
    except ConfigError as error:
        return [_at("strategy.exchange.shards", problem.partition(": ")[2]) for problem in error.problems]
    return []


def aggregation_problems(config: TrainConfig) -> list[str]:
    """Whether the workers' gradients are such that one may choose among them; as `layout_problems`."""
    if config.train.batch_norm == "local":
        return []
    built = _built(config)
    if built is None or not any(
        isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in built[1].modules()
    ):
        return []
    return [f"config: {parts_of_one_gradient(config.strategy.aggregation.type)}"]


def parts_of_one_gradient(kind: str) -> str:
    """Why an aggregation cannot choose among gradients under synchronized batch normalisation: their key, and why."""
    return (
        f"strategy.aggregation: {kind} chooses among the workers' gradients, which batch normalisation over the "
        "samples of all of them makes parts of one; set train.batch_norm to local"
    )


def _built(config: TrainConfig) -> tuple[Task, nn.Module] | None:
    """The config's task and model; None where they cannot be built here."""
    try:
        task = tasks.build(TaskSource.from_config(config.task))
        return task, build_plain(task, config.train.seed)
    except (OrchestrayError, OSError):
        return None


def build_plain(task: Task, seed: int) -> nn.Module:
    """The model, without values where that can be: most layouts are judged by shapes.

    Raises:
        TaskError: its `build_model` fails.
    """
    seed_everything(seed)
    try:
        with torch.device("meta"):
            return task.build_model()
    except Exception:  # noqa: BLE001 - a model that wants values (it may load some, or compute its sizes) gets them
        try:
            return task.build_model()
        except Exception as error:
            raise TaskError(f"build_model() failed: {type(error).__name__}: {error}") from error


def _pipeline_problems(config: TrainConfig, task: Task, model: nn.Module) -> list[str]:
    from orchestray.trainers.pipeline.balance import by_names
    from orchestray.trainers.pipeline.cutting import layers_of
    from orchestray.trainers.pipeline.schedules import default_stages_per_worker, problems

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
    """A plan is tried on one worker's part; that it changes nothing is seen with real values, when the run starts."""
    from orchestray.trainers.tensor.assemble import make_plan

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
    """The problem, with the key it is about."""
    return problem if problem.startswith("config: ") else f"config: {key}: {problem}"
