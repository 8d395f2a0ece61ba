"""Data that a task draws at random, or finds in another order on another worker."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.platform.errors import TrainingError
from support.layouts import layout_settings, train_laid_out
from support.other_rows import Divided, Order, shorter, turned
from support.training import furthest


def test_rows_that_a_task_draws_by_the_generators_of_its_process_are_the_same_on_every_worker() -> None:
    tasks: list[Divided] = []

    def task() -> Divided:
        tasks.append(Divided(np.random.permutation))
        return tasks[-1]

    one, two = (
        train_laid_out(task, layout_settings({"data": replicas, "microbatches": None}, steps=4)) for replicas in (1, 2)
    )
    assert furthest(one.weights, two.weights) < 1e-12
    assert all(each.rows == tasks[0].rows for each in tasks)
    assert not tasks[0].rows["train"] & tasks[0].rows["validation"]


@pytest.mark.parametrize(
    ("order", "said"), [(turned, "as many rows, but others"), (shorter, r"\d+ and \d+ rows")], ids=["order", "number"]
)
@pytest.mark.parametrize("layout", [{"data": 3}, {"data": 2, "pipeline": 2}], ids=["replicas", "pipeline"])
def test_workers_with_other_rows_are_refused(order: Order, said: str, layout: dict[str, int]) -> None:
    settings = layout_settings({**layout, "microbatches": 1}, steps=1)
    with pytest.raises(TrainingError, match=rf"have not the same (train|validation) data: {said}.* give generators"):
        train_laid_out(lambda: Divided(order), settings)


def test_replicas_that_average_their_weights_are_refused_with_other_rows_too() -> None:
    settings = layout_settings({"data": 2, "microbatches": None}, {"type": "averaging", "every": 1}, steps=1)
    with pytest.raises(TrainingError, match="Workers 1 and 0 have not the same train data"):
        train_laid_out(lambda: Divided(turned), settings)
