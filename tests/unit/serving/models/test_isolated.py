"""Batches of which some samples fail: the others are answered, whatever was raised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from orchestray.serving.models.errors import ModelError, run_isolated
from orchestray.serving.models.signature import Answers, Sample


@pytest.mark.parametrize(
    "raised", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration]
)
def test_whatever_a_model_raises_fails_its_samples_alone(raised: type[BaseException]) -> None:
    def run(samples: Sequence[Sample]) -> Answers:
        if any(int(sample["inputs"]) == 2 for sample in samples):
            raise raised
        return list(samples)

    samples = [{"inputs": np.array(place)} for place in range(5)]
    answers = run_isolated("own", run, samples)
    assert [each for each in answers if not isinstance(each, Exception)] == [*samples[:2], *samples[3:]]
    assert isinstance(answers[2], ModelError)
