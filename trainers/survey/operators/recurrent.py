"""Recurrent layers with fused products, as a wavefront through layers and time, and with weights that stay in place.

Appleyard et al. 2016; persistent RNNs: Diamos et al. 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective


class FusedLayer:
    """A layer of an LSTM whose four gates are one product, with its matrices transposed in advance.

    Args:
        lstm: the network, with one direction.
        layer: number of the layer.
    """

    def __init__(self, lstm: nn.LSTM, layer: int) -> None:
        of_input, of_state, *biases = (
            getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        self.of_input = of_input.t().contiguous()
        self.of_state = of_state.t().contiguous()
        self.bias = biases[0] + biases[1]

    def projected(self, x: Tensor) -> Tensor:
        """Return what inputs add to the gates; for those of all times at once it is one product.

        Args:
            x: [..., features].
        """
        gates: Tensor = x @ self.of_input + self.bias
        return gates

    def step(self, projected: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state and cell, each [samples, hidden]."""
        return next_state(projected + state @ self.of_state, cell)


def next_state(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state and cell of an LSTM, [..., hidden], for gates [..., 4 hidden] before their functions."""
    let_in, forget, candidate, let_out = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(let_in) * torch.tanh(candidate)
    return torch.sigmoid(let_out) * torch.tanh(cell), cell


def wavefront(num_steps: int, num_layers: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the cells (time, layer) that can be computed at the same time, num_steps + num_layers - 1 groups in all.

    A cell needs that of the time before, and that of the layer below.
    """
    for number in range(num_steps + num_layers - 1):
        yield [(number - layer, layer) for layer in range(num_layers) if 0 <= number - layer < num_steps]


def pipelined(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Return the outputs of an LSTM, [times, samples, hidden], by a wavefront with one product a group of cells.

    Args:
        lstm: network of one direction, without dropout, whose inputs come [times, samples, features].
        x: its inputs.
    """
    layers = [FusedLayer(lstm, number) for number in range(lstm.num_layers)]
    of_state = torch.stack([layer.of_state for layer in layers])
    state = cell = x.new_zeros(len(layers), x.shape[1], lstm.hidden_size)
    first = layers[0].projected(x)
    out = x.new_empty(len(x), x.shape[1], lstm.hidden_size)
    above = None
    if len(layers) > 1:
        above = torch.stack([layer.of_input for layer in layers[1:]]), torch.stack([one.bias for one in layers[1:]])
    for cells in wavefront(len(x), len(layers)):
        low, high = cells[0][1], cells[-1][1] + 1
        inputs = [] if low else [first[cells[0][0]][None]]
        if above is not None and (begin := max(low, 1)) < high:
            matrices, biases = (each[begin - 1 : high - 1] for each in above)
            inputs.append(state[begin - 1 : high - 1] @ matrices + biases[:, None])
        gates = torch.cat(inputs) + state[low:high] @ of_state[low:high]
        new_state, new_cell = next_state(gates, cell[low:high])
        state = torch.cat([state[:low], new_state, state[high:]])
        cell = torch.cat([cell[:low], new_cell, cell[high:]])
        if high == len(layers):
            out[cells[-1][0]] = state[-1]
    return out


class PersistentCells:
    """The recurrent weights of a layer, spread over workers that keep them: only states travel from step to step.

    Args:
        layer: the layer; each worker keeps the columns of its share of the hidden units.
        workers: workers, of which each holds one.
    """

    def __init__(self, layer: FusedLayer, workers: Collective) -> None:
        hidden = layer.of_state.shape[0]
        if hidden % workers.size:
            raise ValueError(f"{hidden} hidden units are not shared evenly by {workers.size} workers")
        share = hidden // workers.size
        own = slice(workers.rank * share, (workers.rank + 1) * share)
        self._workers = workers
        self._of_state = _share_of_gates(layer.of_state, own)
        self._of_input, self._bias = _share_of_gates(layer.of_input, own), _share_of_gates(layer.bias, own)

    def run(self, x: Tensor) -> Tensor:
        """Return the states [times, samples, hidden], on each worker, for inputs [times, samples, features]."""
        projected = x @ self._of_input + self._bias
        share = self._of_state.shape[1] // 4
        state = x.new_zeros(x.shape[1], self._of_state.shape[0])
        cell = x.new_zeros(x.shape[1], share)
        out: list[Tensor] = []
        for gates in projected:
            own, cell = next_state(gates + state @ self._of_state, cell)
            state = torch.cat([*self._workers.all_gather(own)], dim=1)
            out.append(state)
        return torch.stack(out)


def _share_of_gates(tensor: Tensor, own: slice) -> Tensor:
    """Return the columns of some hidden units, of each of the four gates."""
    return torch.cat([gate[..., own] for gate in tensor.chunk(4, dim=-1)], dim=-1)
