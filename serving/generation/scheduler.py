"""Iteration-level scheduling: the choice of the tokens that go through the model in the next step.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, section 3.1:
requests join and leave between steps of the model, not between batches. Prompts are read in pieces that share a step
with the requests that are being answered. So a long prompt delays the others by no more than the budget of a step.
(Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, section 4.)

The memory of keys and values is lent in blocks of a few tokens. Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", 2023, section 4: the blocks of a request may be anywhere, so that no memory
is lost between requests of different length.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from orchestray.serving.generation.request import Request

BLOCK_SIZE = 16
"""Number of tokens whose keys and values are in one block."""


class BlockPool:
    """The pool of free blocks. Block 0 is never lent: padding rows of a batch write there.

    Args:
        num_blocks: number of blocks that can be lent.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"there must be at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, count: int) -> list[int] | None:
        """Return `count` blocks, or None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Take blocks back and empty the list, so that they cannot be given back twice."""
        self._free += reversed(blocks)
        blocks.clear()


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one request that go through the model in a step."""

    request: Request
    tokens: Sequence[int]
    position: int
    """Position of the first token, counted from the request's `start`."""
    blocks: Sequence[int]
    """Blocks with the request's keys and values."""
    is_last: bool
    """True if the step gives the request's next token."""


@dataclass(frozen=True)
class Step:
    """The pieces of one step: those of prompts, and single tokens of requests that are being answered."""

    reading: Sequence[Piece]
    answering: Sequence[Piece]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.reading) + len(self.answering)

    @property
    def answered(self) -> list[Request]:
        """Requests that get a token, in the order of the decoder's logits."""
        return [piece.request for piece in (*self.reading, *self.answering) if piece.is_last]


class Scheduler:
    """A scheduler that admits requests while there are blocks for all that they may need, so that none is evicted.

    Args:
        pool: pool of the model's blocks.
        max_sequences: largest number of requests that are answered at once.
        token_budget: largest number of tokens in a step; prompts get what the requests being answered leave, in whole
            blocks.
        continuous: False admits no request until all are done: static batching, for comparison.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, token_budget: int, continuous: bool = True) -> None:
        if max_sequences < 1:
            raise ValueError(f"there must be room for one request, got {max_sequences}")
        if token_budget < max_sequences + BLOCK_SIZE:
            raise ValueError(
                f"the budget of a step must leave a block of {BLOCK_SIZE} tokens beside the {max_sequences} requests "
                f"that are answered at once, got {token_budget}"
            )
        self._pool = pool
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._continuous = continuous
        self.waiting: list[Request] = []
        """Waiting requests, the most urgent first; equal ones in the order of arrival."""
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda each: (-each.priority, each.number))

    def remove(self, request: Request) -> None:
        """Remove a request, waiting or running; its blocks are free at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._pool.give_back(request.blocks)

    def forget_cached(self) -> None:
        """Note that all keys and values are lost: running requests are read again from their start."""
        for request in self.running:
            request.num_cached, request.num_read = 0, len(request.tokens)

    def plan(self) -> Step:
        """Return the next step, empty without requests. Its pieces count as computed from then on."""
        self._admit()
        answering: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            request.look_back()
            is_answering = request.start + request.num_cached >= request.num_read
            (answering if is_answering else prompts).append(request)
        left = self._token_budget - len(answering)
        pieces = []
        for request in prompts:
            size = min(request.num_seen - request.num_cached, left // BLOCK_SIZE * BLOCK_SIZE)
            if size <= 0:
                break
            pieces.append(_piece(request, size))
            left -= blocks_for(size) * BLOCK_SIZE
        return Step(pieces, [_piece(request, 1) for request in answering])

    def _admit(self) -> None:
        if self.running and not self._continuous:
            return
        while self.waiting and len(self.running) < self._max_sequences:
            blocks = self._pool.lend(blocks_for(self.waiting[0].most_cached))
            if blocks is None:
                return  # in turn: a short request must not keep a long one waiting for ever
            request = self.waiting.pop(0)
            request.blocks = blocks
            self.running.append(request)


def _piece(request: Request, size: int) -> Piece:
    begin = request.start + request.num_cached
    piece = Piece(
        request,
        request.tokens[begin : begin + size],
        request.num_cached,
        tuple(request.blocks),
        begin + size == len(request.tokens),
    )
    request.num_cached += size
    return piece
