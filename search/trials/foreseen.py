"""What a task's validation will report, found before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Batch, Task


def metric_names(
    task: Task, model: nn.Module, stream: SampleStream, cast: Callable[[Batch], Batch], wanted: Collection[str]
) -> list[str] | None:
    """The names of a task's own metrics, found as a validation finds them; None: they are not to be had so.

    A task may report a metric only of batches that have something in them, as a class. So batches are looked at until
    what is wanted was reported, which the first one does as a rule, or there are no more.

    Args:
        task: whose.
        model: of it, as it is; nothing of it changes.
        stream: of the validation data.
        cast: puts a batch where the model is, in its precision.
        wanted: names that are looked for.
    """
    was_training = model.training
    names: dict[str, None] = {}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), stream.epoch(0) as shares:
            model.eval()
            for share in shares:
                for micro_batch in share.micro_batches:
                    batch = cast(micro_batch.batch)
                    names |= dict.fromkeys(task.metrics(model(batch["inputs"]), batch))
                if names.keys() >= set(wanted):
                    break
        return list(names)
    except Exception:  # noqa: BLE001 - a model may want more than its inputs, the data be unreadable; training will say
        return None
    finally:
        model.train(was_training)
