"""Loading of an engine from a run directory. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import OrchestrayError, TaskError
from orchestray.serving.batching.listener import BatchListener
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.generation.decoder import Decoder, TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.text import ByteVocabulary, Vocabulary
from orchestray.serving.models.content import check_content, served_directory
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.quantize import quantize_int8
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.python_source import PythonSource

if TYPE_CHECKING:
    from orchestray.platform.task import Task


def can_generate(task: Task) -> bool:
    """Return True if the task's model generates text: `python_source`, or a task with a method `decoder`."""
    return isinstance(task, PythonSource) or callable(getattr(task, "decoder", None))


def load_engine(
    section: ModelSection,
    config: ServeConfig,
    listener: BatchListener | None = None,
    *,
    model: nn.Module | None = None,
    content: str = "",
) -> Engine:
    """Load the engine of a run's trained model, or of the best run of a search.

    A task of the user's own has a model like that of `python_source` (see `TransformerDecoder`). Or it has a method
    `decoder(model, max_rows, max_sequences) -> Decoder`, which is called again if a step hangs. Its method
    `vocabulary() -> Vocabulary` gives its tokens; default: bytes.

    Args:
        section: the model's section of the config.
        config: config of the endpoint.
        listener: see `Engine`.
        model: the run's model if loaded already, on its device and quantized: its weights are then shared.
        content: result of `content_of` for the run when the version started; empty: not checked.

    Raises:
        RunNameError, CheckpointError: see `load_served_model`.
        TaskError: likewise, or the task's own `decoder` or `vocabulary` raises, or the cache does not fit into memory.
        ConfigError: the model cannot generate text, or a GPU is asked for and none exists.
    """
    most, compute = config.batching.max_batch_size, config.compute
    most_rows = max(256, 2 * most)
    directory = served_directory(section.run)
    found = load_run(directory)
    task = found.load_task()
    if model is None:
        device = chosen_device(config.resources.gpus_per_worker)
        check_content(directory / "model", content)
        model = found.load_model()
        check_content(directory / "model", content)  # it may be written while it is read
        model = (quantize_int8(model) if compute.quantize == "int8" else model).to(device)
    make_decoder: Any = getattr(task, "decoder", None)  # an optional method of a task
    make_vocabulary: Any = getattr(task, "vocabulary", None)  # as above

    def make() -> Decoder:
        if make_decoder is not None:
            decoder: Decoder = make_decoder(model, max_rows=most_rows, max_sequences=most)
            return decoder
        return TransformerDecoder(model, max_rows=most_rows, max_sequences=most, precision=compute.precision)

    try:
        decoder = make()
        vocabulary: Vocabulary = ByteVocabulary() if make_vocabulary is None else make_vocabulary()
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(
            f"what generates text cannot be made of {section.run}: {type(error).__name__}: {error}"
        ) from error
    return Engine(
        decoder,
        vocabulary,
        max_sequences=most,
        token_budget=most_rows,
        max_queue=config.batching.max_queue,
        num_threads=max(1, int(config.resources.cpus_per_worker)),
        run_timeout_s=config.batching.run_timeout_s,
        remake=make,
        listener=listener,
    )
