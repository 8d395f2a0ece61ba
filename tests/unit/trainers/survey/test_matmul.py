"""The survey's schemes for fully connected layers: right products, counted bytes and messages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.survey.matmul import (
    Grid,
    LayerShape,
    backward_15d,
    best_grid,
    cannon,
    cannon_bytes,
    forward_15d,
    grid_bytes,
    grid_groups,
    grids,
)
from support.threads import run_replicas

FLOAT_BYTES = 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- Cannon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 2, 3])
def test_cannon_s_matrix_multiplication_is_the_product_and_each_worker_sends_its_formula(side: int) -> None:
    m, k, n = 2 * side, 3 * side, 4 * side
    a, b = random(m, k), random(k, n, seed=1)

    def worker(torus: Collective) -> tuple[Tensor, int]:
        row, column = divmod(torus.rank, side)
        own_a = a[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        own_b = b[3 * row : 3 * row + 3, 4 * column : 4 * column + 4]
        return cannon(own_a, own_b, torus), torus.bytes_sent

    blocks = run_replicas(side * side, worker)
    rows = [torch.cat([blocks[row * side + column][0] for column in range(side)], 1) for row in range(side)]
    assert torch.allclose(torch.cat(rows), a @ b, rtol=1e-12, atol=1e-12)
    a_bytes, b_bytes = 6 * FLOAT_BYTES, 12 * FLOAT_BYTES
    sent = [sent for _, sent in blocks]
    assert sent == [cannon_bytes(a_bytes, b_bytes, side, rank) for rank in range(side * side)]
    # q - 1 shifts of both blocks, and to align at most one more: less than gathering whole matrices from everyone.
    assert max(sent) <= side * (a_bytes + b_bytes)
    assert side == 1 or max(sent) < (side * side - 1) * (a_bytes + b_bytes)


def test_cannon_refuses_workers_that_form_no_torus() -> None:
    with pytest.raises(ValueError, match="square"):
        run_replicas(2, lambda torus: cannon(random(1, 1), random(1, 1), torus))


# -- 1.5 dimensions ----------------------------------------------------------------------------------------------------

LAYERS = [
    LayerShape(6, 12, 96),  # many samples, few weights
    LayerShape(48, 60, 12),  # few samples, many weights
    LayerShape(24, 24, 24),
    LayerShape(60, 12, 36),
]


def counted(grid: Grid, layer: LayerShape) -> list[int]:
    """Return the bytes of every worker, forward and backward; the results are checked on the way."""
    weight, x = random(layer.num_outputs, layer.num_inputs), random(layer.num_samples, layer.num_inputs, seed=1)
    dy = random(layer.num_samples, layer.num_outputs, seed=2)

    def worker(world: Collective) -> int:
        row, column = divmod(world.rank, grid.columns)
        groups = grid_groups(world, grid)
        own_weight, own_x = weight.chunk(grid.rows)[row], x.chunk(grid.columns)[column]
        y = forward_15d(own_weight, own_x, groups)
        assert torch.allclose(y, (x @ weight.T).chunk(grid.columns)[column], rtol=1e-12, atol=1e-12)
        dweight, dx = backward_15d(own_weight, own_x, dy.chunk(grid.columns)[column], groups)
        assert torch.allclose(dweight, (dy.T @ x).chunk(grid.rows)[row], rtol=1e-12, atol=1e-12)
        assert torch.allclose(dx, (dy @ weight).chunk(grid.columns)[column], rtol=1e-12, atol=1e-12)
        return world.bytes_sent + (groups.column.bytes_sent + groups.row.bytes_sent if world.size == 1 else 0)

    return run_replicas(grid.rows * grid.columns, worker)


def test_1_5d_matmul_grid_of_fewest_analytic_bytes_has_the_fewest_counted_bytes() -> None:
    best, num_workers = set(), 6
    for layer in LAYERS:
        sent = {grid: max(counted(grid, layer)) for grid in grids(num_workers, layer)}
        assert len(sent) == len(grids(num_workers))  # every factorisation
        assert min(sent, key=lambda grid: sent[grid]) == best_grid(num_workers, layer)
        for grid, found in sent.items():
            assert found == pytest.approx(grid_bytes(grid, layer, FLOAT_BYTES), abs=2)  # all-reduces round up
        best.add(best_grid(num_workers, layer))
    assert len(best) > 1  # the choice depends on the layer


def test_a_grid_of_one_row_is_data_parallelism_and_of_one_column_model_parallelism() -> None:
    layer = LayerShape(10, 20, 40)
    assert grid_bytes(Grid(1, 4), layer) == 2 * 3 / 4 * 10 * 20 * 4
    assert grid_bytes(Grid(4, 1), layer) == 3 / 4 * 40 * (20 + 2 * 10) * 4
    with pytest.raises(ValueError, match="no grid of 7 workers"):
        best_grid(7, layer)
