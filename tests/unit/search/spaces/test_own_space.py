"""Genomes of a user's own space become JSON values, or a sentence."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import TaskError
from orchestray.search.spaces.registry import OwnSpace


class Numbers:
    """A space whose draws are NumPy's values."""

    def sample(self, rng: np.random.Generator) -> Any:
        return [rng.choice([8, 16]), {"rate": np.float32(0.5), "bits": rng.integers(0, 2, size=2) > 0}]

    def mutate(self, genome: Any, rng: np.random.Generator) -> Any:
        return (*genome, rng.integers(4))

    def crossover(self, a: Any, b: Any, rng: np.random.Generator) -> Any:
        return np.where(rng.random(2) < 0.5, a, b)

    def build(self, genome: Any, input_shape: Any, num_outputs: int) -> Any: ...


class Fixed(Numbers):
    """A space that always draws the same."""

    def __init__(self, genome: Any) -> None:
        self.genome = genome

    def sample(self, rng: np.random.Generator) -> Any:
        return self.genome


def test_numpy_values_of_a_genome_become_json_values() -> None:
    space, rng = OwnSpace(Numbers()), np.random.default_rng(0)
    sampled = space.sample(rng)
    for genome in (sampled, space.mutate([8], rng), space.crossover([1, 2], [3, 4], rng)):
        assert json.loads(json.dumps(genome)) == genome
    assert sampled[0] in (8, 16)
    assert sampled[1]["rate"] == 0.5


@pytest.mark.parametrize("genome", [[{8, 16}], float("nan"), {"width": object()}, {(1, 2): 3}])
def test_a_genome_that_is_no_json_value_is_named_with_what_is_wanted(genome: Any) -> None:
    with pytest.raises(TaskError, match=re.escape(f"the genome {genome!r}, of Fixed.sample, is no JSON value")) as told:
        OwnSpace(Fixed(genome)).sample(np.random.default_rng(0))
    assert "Make it of dicts with text keys, lists" in str(told.value)
