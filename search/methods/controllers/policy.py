"""A policy over choices: an LSTM that reads each answer and predicts the probabilities of the next.

Zoph and Le, "Neural Architecture Search with Reinforcement Learning", ICLR 2017, section 3.1 and figure 2. Every option
of every choice has its own embedding and row of the output layer, created when the option first occurs. So the policy
can answer any program of choices, even if later choices depend on earlier ones.

Answers are drawn with numpy, a choice at a time; gradients are computed with torch, a batch of sequences at a time.
Both share the same memory, in float64, since a replayed search must draw the same to the last bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from orchestray.search.methods.base import rng_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from orchestray.search.methods.controllers.answering import Questions
    from orchestray.search.spaces.architectures.choices import Decision

_RANGE = 0.08
"""Largest initial weight; weights are uniform between -0.08 and 0.08 (Zoph and Le, section 4.1)."""
_CELL, _OPTION = 0, 1
_MOST_ASKED = 4096

State = tuple[np.ndarray, np.ndarray]


class Vocabulary:
    """The row of each option of each choice; row 0 is the policy's first input."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {("", ""): 0}
        self._asked: dict[tuple[str, str], list[int]] = {}
        """Cache of the rows of a choice's options: the same few occur in every trial."""

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, name: str, options: Sequence[Any]) -> list[int]:
        """Return the rows of a choice's options, [options]; new ones are added."""
        asked = (name, repr(options))  # as repr, since 1 and True are equal
        rows = self._asked.get(asked)
        if rows is None:
            rows = [self._rows.setdefault((name, json.dumps(option)), len(self._rows)) for option in options]
            if len(self._asked) < _MOST_ASKED:
                self._asked[asked] = rows
        return rows

    def load(self, names: Sequence[tuple[str, str]]) -> None:
        """Replace the rows by those of these (choice, option) pairs."""
        self._rows = {name: row for row, name in enumerate(names)}
        self._asked.clear()

    @property
    def names(self) -> list[tuple[str, str]]:
        """Choice and option of each row."""
        return list(self._rows)


class Policy:
    """The parameters of the controller by name, and the distribution over answers that they define."""

    def __init__(self, vocabulary: Vocabulary, *, hidden: int = 35, seed: int = 0) -> None:
        """
        Args:
            vocabulary: rows of the options, shared by all controllers of a search.
            hidden: units of the LSTM.
            seed: seed of the weights; those of an option depend on its name too, not on when it first occurs.
        """
        self.vocabulary = vocabulary
        self.hidden = hidden
        self.seed = seed
        rng = rng_of(seed, _CELL)
        self.parameters: dict[str, Tensor] = {
            "cell.input": _uniform(rng, 4 * hidden, hidden),
            "cell.hidden": _uniform(rng, 4 * hidden, hidden),
            "cell.bias": torch.zeros(4 * hidden, dtype=torch.float64),
            "option.input": torch.zeros(0, hidden, dtype=torch.float64),
            "option.output": torch.zeros(0, hidden, dtype=torch.float64),
            "option.bias": torch.zeros(0, dtype=torch.float64),
        }
        self._initial = dict(self.parameters)
        self.grow()

    def grow(self) -> None:
        """Create the rows of new options."""
        have = len(self.parameters["option.bias"])
        if have == len(self.vocabulary):
            return
        names = self.vocabulary.names
        rngs = [rng_of(self.seed, _OPTION, zlib.crc32(f"{name}={option}".encode())) for name, option in names[have:]]
        drawn = torch.stack([_uniform(rng, 2, self.hidden) for rng in rngs])
        added = {"option.input": drawn[:, 0], "option.output": drawn[:, 1], "option.bias": drawn.new_zeros(len(rngs))}
        for name, rows in added.items():
            self.parameters[name] = torch.cat([self.parameters[name], rows])
            self._initial[name] = torch.cat([self._initial[name], rows])

    def adopt(self, learned: Mapping[str, Tensor]) -> None:
        """Move the parameters to what was learned.

        Args:
            learned: difference of each parameter from its initial value. There may be rows of options to come, and none
                of options that have occurred since the last update.
        """
        self.grow()
        self.parameters = {name: _moved(initial, learned[name]) for name, initial in self._initial.items()}

    # -- drawing ---------------------------------------------------------------------------------------------------

    def draw(self, questions: Questions, rng: np.random.Generator, *, greedy: bool = False) -> list[Decision]:
        """Return an answer to every choice, drawn by the policy or, if `greedy`, the most likely one."""
        state: State = (np.zeros(self.hidden), np.zeros(self.hidden))
        fed = 0
        weights: dict[str, NDArray[Any]] = {}

        def pick(name: str, options: Sequence[Any]) -> int:
            nonlocal state, fed, weights
            rows = self.vocabulary.rows(name, options)
            if not weights or len(weights["option.bias"]) < len(self.vocabulary):
                self.grow()
                weights = {key: tensor.numpy() for key, tensor in self.parameters.items()}
            state = _advance(weights, state, fed)
            probabilities = _softmax(weights["option.output"][rows] @ state[0] + weights["option.bias"][rows])
            index = int(probabilities.argmax()) if greedy else _draw(probabilities, rng)
            fed = rows[index]
            return index

        return questions.answer(pick)

    # -- gradients -------------------------------------------------------------------------------------------------

    def log_probabilities(
        self, sequences: Sequence[Sequence[Decision]], parameters: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities of whole sequences of answers, differentiable in the parameters.

        Args:
            sequences: the answers.
            parameters: parameters to use; None: the policy's own.

        Returns:
            Log-probability of each sequence, and the sum of the entropies of its choices; [sequences] each.
        """
        asked = _Padded.of(sequences, self.vocabulary)
        self.grow()
        used = self.parameters if parameters is None else parameters
        outputs = self._outputs(used, asked.fed)
        logits = torch.einsum("bth,btoh->bto", outputs, used["option.output"][asked.options])
        logits = (logits + used["option.bias"][asked.options]).masked_fill(~asked.is_option, float("-inf"))
        logs = torch.log_softmax(logits, dim=-1).masked_fill(~asked.is_option, 0.0)
        entropies = -(logs.exp() * logs * asked.is_option).sum(-1)
        chosen = logs.gather(-1, asked.chosen[..., None])[..., 0]
        return (chosen * asked.is_step).sum(1), (entropies * asked.is_step).sum(1)

    def _outputs(self, used: Mapping[str, Tensor], fed: Tensor) -> Tensor:
        """Return the output of the LSTM before each choice, [sequences, choices, hidden]."""
        inputs = used["option.input"][fed] @ used["cell.input"].T + used["cell.bias"]
        output = cell = inputs.new_zeros(len(fed), self.hidden)
        outputs = []
        for at in range(fed.shape[1]):
            gates = inputs[:, at] + output @ used["cell.hidden"].T
            keep, write, show, new = gates.chunk(4, dim=1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
            output = torch.sigmoid(show) * torch.tanh(cell)
            outputs.append(output)
        return torch.stack(outputs, dim=1)


def _moved(initial: Tensor, learned: Tensor) -> Tensor:
    """Return the initial rows, each plus what was learned of it, if anything was."""
    moved, num_rows = initial.clone(), min(len(initial), len(learned))
    moved[:num_rows] += learned[:num_rows]
    return moved


class _Padded:
    """Sequences of answers as tensors, padded to the longest sequence and the most options."""

    def __init__(self, num_sequences: int, num_steps: int, num_options: int) -> None:
        self.fed = torch.zeros(num_sequences, num_steps, dtype=torch.long)
        """Row of the answer before each choice."""
        self.options = torch.zeros(num_sequences, num_steps, num_options, dtype=torch.long)
        self.is_option = torch.zeros(num_sequences, num_steps, num_options, dtype=torch.bool)
        self.chosen = torch.zeros(num_sequences, num_steps, dtype=torch.long)
        self.is_step = torch.zeros(num_sequences, num_steps, dtype=torch.float64)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[Decision]], vocabulary: Vocabulary) -> _Padded:
        longest = max(len(sequence) for sequence in sequences)
        most = max(len(one.options) for sequence in sequences for one in sequence)
        made = cls(len(sequences), longest, most)
        made.is_option[:, :, 0] = True  # a softmax over no option is NaN, even where nothing is chosen
        for index, sequence in enumerate(sequences):
            rows = [vocabulary.rows(one.name, one.options) for one in sequence]
            steps = len(sequence)
            made.fed[index, 1:steps] = torch.tensor(
                [row[one.index] for row, one in zip(rows, sequence, strict=True)][:-1], dtype=torch.long
            )
            made.options[index, :steps] = torch.tensor([row + [0] * (most - len(row)) for row in rows])
            made.is_option[index, :steps] = torch.tensor([[at < len(row) for at in range(most)] for row in rows])
            made.chosen[index, :steps] = torch.tensor([one.index for one in sequence])
            made.is_step[index, :steps] = 1.0
        return made


def policy_gradient(
    policy: Policy,
    sequences: Sequence[Sequence[Decision]],
    advantages: Sequence[float],
    *,
    entropy_weight: float = 0.0,
) -> dict[str, Tensor]:
    """Return an estimate of the gradient of the expected reward, from answers drawn from the policy.

    REINFORCE (Williams, 1992): the mean over the sequences of (reward - baseline) times the gradient of the log of
    their probability (Zoph and Le, section 3.2).

    Args:
        policy: policy with the parameters with which the answers were drawn.
        sequences: the answers.
        advantages: reward minus baseline of each sequence.
        entropy_weight: added reward for each nat of entropy.
    """
    for sequence in sequences:
        for one in sequence:
            policy.vocabulary.rows(one.name, one.options)
    policy.grow()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in policy.parameters.items()}
    logs, entropies = policy.log_probabilities(sequences, leaves)
    weights = torch.tensor(list(advantages), dtype=torch.float64)
    objective = (weights * logs + entropy_weight * entropies).mean()
    return dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True))


def _uniform(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(-_RANGE, _RANGE, shape))


def _advance(weights: Mapping[str, NDArray[Any]], state: State, fed: int) -> State:
    """Return the next state of the LSTM: output and cell, each [hidden]."""
    hidden = len(state[0])
    gates = weights["cell.input"] @ weights["option.input"][fed] + weights["cell.hidden"] @ state[0]
    gates += weights["cell.bias"]
    opened = 1.0 / (1.0 + np.exp(-gates[: 3 * hidden]))
    cell = opened[:hidden] * state[1] + opened[hidden : 2 * hidden] * np.tanh(gates[3 * hidden :])
    return opened[2 * hidden :] * np.tanh(cell), cell


def _softmax(logits: NDArray[Any]) -> NDArray[Any]:
    raised = np.exp(logits - logits.max())
    return np.asarray(raised / raised.sum())


def _draw(probabilities: NDArray[Any], rng: np.random.Generator) -> int:
    place = int(probabilities.cumsum().searchsorted(rng.random(), side="right"))
    return min(place, len(probabilities) - 1)
