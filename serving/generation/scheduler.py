"""Which tokens go through the model in the next step: iteration-level scheduling.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, section 3.1:
requests join and leave between steps of the model, not between batches. Prompts are read in pieces that share a step
with the requests that are being answered (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
Sarathi-Serve", OSDI 2024, section 4): a long prompt delays the others by no more than the budget of a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from orchestray.serving.generation.blocks import BLOCK_SIZE, BlockPool, blocks_for
from orchestray.serving.generation.request import Request


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one request that go through the model in a step."""

    request: Request
    tokens: Sequence[int]
    position: int
    """Of the first, counted from where the model begins to see."""
    blocks: Sequence[int]
    """Where the request's keys and values are."""
    is_last: bool
    """Whether the step gives the request's next token."""


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
        """The requests that it gives a token, in the order of the decoder's logits."""
        return [piece.request for piece in (*self.reading, *self.answering) if piece.is_last]


class Scheduler:
    """Admits requests while there are blocks for all that they may need, so that none is ever put out again.

    Args:
        pool: of the model's blocks.
        max_sequences: requests that are answered at once, at most.
        token_budget: tokens of a step, at most; prompts get what the requests being answered leave, in whole blocks.
        continuous: False admits nobody until all are done: static batching, to compare with.
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
        """The most urgent first; among equals, the one that came first."""
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda each: (-each.priority, each.number))

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is; its blocks are free at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._pool.give_back(request.blocks)

    def forget_cached(self) -> None:
        """All keys and values are gone: who runs is read from where the model begins to see."""
        for request in self.running:
            request.num_cached, request.num_read = 0, len(request.tokens)

    def plan(self) -> Step:
        """The next step; empty where nobody is left. Pieces count as computed from then on."""
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
