"""The names of the metrics of a task's validation, found before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.trainers.core.inputs import call
from orchestray.trainers.core.modes import evaluating
from orchestray.trainers.core.task_calls import has_totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Batch, Task


def metric_names(
    task: Task, model: nn.Module, stream: SampleStream, cast: Callable[[Batch], Batch], wanted: Collection[str]
) -> list[str] | None:
    """Return the names of a task's own metrics, found by running its validation; None if that does not tell them.

    A task may report some metrics only for certain batches, for example those containing a class. Batches are therefore
    processed until all wanted names were reported, usually by the first one, or the data ends. With `final_metrics`
    there are totals at first, of other names.

    Args:
        task: task that reports the metrics.
        model: model of the task; it is not changed.
        stream: stream of the validation data.
        cast: moves a batch to the model's device and precision.
        wanted: names to look for.
    """
    if has_totals(task):
        return None
    names: dict[str, None] = {}
    try:
        with torch.random.fork_rng(devices=[]), evaluating(model), torch.no_grad(), stream.epoch(0) as shares:
            for share in shares:
                for micro_batch in share.micro_batches:
                    batch = cast(micro_batch.batch)
                    names |= dict.fromkeys(task.metrics(call(model, batch["inputs"]), batch))
                if names.keys() >= set(wanted):
                    break
        return list(names)
    except Exception:  # noqa: BLE001 - missing model inputs or unreadable data, say; training will report it
        return None
