"""NEAT and HyperNEAT: networks that evolve node by node, and a network that paints another's weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished
from orchestray.search.methods.evolution.neat import Neat
from orchestray.search.spaces.architectures.hyperneat import Painted
from orchestray.search.spaces.architectures.topology import Topology, TopologyGenome

_POINTS = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
_XOR = np.array([0.0, 1.0, 1.0, 0.0])


def solves_xor(seed: int) -> TopologyGenome | None:
    """Return the first network that answers all four right, without a gradient.

    The fitness is that of the paper, section 4.1.
    """
    space = Topology(inputs=2, outputs=1, output="sigmoid")
    method = Neat(space={}, architecture=space, seed=seed, trials=12_000)
    while (proposal := method.ask()) is not None:
        assert proposal.steps == 0, "its weights are not trained"
        answers = space.outputs_of(proposal.genome, _POINTS)[:, 0]
        if ((answers > 0.5) == (_XOR > 0.5)).all():
            found: TopologyGenome = proposal.genome
            return found
        method.tell(Finished(proposal.trial, "succeeded", 0, float((4 - np.abs(answers - _XOR).sum()) ** 2)))
    return None


@pytest.mark.parametrize(("num_solved", "num_seeds"), [(2, 2), pytest.param(18, 20, marks=pytest.mark.slow)])
def test_neat_solves_xor_without_gradients_in_18_of_20_seeds(num_solved: int, num_seeds: int) -> None:
    solved: list[TopologyGenome] = []
    for seed in range(num_seeds):
        genome = solves_xor(seed)
        solved += [] if genome is None else [genome]
        assert seed + 1 - len(solved) <= num_seeds - num_solved, "one seed too many without a solution"
        if len(solved) == num_solved:  # the others would change nothing
            break
    assert len(solved) == num_solved
    assert all(genome["nodes"] for genome in solved), "XOR needs a hidden node"


def blocks(side: int, num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [num, side, side] with noise and one bright block, and which of 3 x 3 places it is at."""
    rng = np.random.default_rng(seed)
    images = 0.3 * rng.random((num, side, side))
    labels = rng.integers(9, size=num)
    width = side // 3
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = (label // 3) * width, (label % 3) * width
        image[top : top + width, left : left + width] += 1.0
    return torch.tensor(images, dtype=torch.float32), torch.tensor(labels)


def accuracy(space: Painted, genome: TopologyGenome, side: int) -> float:
    images, labels = blocks(side, 90, seed=side)
    with torch.no_grad():
        outputs = space.build(genome, (side, side), 9)(images)
    return float((outputs.argmax(1) == labels).float().mean())


def test_hyperneat_paints_weights_that_solve_the_task_at_any_resolution() -> None:
    """Evolve a genome on 6 x 6 pixels: it points at the block on 24 x 24 ones, too.

    The same genome always paints the same weights.
    """
    space = Painted()
    method = Neat(space={}, architecture=space, population=50, trials=1500, seed=0)
    best, found = 0.0, None
    while best < 0.95 and (proposal := method.ask()) is not None:
        score = accuracy(space, proposal.genome, 6)
        method.tell(Finished(proposal.trial, "succeeded", 0, score))
        if score > best:
            best, found = score, proposal.genome
    assert best >= 0.95
    assert found is not None
    assert accuracy(space, found, 24) >= 0.9
    first, second = (space.build(found, (12, 12), 9).state_dict()["weights.0"] for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (9, 144)


def test_a_painted_weight_depends_on_the_two_places_alone() -> None:
    """Check that the point that a coarse and a fine plane share has the same weight in both."""
    space = Painted()
    genome = space.sample(np.random.default_rng(1))
    outputs = np.array([[0.25, -0.5]])
    point = np.array([[-1 / 3, 1 / 3]])
    alone = space.weights(genome, point, outputs)
    among = space.weights(genome, np.concatenate([np.random.default_rng(0).uniform(-1, 1, (20, 2)), point]), outputs)
    assert among[0, -1] == alone[0, 0]


def test_points_are_connected_where_the_pattern_is_over_the_threshold_and_weights_grow_from_zero_to_the_largest() -> (
    None
):
    """Check section 3.2 of the paper: weak weights do not connect, and all others are scaled to [0, largest]."""
    space = Painted(threshold=0.2, largest=3.0)
    # The pattern is x1 + 2 y2, which is drawn by two connections: node 6 is the output, 5 the bias.
    genome = {"nodes": [], "connections": [[0, 0, 6, 1.0, True], [1, 3, 6, 2.0, True]]}
    inputs = np.array([[-0.9, 0.3], [0.1, -0.7], [0.5, 0.0]])
    outputs = np.array([[0.4, 0.0], [-0.4, 1.5]])
    expected = [[-2.625, 0.0, 1.125], [3.0, 3.0, 3.0]]
    np.testing.assert_allclose(space.weights(genome, inputs, outputs), expected, rtol=0, atol=1e-12)
    network = next(space.build(genome, (4, 4), 4).parameters()).numpy(force=True)
    pixels = np.array([-0.75, -0.25, 0.25, 0.75])
    x1, y2 = np.tile(pixels, 4), np.repeat([-0.5, 0.5], 2)
    pattern = x1[None] + 2 * y2[:, None]
    weights = 3 * np.sign(pattern) * np.clip((np.abs(pattern) - 0.2) / 0.8, 0, 1)
    np.testing.assert_allclose(network, weights / 16, rtol=0, atol=1e-7)


def test_a_hidden_sheet_is_painted_by_the_first_output_and_leads_on_by_the_second() -> None:
    space = Painted(hidden=2, threshold=0.0, largest=1.0)
    # Node 6 paints the weights to the hidden sheet, x1; node 7 those from it, y2 / 2.
    genome = {"nodes": [], "connections": [[0, 0, 6, 1.0, True], [1, 3, 7, 0.5, True]]}
    images = torch.rand(5, 4, 4, generator=torch.Generator().manual_seed(0))
    x1 = torch.tensor([-0.75, -0.25, 0.25, 0.75])
    hidden = torch.tanh((images * x1).mean((1, 2)))  # the same at each of the four points
    expected = torch.stack([-hidden / 4, -hidden / 4, hidden / 4, hidden / 4], dim=1)
    with torch.no_grad():
        outputs = space.build(genome, (4, 4), 4)(images)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"hidden": -1}, {"threshold": 1.0}, {"largest": 0.0}])
def test_a_painted_space_refuses_what_makes_no_weights(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="threshold in"):
        Painted(**arguments)  # type: ignore[arg-type]
