"""Batches divided over devices of unlike speed, on a clock that the devices themselves move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from orchestray.platform.errors import ClusterError
from orchestray.trainers.survey.lab.divided_batches import Device, DeviceLostError, DividedBatches, Finish


class Timed(Device):
    """A device with a speed: its seconds follow from that, and none pass.

    Args:
        rate: samples that it answers in a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.is_lost = False
        self.given: list[int] = []
        """Samples that it was given at each time."""

    def start(self, x: np.ndarray) -> Finish:
        self.given.append(len(x))

        def finish() -> tuple[np.ndarray, float]:
            if self.is_lost:
                raise DeviceLostError
            return answers(x), len(x) / self.rate

        return finish


def answers(x: np.ndarray) -> np.ndarray:
    outputs: np.ndarray = np.stack([x.sum(1), x[:, 0]], axis=1)
    return outputs


def batch(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, 3))


def divided(rates: Sequence[float]) -> tuple[list[Timed], DividedBatches]:
    devices = [Timed(rate) for rate in rates]
    return devices, DividedBatches(devices)


@pytest.mark.parametrize("seed", range(5))
def test_outputs_are_one_device_s_in_order_and_parts_sum_to_the_batch_whatever_the_speeds(seed: int) -> None:
    rng = random.Random(seed)
    devices, batches = divided([rng.choice([0.01, 1.0, 9.0]) for _ in range(rng.randint(1, 5))])
    for number in range(40):
        rng.choice(devices).rate = rng.choice([1e-3, 1.0, 50.0])
        x = batch(rng.randint(1, 30), number)
        np.testing.assert_array_equal(batches.answer(x), answers(x))
        assert sum(batches.answered.values()) == len(x)
    assert all(part > 0 for device in devices for part in device.given)  # nothing is sent for nothing


@pytest.mark.parametrize("rates", [(4.0, 1.0), (1.0, 1.0), (1.0, 30.0), (7.0, 3.5, 1.0, 0.1)])
def test_parts_are_proportional_to_the_speeds_within_one_sample(rates: Sequence[float]) -> None:
    devices, batches = divided(rates)
    batches.answer(batch(100))
    before = Counter({number: sum(device.given) for number, device in enumerate(devices)})
    for number in range(1, 60):
        batches.answer(batch(37, number))
        for place, device in enumerate(devices):
            # All batches so far: what rounding takes in one it gives back in a later one.
            exact = 37 * number * rates[place] / sum(rates)
            assert abs(sum(device.given) - before[place] - exact) < 1
            assert len(rates) > 2 or abs(device.given[-1] - 37 * rates[place] / sum(rates)) < 1


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_five_batches_after_a_speed_has_changed_parts_are_right_within_a_fiftieth_of_the_batch(factor: float) -> None:
    devices, batches = divided((4.0, 1.0))
    batches.answer(batch(200))
    devices[0].rate *= factor
    right = 200 * devices[0].rate / (devices[0].rate + devices[1].rate)
    for _ in range(5):
        batches.answer(batch(200))
    assert abs(batches.parts(200)[0] - right) <= 200 / 50


def test_all_devices_are_done_at_the_same_time_and_sooner_than_with_equal_parts() -> None:
    devices = [Timed(rate) for rate in (8.0, 2.0)]
    by_speed, equal = DividedBatches(devices), DividedBatches(devices, is_by_speed=False)
    for batches in (by_speed, equal):
        for _ in range(3):
            batches.answer(batch(100))
    seconds = {
        name: [each.answered[number] / device.rate for number, device in enumerate(devices)]
        for name, each in {"by speed": by_speed, "equal": equal}.items()
    }
    assert seconds == {"by speed": [10.0, 10.0], "equal": [6.25, 25.0]}


def test_the_part_of_a_lost_device_is_answered_by_the_others_in_its_place_and_it_gets_nothing_more() -> None:
    devices, batches = divided((5.0, 3.0, 2.0))
    batches.answer(batch(99))
    devices[0].is_lost = True
    x = batch(100, 1)
    np.testing.assert_array_equal(batches.answer(x), answers(x))
    assert devices[0].given[1:] == [50]
    assert batches.answered == {1: 60, 2: 40}
    batches.answer(x)
    assert devices[0].given[1:] == [50]
    assert batches.answered == {1: 60, 2: 40}


def test_a_batch_that_no_device_is_left_for_is_an_error() -> None:
    devices, batches = divided((2.0, 1.0))
    for device in devices:
        device.is_lost = True
    with pytest.raises(ClusterError, match="No device is left"):
        batches.answer(batch(4))
