"""Recurrent cells as their equations are written: Elman's, the LSTM and the GRU; one step, and many.

Elman 1990, without the layer of outputs behind; Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
2000; Cho et al. 2014 in its first version, whose reset gate comes after the product with the state and not before it.
Weights lie as torch's do, gate below gate, so that a layer of torch can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

State: TypeAlias = tuple[Tensor, ...]
"""Tensors [samples, hidden] that a cell hands on, the output first."""


@dataclass(frozen=True)
class CellWeights:
    """The weights of a cell with G gates (1 of Elman's, 4 of an LSTM, 3 of a GRU)."""

    of_input: Tensor
    """[G * hidden, features]"""
    of_state: Tensor
    """[G * hidden, hidden]"""
    bias_of_input: Tensor
    """[G * hidden]"""
    bias_of_state: Tensor
    """[G * hidden]"""

    @classmethod
    def of_layer(cls, network: nn.RNNBase, layer: int = 0) -> CellWeights:
        """Return the weights of a layer of `nn.RNN`, `nn.LSTM` or `nn.GRU`; they share its memory."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return cls(*(getattr(network, f"{name}_l{layer}") for name in names))

    def parts(self, x: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what inputs, and what the state, adds to each gate: [samples, hidden] each."""
        gates = len(self.of_state) // self.of_state.shape[1]
        from_input = x @ self.of_input.t() + self.bias_of_input
        from_state = state @ self.of_state.t() + self.bias_of_state
        return from_input.chunk(gates, dim=1), from_state.chunk(gates, dim=1)


Cell: TypeAlias = Callable[[CellWeights, Tensor, State], State]
"""A function from weights, inputs [samples, features] and a state to the next state."""


def elman(weights: CellWeights, x: Tensor, state: State) -> State:
    """Return h_t = tanh(W_x x_t + W_h h_t-1)."""
    (of_input,), (of_state,) = weights.parts(x, state[0])
    return (torch.tanh(of_input + of_state),)


def lstm(weights: CellWeights, x: Tensor, state: State) -> State:
    """Return output and memory: c_t = f c_t-1 + i g, and h_t = o tanh(c_t), with gates i, f and o of x_t and h_t-1."""
    hidden, memory = state
    of_input, of_state = weights.parts(x, hidden)
    let_in, forget, candidate, let_out = (one + two for one, two in zip(of_input, of_state, strict=True))
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(let_in) * torch.tanh(candidate)
    return torch.sigmoid(let_out) * torch.tanh(memory), memory


def gru(weights: CellWeights, x: Tensor, state: State) -> State:
    """Return h_t = (1 - z) n + z h_t-1, with n = tanh(W_x x_t + r (W_h h_t-1)) and gates r and z."""
    of_input, of_state = weights.parts(x, state[0])
    reset = torch.sigmoid(of_input[0] + of_state[0])
    update = torch.sigmoid(of_input[1] + of_state[1])
    candidate = torch.tanh(of_input[2] + reset * of_state[2])
    return ((1 - update) * candidate + update * state[0],)


def unrolled(cell: Cell, weights: CellWeights, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the outputs of all steps and the last state.

    Args:
        cell: the cell.
        weights: its weights, the same at each step.
        x: inputs [times, samples, features].
        state: state before the first step.
    """
    outputs = []
    for now in x:
        state = cell(weights, now, state)
        outputs.append(state[0])
    return torch.stack(outputs), state
