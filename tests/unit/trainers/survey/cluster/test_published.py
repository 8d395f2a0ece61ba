"""Published tables come out of the simulated cluster from one of their points."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.cluster.published import (
    BERT_SAMPLES_PER_S,
    GPIPE_TRANSFORMER,
    bert_scaling,
    gpipe_speedups,
)


@pytest.mark.parametrize("calibrated", [2, 4, 8])
def test_gpipe_s_transformer_column_comes_out_within_a_tenth_from_any_one_of_its_points(calibrated: int) -> None:
    found = gpipe_speedups(calibrated)
    assert found[calibrated] == pytest.approx(GPIPE_TRANSFORMER[calibrated])
    assert found == pytest.approx(dict(GPIPE_TRANSFORMER), rel=0.1)


@pytest.mark.parametrize("samples", [32, 48])
def test_data_parallel_bert_comes_out_within_a_tenth_at_every_number_of_gpus_from_the_row_of_two_nodes(
    samples: int,
) -> None:
    scaling = bert_scaling(samples, calibrated=16, calibrated_samples=32)
    assert set(scaling.predicted) == set(BERT_SAMPLES_PER_S[samples])
    assert max(map(abs, scaling.errors.values())) < 0.1
    # The shape: nearly linear within a node, a fall at its border, then nearly linear again.
    speedup = {size: rate / scaling.predicted[1] for size, rate in scaling.predicted.items()}
    assert speedup[8] / 8 > speedup[16] / 16 + 0.1
    assert speedup[16] / 16 == pytest.approx(speedup[32] / 32, abs=0.02)
