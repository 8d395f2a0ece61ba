"""Loading of an engine from a run directory. Imports torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import OrchestrayError, TaskError
from orchestray.serving.batching.listener import BatchListener
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
    run_timeout_s: float | None = None,
    listener: BatchListener | None = None,
    model: nn.Module | None = None,
    content: str = "",
) -> Engine:
    """Load the engine of a run's trained model, or of the best run of a search.

    A task of the user's own has a model like that of `python_source` (see `TransformerDecoder`). Or it has a method
    `decoder(model, max_rows, max_sequences) -> Decoder`, which is called again if a step hangs. Its method
    `vocabulary() -> Vocabulary` gives its tokens; default: bytes.

    Args:
        run: directory of a training run or of a search.
        max_sequences, token_budget, max_queue, run_timeout_s, listener: see `Engine`.
        num_blocks: blocks of 16 tokens in the cache; default: enough for `max_sequences` requests of the whole context.
        gpus: 0: on the CPU.
        num_threads: CPU threads of a step.
        precision: `float32` (unchanged) or `bfloat16` (autocast).
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.
        model: the run's model if loaded already, on its device and quantized: its weights are then shared.
        content: result of `content_of` for the run when the version started; empty: not checked.

    Raises:
        RunNameError, CheckpointError: see `load_served_model`.
        TaskError: likewise, or the task's own `decoder` or `vocabulary` raises, or the cache does not fit into memory.
        ConfigError: the model cannot generate text, or a GPU is asked for and none exists.
    """
    directory = served_directory(run)
    found = load_run(directory)
    task = found.load_task()
    if model is None:
        device = chosen_device(gpus)
        check_content(directory / "model", content)
        model = found.load_model()
        check_content(directory / "model", content)  # it may be written while it is read
        model = (quantize_int8(model) if quantize == "int8" else model).to(device)
    make_decoder: Any = getattr(task, "decoder", None)  # an optional method of a task
    make_vocabulary: Any = getattr(task, "vocabulary", None)  # as above

    def make() -> Decoder:
        if make_decoder is not None:
            decoder: Decoder = make_decoder(model, max_rows=token_budget, max_sequences=max_sequences)
            return decoder
        return TransformerDecoder(
            model, max_rows=token_budget, max_sequences=max_sequences, num_blocks=num_blocks, precision=precision
        )

    try:
        decoder = make()
        vocabulary: Vocabulary = ByteVocabulary() if make_vocabulary is None else make_vocabulary()
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(f"what generates text cannot be made of {run}: {type(error).__name__}: {error}") from error
    return Engine(
        decoder,
        vocabulary,
        max_sequences=max_sequences,
        token_budget=token_budget,
        max_queue=max_queue,
        num_threads=num_threads,
        cache_bytes=decoder.cache_bytes if isinstance(decoder, TransformerDecoder) else 0,
        run_timeout_s=run_timeout_s,
        remake=make,
        listener=listener,
    )
