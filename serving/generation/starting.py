"""From a line of a serve config to what generates text, and to what is divided over processes. Imports torch late."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.run.load import load_run
from orchestray.platform.run.model_files import load_model_json
from orchestray.serving.models.endpoint import ModelVersion
from orchestray.serving.models.signature import Output, Sample
from orchestray.trainers.tasks import BUILT_IN

if TYPE_CHECKING:
    from torch import nn

    from orchestray.platform.config.serving.schema import ModelSection, ServeConfig
    from orchestray.serving.batching import Batcher, BatchListener
    from orchestray.serving.generation.engine import Engine
    from orchestray.serving.generation.partition import ServedNetwork

_log = logging.getLogger("orchestray.serving")

_BUILT_IN = "python_source"


def divided_network(model: ModelSection, config: ServeConfig) -> ServedNetwork | None:
    """How the processes of a replica share the model: as the config says, else as in training; None: it is one process.

    Reads files.
    """
    network: Any = config.compute.network
    if network is None:
        try:
            network = load_run(_directory(model)).config.strategy.network
        except OrchestrayError:
            return None  # whoever loads the model says what is wrong with the run
    memory_gb = config.compute.network.memory_gb if config.compute.network is not None else None
    if network.tensor * network.pipeline == 1 and memory_gb is None:
        return None
    from orchestray.serving.generation.partition import ServedNetwork

    divided = ServedNetwork.from_config(network)
    if memory_gb is not None:
        divided = _that_fits(model, divided, memory_gb * 1e9)
    return divided if divided.size > 1 else None


def _that_fits(model: ModelSection, network: ServedNetwork, limit_bytes: float) -> ServedNetwork:
    """With as many stages as the memory of a process asks for; layers that are split count as their part."""
    import torch

    from orchestray.serving.generation.memory_plan import LayerSizes

    directory = _directory(model)
    is_double = load_model_json(directory / "model").get("precision") == "float64"
    sizes = LayerSizes.of(load_run(directory).load_task())
    plan = sizes.plan(limit_bytes * network.tensor, dtype=torch.float64 if is_double else torch.float32)
    is_cut_here = network.tensor == 1 and network.split == "balanced"
    return replace(
        network,
        pipeline=max(network.pipeline, plan.num_stages),
        memory_limit_bytes=limit_bytes if is_cut_here else None,
    )


def check_divided(model: ModelSection, config: ServeConfig) -> None:
    """Refuse what would have no effect on a model that is divided over processes.

    Raises:
        ConfigError: with every problem.
    """
    why = f"{model.name} is divided over processes (as it was trained, or by compute.network)"
    problems = []
    if config.compute.quantize is not None:
        problems.append("compute.quantize: is for models in one process: leave it out, or compute.network")
    if config.compute.compile:
        problems.append(f"compute.compile: {why}, whose parts are not compiled: leave it out")
    if not isinstance(config.replicas, int) and config.replicas.min != config.replicas.max:
        problems.append(f"replicas: {why}, and a gang takes long to start: give their number, as in replicas=1")
    if problems:
        raise ConfigError(problems)


async def start_divided(
    model: ModelSection,
    config: ServeConfig,
    network: ServedNetwork,
    batcher: Batcher[Sample, Output],
    address: str | None = None,
) -> ModelVersion:
    """A version each of whose replicas is a gang; a process that dies is replaced, and its batch run again.

    Raises:
        ConfigError: the config asks for what divided models do not have.
        OrchestrayError: it cannot be served; says why.
    """
    check_divided(model, config)
    from orchestray.serving.generation.model_parallel import ModelParallel

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
            # It mends itself at the next call: what takes its place is itself.
            name = f"{model.name}-{model.version}-{index}.{slot}"  # who counts tells batches apart by it
            batcher.add_runner(replica.run, name=name, replace=replica.runner)
    return ModelVersion(replicas[0].signature, batcher, close)


async def add_generator(
    version: ModelVersion,
    model: ModelSection,
    config: ServeConfig,
    listener: BatchListener | None = None,
    *,
    module: nn.Module | None = None,
    content: str = "",
) -> None:
    """Have a version generate text, where its model does; this process computes it.

    Where the model does and this process cannot, the version says why (`generator_lacking`), and so does the log: it
    answers predictions all the same.

    Args:
        version: started; nobody asks it yet.
        listener: is told of requests that are not answered.
        module: the version's network, where it is loaded in this process: then there is one, for both.
        content: what `content_of` the run was when the version started; empty: whatever is there now.

    Raises:
        OrchestrayError: the run is gone, damaged, or another by now.
    """
    try:
        version.generator = await asyncio.to_thread(_load, model, config, listener, module, content)
    except (ConfigError, TaskError) as error:
        # What a task's own code raised, and where its files are, is for who serves it, not for who asks.
        told = str(error).rstrip(".") if isinstance(error, ConfigError) else "its log says why"
        text = f"The model {model.name} generates no text in the process that listens: "
        version.generator_lacking = f"{text}{told}. POST /predict answers."
        _log.warning("%s%s", text, error)


def _load(
    model: ModelSection, config: ServeConfig, listener: BatchListener | None, module: nn.Module | None, content: str
) -> Engine | None:
    if not _can_generate(model):
        return None
    from orchestray.serving.generation.load import load_engine

    return load_engine(
        model.run,
        max_sequences=config.batching.max_batch_size,
        token_budget=max(256, 2 * config.batching.max_batch_size),
        max_queue=config.batching.max_queue,
        gpus=config.resources.gpus_per_worker,
        num_threads=max(1, int(config.resources.cpus_per_worker)),
        precision=config.compute.precision,
        quantize=config.compute.quantize,
        run_timeout_s=config.batching.run_timeout_s,
        listener=listener,
        model=module,
        content=content,
    )


def is_text(model: ModelSection) -> bool:
    """Whether the model is of a task that generates text, as far as can be told here. Builds a task of one's own."""
    try:
        return _can_generate(model)
    except TaskError:
        return False  # whoever loads the model says what is wrong with it


def _can_generate(model: ModelSection) -> bool:
    directory = _directory(model)
    kind = load_model_json(directory / "model").get("task", {}).get("type")
    if kind in BUILT_IN:  # without building it: its constructor may look at data
        return bool(kind == _BUILT_IN)
    from orchestray.serving.generation.load import can_generate

    return can_generate(load_run(directory).load_task())


def _directory(model: ModelSection) -> Any:
    from orchestray.serving.models.load import served_directory

    return served_directory(model.run)
