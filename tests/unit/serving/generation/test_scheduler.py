"""The plan of a step: within its budget, in order, and never more than the cache holds."""

from __future__ import annotations

import random

import pytest

from orchestray.serving.generation.request import Request
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.scheduler import BLOCK_SIZE, BlockPool, Scheduler, Step, blocks_for

CONTEXT = 96


def advance(scheduler: Scheduler, step: Step) -> None:
    """Do what the engine does after a step, with some token."""
    for piece in (*step.reading, *step.answering):
        if piece.is_last:
            piece.request.tokens.append(7)
            if piece.request.num_generated == piece.request.sampling.max_tokens:
                scheduler.remove(piece.request)


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_every_step_keeps_the_budget_and_the_cache_and_every_request_gets_all_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    pool, budget, most = BlockPool(20), 48, 6
    scheduler = Scheduler(pool, max_sequences=most, token_budget=budget)
    requests = [
        Request([1] * rng.randrange(1, 150), Sampling(max_tokens=rng.randrange(1, 150)), CONTEXT, number)
        for number in range(30)
    ]
    for request in requests:
        scheduler.add(request)
    begun: list[Request] = []
    while (step := scheduler.plan()).num_tokens:
        rows = sum(blocks_for(len(piece.tokens)) * BLOCK_SIZE for piece in step.reading) + len(step.answering)
        assert rows <= budget
        assert len(scheduler.running) <= most
        held = [block for request in scheduler.running for block in request.blocks]
        assert len(held) == len(set(held)) == pool.num_blocks - pool.num_free
        for piece in (*step.reading, *step.answering):
            assert piece.position + len(piece.tokens) <= len(piece.blocks) * BLOCK_SIZE
            assert piece.position + len(piece.tokens) <= CONTEXT
        # Whoever is being answered gets a token in every step: a long prompt delays nobody.
        assert len(step.answering) == sum(
            request.start + request.num_cached > request.num_read for request in scheduler.running
        )
        begun += [request for request in scheduler.running if request not in begun]
        advance(scheduler, step)
    assert [request.num_generated for request in requests] == [request.sampling.max_tokens for request in requests]
    assert begun == requests
    assert pool.num_free == pool.num_blocks


def test_a_prompt_is_read_in_whole_blocks_beside_those_that_are_answered() -> None:
    scheduler = Scheduler(BlockPool(100), max_sequences=2, token_budget=40)
    scheduler.add(Request([1], Sampling(max_tokens=50), CONTEXT, 1))
    advance(scheduler, scheduler.plan())
    scheduler.add(Request([2] * 70, Sampling(max_tokens=1), CONTEXT, 2))
    sizes = []
    for _ in range(3):
        step = scheduler.plan()
        assert len(step.answering) == 1
        sizes += [(piece.position, len(piece.tokens), piece.is_last) for piece in step.reading]
        advance(scheduler, step)
    assert sizes == [(0, 32, False), (32, 32, False), (64, 6, True)]


def test_requests_are_admitted_while_there_are_blocks_for_all_they_may_need() -> None:
    pool = BlockPool(10)
    scheduler = Scheduler(pool, max_sequences=8, token_budget=64)
    for number, num_tokens in enumerate((49, 64, 33, 16)):  # 4, 4, 3 and 1 blocks
        scheduler.add(Request([1] * 16, Sampling(max_tokens=num_tokens - 15), CONTEXT, number))
    scheduler.plan()
    assert [request.number for request in scheduler.running] == [0, 1]  # nobody goes before the one that does not fit
    scheduler.remove(scheduler.running[0])
    scheduler.plan()
    assert [request.number for request in scheduler.running] == [1, 2, 3]
    assert pool.num_free == 10 - 8


def test_blocks_cannot_be_given_back_twice() -> None:
    pool = BlockPool(3)
    blocks = pool.lend(2)
    assert blocks is not None
    assert pool.lend(2) is None
    pool.give_back(blocks)
    pool.give_back(blocks)
    assert pool.num_free == 3
    assert sorted(pool.lend(3) or []) == [1, 2, 3]


def test_a_budget_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="must leave a block of 16 tokens"):
        Scheduler(BlockPool(4), max_sequences=32, token_budget=40)
