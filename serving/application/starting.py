"""The start of text generation, and of models divided over processes, from a serve config. Imports torch late."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.gpus import assigned_gpus
from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.run.model_files import load_model_json
from orchestray.platform.task import OF_AN_ENDPOINT
from orchestray.serving.config.own_class import names_class
from orchestray.serving.models.codec import Codec
from orchestray.serving.models.content import served_directory
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.registry import TASKS

if TYPE_CHECKING:
    from torch import nn

    from orchestray.serving.batching import Batcher, BatchListener
    from orchestray.serving.config.schema import ModelSection, ServeConfig
    from orchestray.serving.generation.engine import Engine
    from orchestray.serving.sharded.partition import ServedNetwork

_log = logging.getLogger("orchestray.serving")

_BUILT_IN = "python_source"


def divided_network(model: ModelSection, config: ServeConfig) -> ServedNetwork | None:
    """Return the division of the model over processes, as in the config, else as in training; None: one process.

    Reads files.
    """
    network: Any = config.compute.network
    if names_class(model.run):
        return None
    if network is None:
        try:
            network = load_run(served_directory(model.run)).config.strategy.network
        except OrchestrayError:
            return None  # the loading of the model reports what is wrong with the run
    memory_gb = config.compute.network.memory_gb if config.compute.network is not None else None
    if network.tensor * network.pipeline == 1 and memory_gb is None:
        return None
    from orchestray.serving.sharded.partition import ServedNetwork

    divided = ServedNetwork.from_config(network)
    if memory_gb is not None:
        divided = _that_fits(model, divided, memory_gb * 1e9)
    return divided if divided.size > 1 else None


def _that_fits(model: ModelSection, network: ServedNetwork, limit_bytes: float) -> ServedNetwork:
    """Return the network with as many stages as the memory of a process requires; a split layer counts by its part."""
    import torch

    from orchestray.serving.sharded.memory_plan import LayerSizes
    from orchestray.trainers.saved.interface import saved_example

    directory = served_directory(model.run)
    is_double = load_model_json(directory / "model").get("precision") == "float64"
    task = load_run(directory).load_task()
    sizes = LayerSizes.of(task, lambda: saved_example(directory / "model", lambda: task))
    plan = sizes.plan(limit_bytes * network.tensor, dtype=torch.float64 if is_double else torch.float32)
    is_cut_here = network.tensor == 1 and network.split == "balanced"
    return replace(
        network,
        pipeline=max(network.pipeline, plan.num_stages),
        memory_limit_bytes=limit_bytes if is_cut_here else None,
    )


def check_divided(model: ModelSection, config: ServeConfig) -> None:
    """Refuse settings that have no effect on a model that is divided over processes.

    Raises:
        ConfigError: all problems.
    """
    why = f"{model.name} is divided over processes (as it was trained, or by compute.network)"
    problems = []
    if config.compute.quantize is not None:
        problems.append("compute.quantize: is for models in one process: leave it out, or compute.network")
    if config.compute.compile:
        problems.append(f"compute.compile: {why}, whose parts are not compiled: leave it out")
    if config.compute.pad_to_multiple is not None:
        problems.append(f"compute.pad_to_multiple: {why}, whose batches are not padded: leave it out")
    if not isinstance(config.replicas, int) and config.replicas.min != config.replicas.max:
        problems.append(f"replicas: {why}, and a gang takes long to start: give their number, as in replicas=1")
    if problems:
        raise ConfigError(problems)


def check_local(config: ServeConfig) -> None:
    """Refuse models that one process without Ray cannot serve.

    Raises:
        ConfigError: all problems.
    """
    problems = []
    if not config.in_process:
        problems.append("replicas: without Ray (--local) there is one process: set it to 1, or leave --local out")
    problems += [
        f"models.{index}.run: {model.name} is divided over processes (as it was trained, or by compute.network), "
        "which are Ray's: leave --local out, or set compute.network.tensor=1 compute.network.pipeline=1"
        for index, model in enumerate(config.models)
        if divided_network(model, config) is not None
    ]
    if problems:
        raise ConfigError(problems)


async def start_divided(
    model: ModelSection,
    config: ServeConfig,
    network: ServedNetwork,
    batcher: Batcher[Sample, Output],
    address: str | None = None,
) -> ModelVersion:
    """Start a version whose replicas are gangs of processes; a process that dies is replaced, and its batch run again.

    Args:
        model: the model's section of the config.
        config: config of the endpoint.
        network: division of the model over processes.
        batcher: gets the replicas as runners.
        address: address of the Ray cluster; None: a local one.

    Raises:
        ConfigError: the config asks for something that divided models do not support.
        OrchestrayError: it cannot be served; the message says why.
    """
    check_divided(model, config)
    from orchestray.serving.sharded.model_parallel import ModelParallel

    replicas: list[ModelParallel] = []

    async def close() -> None:
        await asyncio.gather(*(replica.close() for replica in replicas))

    count = config.replicas if isinstance(config.replicas, int) else config.replicas.max
    try:
        while len(replicas) < count:
            replicas.append(
                await ModelParallel.start(
                    model.run,
                    network,
                    name=model.name,
                    version=str(model.version),
                    cpus_per_worker=config.resources.cpus_per_worker,
                    gpus_per_worker=config.resources.gpus_per_worker,
                    precision=config.compute.precision,
                    max_batch_size=config.batching.max_batch_size,
                    address=address,
                )
            )
    except BaseException:
        await close()
        raise
    for index, replica in enumerate(replicas):
        for slot in range(replica.num_in_flight):
            # It repairs itself at the next call, so it is its own replacement.
            name = f"{model.name}-{model.version}-{index}.{slot}"  # the listener distinguishes batches by it
            batcher.add_runner(replica.run, name=name, replace=replica.runner)
    return ModelVersion(replicas[0].signature, batcher, close)


async def add_codec(version: ModelVersion, model: ModelSection, max_queue: int, listener: BatchListener) -> None:
    """Give a version the forms of its task's own, if it has any, for requests and answers.

    Args:
        version: started version that gets no requests yet.
        model: the model's section of the config.
        max_queue: largest number of requests that may wait for the task's methods.
        listener: informed of requests that are refused meanwhile.

    Raises:
        OrchestrayError: the run is gone or damaged, or its task cannot be built here.
    """
    forms = version.signature.own_forms
    if forms:
        task = await asyncio.to_thread(load_run(served_directory(model.run)).load_task)
        decode, encode = (getattr(task, name) if name in forms else None for name in OF_AN_ENDPOINT)
        padding = getattr(task, "padding", None)
        version.codec = Codec(version.signature, decode, encode, padding, max_queue, listener.shed)


def gpus_of_listener(config: ServeConfig) -> float:
    """Return the GPUs, or the fraction of one, that Ray sets aside for the process that listens.

    They are for the networks that it computes with itself: of the models in its process, or of those that generate
    text beside their replicas. All of them are on one GPU. Reads files, and builds tasks of the user's own.
    """
    each = config.resources.gpus_per_worker
    if not each:
        return 0.0
    computed = [model for model in config.models if config.in_process or is_text(model)]
    number = sum(divided_network(model, config) is None for model in computed)
    return 0.0 if not number else max(each, min(1.0, each * number))


async def add_generator(
    version: ModelVersion,
    model: ModelSection,
    config: ServeConfig,
    listener: BatchListener | None = None,
    *,
    module: nn.Module | None = None,
    content: str = "",
) -> None:
    """Make a version generate text, if its model does, in this process.

    If the model does and this process cannot, the version and the log say why (`generator_lacking`); it answers
    predictions all the same.

    Args:
        version: started version that gets no requests yet.
        model: the model's section of the config.
        config: config of the endpoint.
        listener: informed of requests that are not answered.
        module: the version's network, if loaded in this process, to be used for both.
        content: result of `content_of` for the run when the version started; empty: not checked.

    Raises:
        OrchestrayError: the run is gone, damaged, or has been replaced.
    """
    if names_class(model.run):
        return
    try:
        version.generator = await asyncio.to_thread(_load, model, config, listener, module, content)
    except (ConfigError, TaskError) as error:
        # Errors of a task's own code, and the paths of its files, are for the server's owner, not for its clients.
        reason = str(error).rstrip(".") if isinstance(error, ConfigError) else "its log says why"
        text = f"The model {model.name} generates no text in the process that listens: "
        version.generator_lacking = f"{text}{reason}. POST /predict answers."
        _log.warning("%s%s", text, error)


def _load(
    model: ModelSection, config: ServeConfig, listener: BatchListener | None, module: nn.Module | None, content: str
) -> Engine | None:
    if not _can_generate(model):
        return None
    from orchestray.serving.generation.load import load_engine

    if module is None and config.resources.gpus_per_worker:
        _take_gpu(config)
    return load_engine(model, config, listener, model=module, content=content)


def _take_gpu(config: ServeConfig) -> None:
    """Hold this process to its share of the GPU that Ray has set aside for it.

    Raises:
        ConfigError: there are too few, or Ray has set aside none, so that the network would share one with others.
    """
    from orchestray.serving.models.device import chosen_device, limit_memory

    chosen_device(config.resources.gpus_per_worker)
    if not assigned_gpus():
        raise ConfigError(
            "resources.gpus_per_worker: Ray has set aside no GPU for it, as the endpoint was started without a model "
            "that generates text on one; start the endpoint again"
        )
    limit_memory(gpus_of_listener(config))


def is_text(model: ModelSection) -> bool:
    """Return True if the model's task generates text, as far as is known here. Builds tasks of the user's own."""
    try:
        return not names_class(model.run) and _can_generate(model)
    except OrchestrayError:
        return False  # the loading of the model reports what is wrong with it


def _can_generate(model: ModelSection) -> bool:
    directory = served_directory(model.run)
    kind = load_model_json(directory / "model").get("task", {}).get("type")
    if kind in TASKS:  # without building it: its constructor may read data
        return bool(kind == _BUILT_IN)
    from orchestray.serving.generation.load import can_generate

    return can_generate(load_run(directory).load_task())
