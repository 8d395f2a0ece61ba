"""From a run directory to an engine. Imports torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.load import load_run
from orchestray.serving.batching.listener import BatchListener
from orchestray.serving.generation.decoder import Decoder, TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.text import ByteVocabulary, Vocabulary
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.load import served_directory
from orchestray.serving.models.quantize import quantize_int8
from orchestray.trainers.tasks.python_source import PythonSource

if TYPE_CHECKING:
    from orchestray.platform.task import Task


def can_generate(task: Task) -> bool:
    """Whether the task's model goes on from a text: `python_source`, or a task with a method `decoder`."""
    return isinstance(task, PythonSource) or callable(getattr(task, "decoder", None))


def load_engine(
    run: str | os.PathLike[str],
    *,
    max_sequences: int = 32,
    token_budget: int = 256,
    max_queue: int = 1024,
    num_blocks: int | None = None,
    gpus: float = 0,
    num_threads: int = 1,
    precision: str = "float32",
    quantize: str | None = None,
    listener: BatchListener | None = None,
) -> Engine:
    """The engine of a run's trained model; of a search, of the best run.

    A task of one's own has a model as `python_source` (see `TransformerDecoder`), or a method `decoder(model,
    max_rows, max_sequences) -> Decoder`. Its method `vocabulary() -> Vocabulary` tells its tokens; default: bytes.

    Args:
        max_sequences, token_budget, max_queue, listener: see `Engine`.
        num_blocks: of 16 tokens in the cache; default: enough for `max_sequences` requests of the whole context.
        gpus: 0: on the CPU.
        num_threads: of the CPU.
        precision: `float32` (as it is) or `bfloat16` (autocast).
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.

    Raises:
        RunNameError, CheckpointError, TaskError: as `load_served_model`.
        ConfigError: the model cannot generate text.
    """
    found = load_run(served_directory(run))
    task = found.load_task()
    model = found.load_model()
    model = (quantize_int8(model) if quantize == "int8" else model).to(chosen_device(gpus))
    own: Any = getattr(task, "decoder", None)  # an optional method of a task
    decoder: Decoder
    cache_bytes = 0
    if own is not None:
        decoder = own(model, max_rows=token_budget, max_sequences=max_sequences)
    else:
        decoder = built_in = TransformerDecoder(
            model, max_rows=token_budget, max_sequences=max_sequences, num_blocks=num_blocks, precision=precision
        )
        cache_bytes = built_in.cache_bytes
    told: Any = getattr(task, "vocabulary", None)  # as above
    vocabulary: Vocabulary = ByteVocabulary() if told is None else told()
    return Engine(
        decoder,
        vocabulary,
        max_sequences=max_sequences,
        token_budget=token_budget,
        max_queue=max_queue,
        num_threads=num_threads,
        cache_bytes=cache_bytes,
        listener=listener,
    )
