"""Backpropagation through time: cut after some steps, and with few stored states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.operators.bptt import elman_gradients
from orchestray.trainers.survey.operators.cells import CellWeights, State, elman, lstm, unrolled
from orchestray.trainers.survey.operators.recurrent_memory import Kind, Plan, backpropagate

_BACKWARD = 2
"""Forward steps that a backward step takes as long as: it has two products for each one of the forward step."""


def truncated(
    rounds: int = 1, num_steps: int = 24, cuts: Sequence[int] = (1, 2, 4, 8, 16, 24, 32), hidden: int = 8
) -> Exhibit:
    """Compare gradients of a network that are cut after some steps with those of the whole time."""
    del rounds
    torch.manual_seed(0)
    network = nn.RNN(4, hidden).double()
    weights = CellWeights.of_layer(network)
    x, wanted = torch.randn(num_steps, 3, 4).double(), torch.randn(num_steps, 3, hidden).double()
    state = torch.zeros(3, hidden, dtype=torch.float64)
    by_autograd = _by_autograd(weights, x, state, wanted)
    with torch.no_grad():
        of_outputs = 2 * (unrolled(elman, weights, x, (state,))[0] - wanted)
    whole = elman_gradients(weights, x, state, of_outputs).flat()
    rows: list[list[Any]] = []
    for steps in cuts:
        found = elman_gradients(weights, x, state, of_outputs, steps).flat()
        cosine = float(torch.cosine_similarity(found, whole, dim=0))
        rows.append([steps, min(steps, num_steps), float((found - whole).norm() / whole.norm()), cosine])
    equal = [row[0] for row in rows if row[2] == 0]
    apart = float((whole - by_autograd).abs().max())
    findings = [
        f"By hand and by autograd the gradient of all {num_steps} steps is the same to {apart:.1g}.",
        f"Cut after {equal[0]} steps or more it is that of the whole time." if equal else "Each cut changes it.",
    ]
    columns = ["cut after, steps", "steps kept", "relative error", "cosine"]
    return Exhibit("bptt", f"Backpropagation through {num_steps} steps, cut", columns, rows, findings)


def _by_autograd(weights: CellWeights, x: Tensor, state: Tensor, wanted: Tensor) -> Tensor:
    """Return the gradient of the squared error by autograd, in the form of `ElmanGradients.flat`."""
    loss = (unrolled(elman, weights, x, (state,))[0] - wanted).square().sum()
    leaves = [weights.of_input, weights.of_state, weights.bias_of_input]
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, leaves)])


def stored_states(
    rounds: int = 1, num_steps: int = 1000, stored: Sequence[int] = (10, 20, 50, 100), hidden: int = 4
) -> Exhibit:
    """Compute the gradients of an LSTM with few stored states, by the plan of the least work, and count."""
    del rounds
    torch.manual_seed(0)
    network = nn.LSTM(2, hidden).double()
    x = torch.randn(num_steps, 1, 2, dtype=torch.float64)
    exact = _plain(network, x)
    kinds: tuple[Kind, ...] = ("internal", "hidden")
    rows = [_counted(network, x, exact, Plan(num_steps, number, kind)) for kind in kinds for number in stored]
    apart = max(row[-1] for row in rows)
    told = "those" if all(row[3] == row[4] for row in rows) else "not those"
    findings = [f"Forward steps are {told} of the dynamic programme, and gradients torch's to {apart:.1g}."]
    few = [row for row in rows if row[0] == "internal" and 20 * row[1] <= num_steps]
    if few:
        _, most, part, _, _, again, more, _ = few[-1]
        findings.append(
            f"With {most} stored states, {part:.3g} of {num_steps:,}, {again:,} forward steps are done again. If a "
            f"backward step takes as long as {_BACKWARD} forward steps, a pass takes {more:.3g} more time."
        )
    columns = ["stored are", "most stored", "part", "forward steps", "by the programme", "done again", "more time"]
    columns.append("difference")
    return Exhibit("recurrent-memory", f"Backpropagation through {num_steps:,} steps", columns, rows, findings)


def _plain(network: nn.LSTM, x: Tensor) -> list[Tensor]:
    loss = network(x)[0].square().sum()
    return list(torch.autograd.grad(loss, list(network.parameters())))


def lstm_step(weights: CellWeights, x: Tensor, number: int, state: State) -> tuple[State, Tensor]:
    """Return the state after a step, and the loss of the step: the sum of the squares of the outputs."""
    state = lstm(weights, x[number], state)
    return state, state[0].square().sum()


def _counted(network: nn.LSTM, x: Tensor, exact: Sequence[Tensor], plan: Plan) -> list[Any]:
    network.zero_grad()
    state = (x.new_zeros(x.shape[1], network.hidden_size),) * 2
    step = partial(lstm_step, CellWeights.of_layer(network), x)
    counted = backpropagate(step, state, network.parameters(), plan)
    found = [each.grad for each in network.parameters()]
    apart = max(float((one - two).abs().max()) for one, two in zip(found, exact, strict=True) if one is not None)
    planned, again = plan.forward_steps(len(x), plan.num_states), counted.forward_steps - len(x)
    more = again / ((1 + _BACKWARD) * len(x))
    part = counted.most_stored / len(x)
    return [plan.kind, counted.most_stored, part, counted.forward_steps, planned, again, more, apart]
