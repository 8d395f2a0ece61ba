"""The sizes of a training that advice goes by: its model, its activations and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.data.source import open_split
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.planning.advice import Memory
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.subject import subject_of

_COPIES = 4
"""Copies of trained parameters in memory: themselves, their gradients, and two moments of the optimizer."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a training."""

    num_samples: int
    parameter_bytes: int
    memory: Memory


def sizes_of(
    source: str, overrides: Sequence[str] = (), shapes: Sequence[str] = (), num_samples: int | None = None
) -> Sizes:
    """Return the sizes of what a user names; nothing is computed.

    Args:
        source: same as in `subject_of`.
        overrides: same as in `subject_of`.
        shapes: same as in `subject_of`.
        num_samples: training samples; default: those of a config's task, else those of a batch.

    Raises:
        ConfigError: same as in `subject_of`.
        TaskError: the class cannot be imported, built, or traced.
        DataError: the task's data cannot be read.
    """
    subject = subject_of(source, overrides, shapes)
    analysis = analyse(subject)
    if num_samples is None and Path(source).is_file() and source.endswith((".yaml", ".yml")):
        task = tasks.build(TaskSource.from_config(load_train_config(source, list(overrides)).task))
        num_samples = open_split(task, "train", num_endless=1).num_rows
    count = num_samples or subject.batch_size
    sample_bytes = sum(tensor.nbytes for tensor in tensors_in(subject.inputs)) / subject.batch_size
    frozen_bytes = sum(each.nbytes for each in subject.model.parameters() if not each.requires_grad)
    memory = Memory(_COPIES * analysis.parameter_bytes + frozen_bytes, analysis.saved_bytes, count * sample_bytes)
    return Sizes(count, analysis.parameter_bytes, memory)
