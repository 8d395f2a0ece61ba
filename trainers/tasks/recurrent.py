"""A recurrent language model, whose state may go on from batch to batch: truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CELLS: Mapping[str, Callable[..., nn.RNNBase]] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentModel(nn.Module):
    """A network from tokens [samples, time] (int64) to logits [samples, time, vocabulary].

    With streams, a sample in training goes on where the last sample of its stream ended: with the state, and without
    its gradient. In evaluation every sample begins with a state of zeros.

    Attributes:
        carried: states after the last sample of each stream, [streams, layers * tensors of a state * width].
        buffers_by_row: buffers of which each sample changes the row of its stream alone.
    """

    carried: Tensor

    def __init__(
        self,
        cell: str,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        dropout: float = 0.0,
        streams: int | None = None,
        bptt: int | None = None,
    ) -> None:
        """
        Args:
            cell: a name of `CELLS`.
            vocabulary: number of tokens.
            width: width of the embedding and of the states.
            depth: number of layers.
            dropout: probability of dropping a number before and after the recurrent layers.
            streams: number of streams; None: every sample begins afresh.
            bptt: number of time steps after which gradients end; None: at the beginning of a sample.
        """
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.input_dropout = nn.Dropout(dropout)
        self.layers = CELLS[cell](width, width, depth, batch_first=True)
        self.output_dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)
        self._num_states = 2 if cell == "lstm" else 1
        self._bptt = bptt
        self.buffers_by_row = ("carried",)
        rows = torch.zeros(streams, depth * self._num_states * width) if streams else None
        self.register_buffer("carried", rows, persistent=False)

    def run_report(self) -> dict[str, int]:
        """Return the number of streams whose state this worker has `carried` to the next batch; empty without any."""
        carried = self._buffers["carried"]
        num_carried = 0 if carried is None else int(carried.any(dim=1).sum())
        return {"carried": num_carried} if num_carried else {}

    def forward(self, tokens: Tensor, stream: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
        """Return logits.

        Args:
            tokens: tokens [samples, time].
            stream: number of the stream of each sample, [samples], each once; None: samples begin afresh.
            begins: True for samples with which a stream begins, [samples].
        """
        x = self.input_dropout(self.tokens(tokens))
        goes_on = self.training and stream is not None and begins is not None and self.carried is not None
        state = self._unpacked(self.carried[stream] * ~begins[:, None]) if goes_on else None  # type: ignore[index]
        outputs = []
        for part in x.split(self._bptt or x.shape[1], dim=1):
            found, state = self.layers(part, state)
            outputs.append(found)
            state = _detached(state)
        if goes_on:
            self.carried[stream] = self._packed(state).to(self.carried.dtype)
        logits: Tensor = self.head(self.output_dropout(torch.cat(outputs, dim=1)))
        return logits

    def _packed(self, state: Any) -> Tensor:
        """Return the tensors of a state, [layers, samples, width] each, as a row for each sample."""
        tensors = state if self._num_states > 1 else (state,)
        return torch.cat([tensor.transpose(0, 1).flatten(1) for tensor in tensors], dim=1)

    def _unpacked(self, rows: Tensor) -> Any:
        parts = rows.reshape(len(rows), self._num_states, self.layers.num_layers, self.layers.hidden_size)
        tensors = tuple(part.transpose(0, 1).contiguous() for part in parts.unbind(1))
        return tensors if self._num_states > 1 else tensors[0]


def _detached(state: Any) -> Any:
    return tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()
