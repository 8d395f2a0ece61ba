"""A decoder-only transformer with a KV cache, for steps in which requests are at different positions.

Rows of a step go through the fully connected layers together and through attention by request ("selective batching": Yu
et al., "Orca", OSDI 2022, section 3.2). A row's result must be bit-identical whatever rows are beside it. Otherwise a
request's answer would depend on the other requests. On most machines matrix products do depend on the number of rows,
if that is small. So rows are padded to sizes for which a probe has shown that they do not (`row_sizes`). For the same
reason keys are always read in whole blocks, and prompts in blocks of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.serving.generation.scheduler import BLOCK_SIZE, Piece, Step, blocks_for
from orchestray.serving.models.quantize import Int8Linear
from orchestray.trainers.tasks.transformer import Block, Embedding

_LINEAR = (nn.Linear, Int8Linear)
_SHORT = 256 // BLOCK_SIZE
"""Number of blocks of keys up to which all are read in one product, whatever a row needs of them."""


class Decoder(Protocol):
    """The interface of a model for the engine. Called from one thread at a time."""

    context: int
    """Largest number of tokens that the model looks back at."""
    vocabulary_size: int
    num_blocks: int
    """Number of cache blocks that can be lent: 1 to `num_blocks`."""

    def step(self, step: Step) -> Tensor:
        """Return logits [pieces with `is_last`, vocabulary], those of `reading` first."""
        ...


class TransformerDecoder:
    """The `Decoder` of an `nn.Sequential` of Embedding, Blocks, normalisation and output layer, as in `python_source`.

    Args:
        model: trained model; is put in evaluation mode and otherwise left alone.
        max_rows: largest number of rows in a step: the token budget.
        max_sequences: requests that are answered at once.
        num_blocks: blocks of the cache; default: for `max_sequences` requests that use the whole context.
        precision: `float32` (unchanged) or `bfloat16` (autocast; keys and values have the dtype of the model's
            weights).

    Raises:
        ConfigError: the model has another structure.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rows: int = 256,
        max_sequences: int = 32,
        num_blocks: int | None = None,
        precision: str = "float32",
    ) -> None:
        self._embedding, self._blocks, self._norm, self._output = _parts(model)
        model.eval()
        self.context = self._embedding.positions.num_embeddings
        self.vocabulary_size = self._output.out_features
        self.num_blocks = num_blocks or max_sequences * blocks_for(self.context)
        if self.num_blocks < blocks_for(self.context):
            raise ConfigError(
                f"The cache has {self.num_blocks} blocks of {BLOCK_SIZE} tokens, too few for one request that uses the "
                f"context of {self.context}: wanted at least {blocks_for(self.context)}."
            )
        weight = self._embedding.tokens.weight
        self._device = weight.device
        self._autocast = precision == "bfloat16"
        first = self._blocks[0]
        shape = (self.num_blocks + 1, BLOCK_SIZE, first.heads, first.head_width)
        self._keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in self._blocks]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self.row_sizes = _candidates(max_rows)
        """Numbers of rows that are computed; a step with fewer is padded to the next."""
        self.row_sizes = [size for size in self.row_sizes if self._agrees(size)]

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    @torch.inference_mode()
    def step(self, step: Step) -> Tensor:
        """Compute the logits of a step (see `Decoder.step`)."""
        rows = _Rows(step, self._size_for(_count_rows(step)), self._device)
        with self._precision():
            x = self._embedding.tokens(rows.tokens) + self._embedding.positions.weight[rows.positions]
            for block, keys, values in zip(self._blocks, self._keys, self._values, strict=True):
                x = _through(block, x, keys, values, rows)
            last = self._padded(x[rows.last])
            logits: Tensor = self._output(self._norm(last))[: len(rows.last)]
        return logits.to(x.dtype)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast)

    def _padded(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, self._size_for(len(x)) - len(x)))

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self.row_sizes if size >= num_rows)

    @torch.inference_mode()
    def _agrees(self, size: int) -> bool:
        """Return True if every layer gives a row the same bits among `size` rows as among the largest number."""
        generator = torch.Generator().manual_seed(0)
        layers = [layer for block in self._blocks[:1] for layer in block.modules() if isinstance(layer, _LINEAR)]
        with self._precision():
            for layer in [*layers, self._output]:
                # Drawn in fewer bits than the computation has, products would be exact, and their order would not
                # matter.
                dtype = self._keys[0].dtype
                inputs = torch.randn(self.row_sizes[-1], layer.in_features, generator=generator, dtype=dtype)
                inputs = inputs.to(self._device)
                if not torch.equal(layer(inputs[:size].clone()), layer(inputs)[:size]):
                    return False
        return True


def _parts(model: nn.Module) -> tuple[Embedding, list[Block], nn.Module, nn.Linear | Int8Linear]:
    layers = list(model.children())
    if isinstance(model, nn.Sequential) and len(layers) >= 4:
        embedding, *blocks, norm, output = layers
        if isinstance(embedding, Embedding) and isinstance(norm, nn.LayerNorm) and isinstance(output, _LINEAR):
            known = [block for block in blocks if isinstance(block, Block)]
            if len(known) == len(blocks):
                return embedding, known, norm, output
    raise ConfigError(
        "Text is generated by models of the task python_source, or of a task whose model is an nn.Sequential of its "
        "layers: Embedding, Blocks, LayerNorm, Linear. This one is built otherwise; give the task a method "
        "decoder(model, max_rows, max_sequences)."
    )


def _candidates(max_rows: int) -> list[int]:
    """Return 16, 32, 48, 64, 96, 128, 192, ...: at most one and a half times the rows that are needed."""
    most = blocks_for(max_rows) * BLOCK_SIZE
    sizes, power = [], BLOCK_SIZE
    while power < most:
        sizes += [power, power + power // 2] if power > BLOCK_SIZE else [power]
        power *= 2
    return [*(size for size in sizes if size < most), most]


def _count_rows(step: Step) -> int:
    reading = sum(blocks_for(len(piece.tokens)) for piece in step.reading)
    return reading * BLOCK_SIZE + len(step.answering)


def _through(block: Block, x: Tensor, keys: Tensor, values: Tensor, rows: _Rows) -> Tensor:
    """Pass rows [rows, width] through a block, and store their keys and values."""
    projected = block.query_key_value(block.attention_norm(x))
    query, key, value = projected.view(len(x), 3, block.heads, block.head_width).unbind(1)
    keys.view(-1, block.heads, block.head_width)[rows.places] = key.to(keys.dtype)
    values.view(-1, block.heads, block.head_width)[rows.places] = value.to(values.dtype)
    mixed = torch.zeros_like(x)
    for group in rows.groups:
        mixed[group.rows] = group.attend(query[group.rows], keys, values).to(mixed.dtype)
    x = x + block.attention_output(mixed)
    hidden = nn.functional.gelu(block.feed_forward_input(block.feed_forward_norm(x)))
    output: Tensor = x + block.feed_forward_output(hidden)
    return output


class _Group:
    """Rows whose attention is computed together, `size` of each request: keys and values in the blocks of `tables`."""

    def __init__(self, rows: Tensor, size: int, positions: Tensor, tables: Tensor) -> None:
        self.rows = rows
        self._size = size
        self._tables = tables
        seen = torch.arange(tables.shape[1] * BLOCK_SIZE, device=tables.device)
        self._mask = (seen <= positions[rows].view(-1, size, 1))[:, None]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute attention: [rows, heads, head width] to [rows, width]."""
        _, heads, head_width = query.shape
        query = query.reshape(-1, self._size, heads, head_width).transpose(1, 2)
        held = [kept[self._tables].flatten(1, 2).transpose(1, 2).to(query.dtype) for kept in (keys, values)]
        mixed = nn.functional.scaled_dot_product_attention(query, held[0], held[1], attn_mask=self._mask)
        return mixed.transpose(1, 2).reshape(-1, heads * head_width)


class _Rows:
    """A step as indices: prompts in blocks of 16 rows, then a row for each request that is answered, then padding."""

    def __init__(self, step: Step, size: int, device: torch.device) -> None:
        tokens = np.zeros(size, dtype=np.int64)
        positions = np.zeros(size, dtype=np.int64)
        places = np.zeros(size, dtype=np.int64)  # of padding: in block 0
        last: list[int] = []
        begin = 0
        for pieces, unit in ((step.reading, BLOCK_SIZE), (step.answering, 1)):
            for piece in pieces:
                end = begin + len(piece.tokens)
                tokens[begin:end] = piece.tokens
                positions[begin:end] = np.arange(piece.position, piece.position + len(piece.tokens))
                places[begin:end] = _places(piece)
                if piece.is_last:
                    last.append(end - 1)
                begin += -(-len(piece.tokens) // unit) * unit
        self.tokens, self.positions, self.places = (
            torch.from_numpy(array).to(device) for array in (tokens, positions, places)
        )
        self.last = torch.tensor(last, dtype=torch.int64, device=device)
        self.groups = self._grouped(step, device)

    def _grouped(self, step: Step, device: torch.device) -> list[_Group]:
        """Group rows by the number that a request has, and by how far back they look."""
        found: dict[tuple[int, int], tuple[list[int], list[Sequence[int]]]] = {}
        row = 0
        for pieces, unit in ((step.reading, BLOCK_SIZE), (step.answering, 1)):
            for piece in pieces:
                for offset in range(0, len(piece.tokens), unit):
                    held = piece.blocks[: (piece.position + offset) // BLOCK_SIZE + 1]
                    rows, tables = found.setdefault((unit, _reach(len(held), unit)), ([], []))
                    rows.append(row)
                    tables.append(held)
                    row += unit
        return [
            _Group(
                torch.tensor(rows, device=device)[:, None].add(torch.arange(unit, device=device)).flatten(),
                unit,
                self.positions,
                _tables(tables, reach, device),
            )
            for (unit, reach), (rows, tables) in found.items()
        ]


def _reach(num_blocks: int, unit: int) -> int:
    """Return the number of blocks read if `unit` rows look back at `num_blocks`; 0: as many as any in the group needs.

    Keys beyond those of a row add zeros to its sums. But a product may be summed in parts, whose boundaries depend on
    the number of keys. For one row and few keys it is not. For a block of rows some machines (AMD's) do so even with
    few keys.
    """
    return 0 if unit == 1 and num_blocks <= _SHORT else -(-num_blocks // _SHORT) * _SHORT


def _places(piece: Piece) -> Any:
    """Return the positions of a piece's keys and values in the cache, counted in tokens."""
    if len(piece.tokens) == 1:
        return piece.blocks[piece.position // BLOCK_SIZE] * BLOCK_SIZE + piece.position % BLOCK_SIZE
    at = np.arange(piece.position, piece.position + len(piece.tokens))
    return np.asarray(piece.blocks, dtype=np.int64)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE


def _tables(blocks: Sequence[Sequence[int]], reach: int, device: torch.device) -> Tensor:
    """Return the block tables [requests, blocks], padded with block 0."""
    table = np.zeros((len(blocks), reach or max(map(len, blocks))), dtype=np.int64)
    for row, held in enumerate(blocks):
        table[row, : len(held)] = held
    return torch.from_numpy(table).to(device)
