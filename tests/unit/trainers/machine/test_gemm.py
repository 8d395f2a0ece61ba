"""Products between the measured shapes follow power laws exactly, and grow like their work beyond them."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.machine.gemm import GemmTable, shapes
from support.profiles import gemm_table

SIZES = (1, 8, 64, 512)


def power_law(m: float, n: float, k: float) -> float:
    return 1e-9 * m**0.5 * n**0.9 * k**1.1


POWER_LAW = GemmTable(SIZES, tuple(power_law(*shape) for shape in shapes(SIZES)))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 64, 512), (512, 512, 512), (3, 100, 511), (1, 9, 2.5)])
def test_a_power_law_is_interpolated_without_error_each_dimension_with_its_own_power(
    shape: tuple[float, float, float],
) -> None:
    assert POWER_LAW.seconds(*shape) == pytest.approx(power_law(*shape), rel=1e-12)


def test_beyond_the_largest_size_the_time_grows_like_the_work_and_below_the_smallest_it_stays() -> None:
    assert POWER_LAW.seconds(1024, 8, 2048) == pytest.approx(2 * 4 * power_law(512, 8, 512))
    table = GemmTable((4, 16), tuple(range(1, 9)))
    assert table.seconds(1, 1, 1) == pytest.approx(1.0)


def test_the_speed_is_two_operations_for_each_product_and_the_peak_is_that_of_the_fastest_shape() -> None:
    assert gemm_table(5e9).flops_per_s(3, 70, 900) == pytest.approx(5e9)
    assert POWER_LAW.peak_flops_per_s == pytest.approx(max(POWER_LAW.flops_per_s(*each) for each in shapes(SIZES)))


def test_a_table_survives_json() -> None:
    again = GemmTable.from_json(POWER_LAW.to_json())
    assert again.sizes == POWER_LAW.sizes
    assert again.times_s == pytest.approx(POWER_LAW.times_s, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "times_s"),
    [((1,), (1.0,)), ((2, 1), (1.0,) * 8), ((0, 1), (1.0,) * 8), ((1, 2), (1.0,) * 7), ((1, 2), (0.0,) * 8)],
)
def test_a_table_with_holes_or_without_an_order_is_refused(sizes: tuple[int, ...], times_s: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="a table of products needs"):
        GemmTable(sizes, times_s)
