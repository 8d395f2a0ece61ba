"""From a run directory to an engine. Imports torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestray.platform.errors import OrchestrayError, TaskError
from orchestray.platform.run.load import load_run
from orchestray.serving.batching.listener import BatchListener
from orchestray.serving.generation.decoder import Decoder, TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.text import ByteVocabulary, Vocabulary
from orchestray.serving.models.device import chosen_device
from orchestray.serving.models.load import check_content, served_directory
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
    run_timeout_s: float | None = None,
    listener: BatchListener | None = None,
    model: nn.Module | None = None,
    content: str = "",
) -> Engine:
    """The engine of a run's trained model; of a search, of the best run.

    A task of one's own has a model as `python_source` (see `TransformerDecoder`), or a method `decoder(model,
    max_rows, max_sequences) -> Decoder`, which is called once more where a step hangs. Its method `vocabulary() ->
    Vocabulary` tells its tokens; default: bytes.

    Args:
        max_sequences, token_budget, max_queue, run_timeout_s, listener: see `Engine`.
        num_blocks: of 16 tokens in the cache; default: enough for `max_sequences` requests of the whole context.
        gpus: 0: on the CPU.
        num_threads: of the CPU.
        precision: `float32` (as it is) or `bfloat16` (autocast).
        quantize: `int8`: linear layers with weights of 8-bit integers, see `quantize_int8`.
        model: the run's, where it is loaded already, on its device and quantized: its weights are then shared.
        content: what `content_of` the run was when the version started; empty: whatever is there now.

    Raises:
        RunNameError, CheckpointError: as `load_served_model`.
        TaskError: as that, or the task's own `decoder` or `vocabulary` raises, or the cache finds no memory.
        ConfigError: the model cannot generate text, or a GPU is asked for, and there is none.
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
    own: Any = getattr(task, "decoder", None)  # an optional method of a task
    told: Any = getattr(task, "vocabulary", None)  # as above

    def make() -> Decoder:
        if own is not None:
            decoder: Decoder = own(model, max_rows=token_budget, max_sequences=max_sequences)
            return decoder
        return TransformerDecoder(
            model, max_rows=token_budget, max_sequences=max_sequences, num_blocks=num_blocks, precision=precision
        )

    try:
        decoder = make()
        vocabulary: Vocabulary = ByteVocabulary() if told is None else told()
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
