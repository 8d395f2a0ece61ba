"""Networks of memory banks, their codes, and the shared weights that they use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.memory_bank import MemoryBank

DENSE: dict[str, Any] = {
    "block0.banks": 3,
    "block0.channels": 2,
    "block0.ops": 2,
    "block0.op0.reads": "0",
    "block0.op0.writes": "1",
    "block0.op0.units": 2,
    "block0.op0.convolutions": 1,
    "block0.op0.kernel0": 3,
    "block0.op0.dilation0": 1,
    "block0.op1.reads": "0+1",
    "block0.op1.writes": "2",
    "block0.op1.units": 1,
    "block0.op1.convolutions": 1,
    "block0.op1.kernel0": 5,
    "block0.op1.dilation0": 1,
}
"""A dense block: each op reads all banks that are not empty and writes to an empty one."""
SMALL = MemoryBank(blocks=1, banks=3, channels=[2, 4], unit=2, max_ops=2, max_convolutions=1, dilations=[1])


def test_an_op_reads_its_banks_beside_each_other_and_adds_to_those_it_writes() -> None:
    text = "conv 3x3 2, conv 1x1 4, conv 3x3 2, concat, conv 1x1 2, conv 5x5 2, concat, global average, linear"
    assert SMALL.text(DENSE) == text
    network = SMALL.build(DENSE, (8, 8), 10)
    shapes = {name: tuple(p.shape[:2]) for name, p in network.named_parameters() if name.endswith("squeeze.0.weight")}
    assert shapes == {"steps.block0_op0_squeeze.0.weight": (4, 2), "steps.block0_op1_squeeze.0.weight": (2, 4)}
    residual = DENSE | {"block0.op0.writes": "0", "block0.op1.reads": "0", "block0.op1.writes": "0"}
    text = "conv 3x3 2, conv 1x1 4, conv 3x3 2, add, conv 1x1 2, conv 5x5 2, add, global average, linear"
    assert SMALL.text(residual) == text


def test_a_code_says_of_each_op_what_it_reads_and_writes_in_the_columns_of_the_banks_it_reads() -> None:
    code = SMALL.code(DENSE)
    assert code.cells.shape == (SMALL.num_features, 2 + 1, 3 * 2), "a row of each unit; columns of 2 units of each bank"
    assert [(one.rows, one.columns) for one in code.generated] == [(slice(0, 2), (0,)), (slice(2, 3), (0, 2))]
    used = code.cells.any(axis=0)
    assert used.tolist() == [[True, *[False] * 5]] * 2 + [[True, False, True, False, False, False]]
    assert [code.cells[:6, row, 0].tolist() for row in (0, 2)] == [[1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
    per_cell = code.cells[:, used].sum(axis=0)
    assert np.ptp(per_cell - code.cells[:6, used].sum(axis=0)) == 0, "all else is one-hot"


def test_two_architectures_have_one_code_only_if_their_networks_are_the_same() -> None:
    space = MemoryBank(blocks=1, banks=2, channels=[2], unit=2, max_ops=2, max_units=1, dilations=[1])
    networks: dict[bytes, Any] = {}
    for genome in space.enumerate():
        plan = space.plan(genome)
        assert networks.setdefault(space.code(genome).cells.tobytes(), plan) == plan
    assert len(networks) > 400


@pytest.mark.parametrize("seed", range(5))
def test_every_weight_is_either_generated_or_cut_from_a_shared_one_that_is_large_enough(seed: int) -> None:
    space = MemoryBank()
    genome = space.sample(rng_of(seed))
    largest = {name: p.shape for name, p in space.largest((8, 8), 10).named_parameters()}
    code, shared = space.code(genome), space.shared(genome)
    generated = {one.name: one for one in code.generated}
    for name, own in space.build(genome, (8, 8), 10).named_parameters():
        if name in generated:
            one = generated.pop(name)
            assert own.shape == (4 * (one.rows.stop - one.rows.start), 4 * len(one.columns), 1, 1)
            assert code.cells[:, one.rows][:, :, list(one.columns)].any(axis=0).all()
            continue
        _, step, rest = name.split(".", 2)
        have, inputs = largest[f"{shared[step].name}.{rest}"], shared[step].inputs
        assert all(size <= most for size, most in zip(own.shape, have, strict=True))
        if inputs is not None and own.dim() > 1:
            assert len(set(inputs)) == own.shape[1]
            assert max(inputs) < have[1]
    assert not generated


def test_an_impossible_space_is_refused_with_the_argument() -> None:
    for wrong, message in (
        ({"channels": []}, r"architecture\.channels: must be different numbers of at least 1, got \[\]"),
        ({"kernels": [2, 3]}, r"architecture\.kernels: must be odd"),
        ({"channels": [4, 6]}, r"architecture\.channels: must be multiples of the unit, 4, got \[4, 6\]"),
        ({"banks": 0}, r"architecture\.banks: must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            MemoryBank(**wrong)
    with pytest.raises(ConfigError, match=r"block0\.op0\.reads must be one of \['0'\], and is '1'"):
        SMALL.build(DENSE | {"block0.op0.reads": "1"}, (8, 8), 10)


def test_outputs_are_those_of_the_banks_computed_by_hand() -> None:
    torch.manual_seed(0)
    network = SMALL.build(DENSE, (8, 8), 10).eval()
    steps: Any = network.steps
    inputs = torch.randn(3, 8, 8)
    with torch.no_grad():
        first = steps["stem"](inputs[:, None])
        second = steps["block0_op0_convolution0"](steps["block0_op0_squeeze"](first))
        both = torch.cat([first, second], dim=1)
        third = steps["block0_op1_convolution0"](steps["block0_op1_squeeze"](both))
        wanted = steps["head"](torch.cat([both, third], dim=1).mean(dim=(2, 3)))
        torch.testing.assert_close(network(inputs), wanted)
