"""Recurrent layers as a wavefront, with fused products, and with weights that stay where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators.recurrent import FusedLayer, PersistentCells, pipelined, wavefront
from support.threads import run_replicas


def network(layers: int = 1) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(6, 8, layers).double()


def inputs(steps: int = 7) -> torch.Tensor:
    return torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (5, 1), (1, 4), (3, 5), (8, 3)])
def test_a_wavefront_computes_each_cell_once_after_what_it_needs_in_steps_plus_layers_minus_1_rounds(
    steps: int, layers: int
) -> None:
    done: set[tuple[int, int]] = set()
    rounds = list(wavefront(steps, layers))
    for cells in rounds:
        for time, layer in cells:
            assert time == 0 or (time - 1, layer) in done
            assert layer == 0 or (time, layer - 1) in done
        done |= set(cells)
    assert len(rounds) == steps + layers - 1
    assert sorted(done) == [(time, layer) for time in range(steps) for layer in range(layers)]


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_pipelined_lstm_is_torch_s_with_one_product_of_states_a_round(layers: int) -> None:
    lstm, x = network(layers), inputs()
    with torch.no_grad():
        torch.testing.assert_close(pipelined(lstm, x), lstm(x)[0])
        graph = traced(lambda: pipelined(lstm, x))
    products = [each.name for each in graph.operations if each.name in {"mm", "bmm", "addmm", "baddbmm"}]
    assert len(products) <= 1 + 2 * (7 + layers - 1)
    assert sum(FusedLayer(lstm, number).of_state.shape == (8, 32) for number in range(layers)) == layers


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_persistent_cells_send_states_and_no_weights(workers: int) -> None:
    lstm, x = network(), inputs()

    def worker(group: Collective) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            cells = PersistentCells(FusedLayer(lstm, 0), group)
            before = group.bytes_sent
            return cells.run(x), group.bytes_sent - before

    for states, sent in run_replicas(workers, worker):
        torch.testing.assert_close(states, lstm(x)[0])
        assert sent == len(x) * (workers - 1) * 4 * (8 // workers) * 8  # of each step, its part of the state to others


def test_hidden_units_that_workers_cannot_share_evenly_are_refused() -> None:
    def worker(group: Collective) -> None:
        with pytest.raises(ValueError, match="8 hidden units are not shared evenly by 3 workers"):
            PersistentCells(FusedLayer(network(), 0), group)

    run_replicas(3, worker)
