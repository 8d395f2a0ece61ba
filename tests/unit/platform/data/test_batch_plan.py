"""The plan of growing batches: every sample once an epoch, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.platform.data.batch_plan import BatchPlan


def walked(num_samples: int, sizes: list[int]) -> list[tuple[int, int, int]]:
    """Return epoch, first sample and samples of each batch, found one by one."""
    found, epoch, first = [], 0, 0
    for size in sizes:
        taken = min(size, num_samples - first)
        found.append((epoch, first, taken))
        first += taken
        if first == num_samples:
            epoch, first = epoch + 1, 0
    return found


@pytest.mark.parametrize("seed", range(30))
def test_batches_follow_each_other_through_the_epochs_whatever_their_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_samples, total = int(rng.integers(1, 60)), 120
    steps = sorted(rng.choice(np.arange(1, total), size=int(rng.integers(0, 5)), replace=False).tolist())
    changes = [(step, int(rng.integers(1, 80))) for step in steps]
    sizes = [10] * total
    for step, size in changes:
        sizes[step:] = [size] * (total - step)
    plan, batches = BatchPlan(num_samples, 10, changes), walked(num_samples, sizes)
    for step, (epoch, first, taken) in enumerate(batches[:-1]):
        part = plan.part_at(step)
        assert (part.epoch, part.first_after(step), part.batch_size) == (epoch, first, sizes[step])
        assert plan.samples_before(step) == sum(batch[2] for batch in batches[:step])
        assert plan.is_epoch_end(step + 1) == (batches[step + 1][1] == 0)
        assert plan.part_at(step + 1) == part or part.end_step == step + 1
        assert taken == min(part.batch_size, num_samples - first)
    for epochs in range(1, batches[-2][0]):
        assert plan.num_steps(epochs) == next(step for step, batch in enumerate(batches) if batch[0] == epochs)
