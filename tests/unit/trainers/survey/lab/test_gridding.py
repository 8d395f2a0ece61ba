"""Grids of workers for a layer: the formula's choice is the one that sends least, and all compute the same."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.lab.gridding import LAYERS, grid_sweep


def test_1_5d_grids_of_fewest_analytic_bytes_have_the_fewest_counted_ones_and_follow_the_ratio() -> None:
    exhibit = grid_sweep(workers=(4,))
    assert [row[3] for row in exhibit.rows] == ["1 x 4", "2 x 2", "4 x 1"] * len(LAYERS)
    for row in exhibit.rows:
        assert row[5] == pytest.approx(row[4], abs=4 * 4)  # all-reduces round up to whole numbers
        assert isinstance(row[6], float)
        assert row[6] < 1e-5
    assert exhibit.findings == [
        "The grid of the fewest bytes by the formula has the fewest counted ones in 3 of 3.",
        "4 workers, 0.2 activations a weight: 4 x 1 sends least.",
        "4 workers, 2 activations a weight: 2 x 2 sends least.",
        "4 workers, 20 activations a weight: 1 x 4 sends least.",
    ]
