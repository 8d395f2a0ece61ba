"""The engine: answers are the model's own, whatever else is served, and what is over holds nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.serving.batching import BatchListener
from orchestray.serving.batching.errors import (
    BatcherClosedError,
    BatchFunctionError,
    DeadlineError,
    QueueFullError,
    RunTimeoutError,
)
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.generation import MOST_UNREAD, Generation, Output
from orchestray.serving.generation.request import Request
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.scheduler import Step
from orchestray.serving.generation.text import ByteVocabulary
from orchestray.serving.models.errors import InputError
from support.generation import engine_of, plain_logits, small_model, tokens_of
from support.patience import PATIENCE_S

CONTEXT = 40
MODEL = small_model(context=CONTEXT, depth=1)
HANGS_S = 60.0
"""Time after which a step is given up, on the clock of the loop: what hangs puts that forward."""


class HastyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is put forward by a step that hangs: nobody waits for its time to be over."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    async def pass_over(self, seconds: float) -> None:
        """Put the clock forward, and let what has waited for that time go on."""
        self._ahead_s += seconds
        for _ in range(10):
            await asyncio.sleep(0)

    @staticmethod
    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=HastyLoop) as runner:
            runner.run(asyncio.wait_for(main, PATIENCE_S))


def pass_over(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Do so in another thread, and return when it is done."""
    assert isinstance(loop, HastyLoop)
    asyncio.run_coroutine_threadsafe(loop.pass_over(seconds), loop).result(PATIENCE_S)


def asked(seed: int, num_requests: int = 12) -> list[tuple[list[int], Sampling]]:
    """Return prompts shorter and longer than a block and than the context, half of them with random draws."""
    rng = random.Random(seed)
    lengths = (1, 15, 16, 17, 33, CONTEXT, CONTEXT + 9)
    return [
        (
            [rng.randrange(256) for _ in range(rng.choice(lengths))],
            Sampling(
                max_tokens=rng.randrange(1, 16),
                temperature=0.9 * (number % 2),
                top_k=rng.choice((0, 5)),
                seed=number,
            ),
        )
        for number in range(num_requests)
    ]


async def answers(requests: list[tuple[list[int], Sampling]], **settings: int) -> list[list[int]]:
    async with engine_of(MODEL, **settings) as engine:
        return await asyncio.gather(*(tokens_of(engine, *request) for request in requests))


@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_is_the_same_bits_alone_and_among_others(seed: int) -> None:
    requests = asked(seed)

    async def one_at_a_time() -> list[list[int]]:
        async with engine_of(MODEL) as engine:
            return [await tokens_of(engine, *request) for request in requests]

    alone = asyncio.run(one_at_a_time())
    assert asyncio.run(answers(requests)) == alone
    assert asyncio.run(answers(requests, max_sequences=3, token_budget=32, num_blocks=5)) == alone


def test_greedy_tokens_are_the_likeliest_of_the_model_itself() -> None:
    requests = [(prompt, Sampling(max_tokens=sampling.max_tokens)) for prompt, sampling in asked(4)]
    for (prompt, _), answer in zip(requests, asyncio.run(answers(requests)), strict=True):
        told = list(prompt)
        for token in answer:
            if len(told) > CONTEXT:
                break
            logits = plain_logits(MODEL, told)
            assert float(logits.max() - logits[token]) < 1e-4
            told.append(token)


def test_a_model_that_looks_beyond_its_context_sees_the_last_tokens() -> None:
    prompt = list(b"def f(x):\n    return x")

    async def generate() -> list[int]:
        async with engine_of(MODEL) as engine:
            return await tokens_of(engine, prompt, Sampling(max_tokens=2 * CONTEXT))

    answer = asyncio.run(generate())
    assert len(answer) == 2 * CONTEXT
    told = list(prompt)
    for token in answer:
        beyond = max(0, len(told) - CONTEXT)
        start = -(-beyond // (CONTEXT // 2)) * (CONTEXT // 2)
        logits = plain_logits(MODEL, told[start:])
        assert float(logits.max() - logits[token]) < 1e-4
        told.append(token)


def test_requests_join_and_leave_between_steps() -> None:
    """Begin and end short answers while a long one is made; with static batching they wait for it."""

    async def steps(continuous: bool) -> tuple[int, list[int]]:
        async with engine_of(MODEL, max_sequences=2, continuous=continuous) as engine:
            finished: list[int] = []

            async def short() -> None:
                await tokens_of(engine, "x", Sampling(max_tokens=5))
                finished.append(long.num_tokens)

            long = engine.generate("y", Sampling(max_tokens=60))
            await asyncio.gather(short(), short(), short(), long.text())
            return engine.stats.num_steps, finished

    num_steps, finished = asyncio.run(steps(True))
    assert num_steps == 60
    assert max(finished) <= 20
    num_steps, finished = asyncio.run(steps(False))
    assert num_steps == 60 + 5 + 5
    assert finished == [60, 60, 60]


def test_a_cancelled_request_gives_back_its_blocks_at_once_and_the_others_go_on() -> None:
    async def main() -> None:
        async with engine_of(MODEL, num_blocks=3, max_sequences=4) as engine:
            first = engine.generate("a" * 10, Sampling(max_tokens=30))
            await anext(first)
            second = engine.generate("b" * 10, Sampling(max_tokens=30))
            assert engine.stats.num_free_blocks == 0
            assert engine.stats.num_waiting == 1
            first.cancel()
            assert engine.stats.num_free_blocks == 3
            assert first.finish_reason == "cancelled"
            assert len([output async for output in second]) == 30
            assert engine.stats.num_free_blocks == 3
            assert [output async for output in first] == []

    asyncio.run(main())


def test_an_aborted_iteration_cancels_the_request() -> None:
    async def main() -> None:
        async with engine_of(MODEL) as engine:
            first = engine.generate("b", Sampling(max_tokens=1))
            generations = [engine.generate("a", Sampling(max_tokens=10_000)) for _ in range(12)]
            tasks = [asyncio.create_task(generation.text()) for generation in generations]
            await first.text()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            stats = engine.stats
            assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)

    asyncio.run(main())


def test_a_deadline_fails_who_waits_with_503_and_who_runs_with_504() -> None:
    async def main() -> None:
        async with engine_of(MODEL, max_sequences=1) as engine:
            now_s = asyncio.get_running_loop().time
            runs = engine.generate("a", Sampling(max_tokens=100_000), deadline_s=now_s() + 0.2)
            waits = engine.generate("b", Sampling(max_tokens=1), deadline_s=now_s() + 0.1)
            with pytest.raises(DeadlineError) as late:
                await waits.text()
            assert late.value.retry_after_s is not None
            with pytest.raises(DeadlineError) as passed:
                await runs.text()
            assert passed.value.retry_after_s is None
            with pytest.raises(DeadlineError):
                engine.generate("c", deadline_s=now_s())
            assert await engine.generate("d", Sampling(max_tokens=2)).text() is not None

    asyncio.run(main())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def main() -> None:
        async with engine_of(MODEL, max_sequences=1, max_queue=2) as engine:
            await engine.generate("a", Sampling(max_tokens=2)).text()
            waiting = [engine.generate("a", Sampling(max_tokens=50)) for _ in range(2)]
            with pytest.raises(QueueFullError) as refused:
                engine.generate("a")
            assert refused.value.retry_after_s > 0
            await asyncio.gather(*(each.text() for each in waiting))

    asyncio.run(main())


def test_the_more_urgent_goes_first() -> None:
    async def main() -> None:
        async with engine_of(MODEL, max_sequences=1) as engine:
            order: list[str] = []

            async def ask(name: str, priority: int) -> None:
                await engine.generate("a", Sampling(max_tokens=3), priority=priority).text()
                order.append(name)

            await asyncio.gather(ask("low", -1), ask("usual", 0), ask("usual, later", 0), ask("high", 1))
            assert order == ["high", "usual", "usual, later", "low"]

    asyncio.run(main())


class Failing:
    """A decoder whose n-th step raises, and whose answer to a prompt of 13s is not a number."""

    context, vocabulary_size, num_blocks = 16, 256, 8

    def __init__(self, failing_step: int) -> None:
        self._left = failing_step

    def step(self, step: Step) -> Tensor:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("out of memory")
        pieces = [piece for piece in (*step.reading, *step.answering) if piece.is_last]
        logits = torch.zeros(len(pieces), 256)
        logits[[13 in piece.tokens for piece in pieces]] = torch.nan
        return logits


def test_a_step_that_fails_fails_its_requests_and_no_later_ones() -> None:
    async def main() -> None:
        engine = Engine(Failing(2), max_sequences=4, token_budget=32)
        first = await asyncio.gather(
            *(engine.generate("a", Sampling(max_tokens=3)).text() for _ in range(3)), return_exceptions=True
        )
        assert [type(error) for error in first] == [BatchFunctionError] * 3
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        assert engine.stats.num_free_blocks == 8
        await engine.close()

    asyncio.run(main())


class Miscounting(Failing):
    """A decoder whose first step gives some rows more, or fewer, than it was asked for."""

    def __init__(self, surplus: int) -> None:
        super().__init__(0)
        self._surplus = surplus

    def step(self, step: Step) -> Tensor:
        num_rows = len(super().step(step)) + self._surplus
        self._surplus = 0
        return torch.zeros(num_rows, 256)


@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_decoder_that_gives_too_few_or_too_many_rows_fails_that_step_and_no_later_one(surplus: int) -> None:
    async def main() -> None:
        engine = Engine(Miscounting(surplus), max_sequences=4, token_budget=64)
        asked = [engine.generate("a", Sampling(max_tokens=3)).text() for _ in range(3)]
        first = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in first] == [BatchFunctionError] * 3
        assert f"logits of shape [{3 + surplus}, 256]: wanted two dimensions, with a row for each of 3" in str(first[0])
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_an_answer_that_is_no_number_fails_that_request_alone() -> None:
    async def main() -> None:
        engine = Engine(Failing(0), max_sequences=4, token_budget=32)
        wrong = engine.generate([13], Sampling(max_tokens=3))
        right = tokens_of(engine, [1], Sampling(max_tokens=3))
        found = await asyncio.gather(wrong.text(), right, return_exceptions=True)
        assert isinstance(found[0], BatchFunctionError)
        assert found[1] == [0, 0, 0]
        await engine.close()

    asyncio.run(main())


def test_closing_answers_what_there_is_or_says_that_it_does_not() -> None:
    async def main(drain: bool) -> object:
        async with engine_of(MODEL, max_sequences=1) as engine:
            tasks = [asyncio.create_task(tokens_of(engine, "a", Sampling(max_tokens=4))) for _ in range(3)]
            await asyncio.sleep(0)
            await engine.close(drain=drain)
            with pytest.raises(BatcherClosedError):
                engine.generate("a")
            return await asyncio.gather(*tasks, return_exceptions=True)

    drained = asyncio.run(main(True))
    assert isinstance(drained, list)
    assert [len(answer) for answer in drained] == [4, 4, 4]
    failed = asyncio.run(main(False))
    assert isinstance(failed, list)
    assert {type(error) for error in failed} == {BatcherClosedError}


class Hanging(Failing):
    """A model whose first step ends when it is let go.

    Args:
        loop: The loop whose clock says then that the step hangs; None: it has no time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(0)
        self._loop = loop
        self.begun, self.go = threading.Event(), threading.Event()

    def step(self, step: Step) -> Tensor:
        self.begun.set()
        if self._loop is not None:
            pass_over(self._loop, HANGS_S)
        self.go.wait()
        return super().step(step)


def test_an_engine_whose_step_hangs_is_closed_also_by_who_had_begun_to_drain_it() -> None:
    async def main() -> None:
        model = Hanging()
        engine = Engine(model, max_sequences=4, token_budget=32)
        asked = asyncio.ensure_future(tokens_of(engine, "a", Sampling(max_tokens=3)))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(model.begun.wait, 60)
        draining = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(drain=False), 60)
        await asyncio.wait_for(draining, 60)
        with pytest.raises(BatcherClosedError):
            await asked
        model.go.set()

    asyncio.run(main())


class Listener(BatchListener):
    """A listener that keeps the failures of runners."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def runner_failed(self, runner: str, error: BaseException) -> None:
        self.failures.append(error)


def test_a_step_that_hangs_fails_its_requests_as_one_that_took_too_long_and_another_decoder_takes_its_place() -> None:
    async def main() -> None:
        model, listener = Hanging(asyncio.get_running_loop()), Listener()
        settings = {"max_sequences": 4, "token_budget": 32, "run_timeout_s": HANGS_S, "listener": listener}
        engine = Engine(model, remake=lambda: Failing(0), **settings)
        asked = [engine.generate("a", Sampling(max_tokens=3)).text() for _ in range(2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in found] == [RunTimeoutError] * 2
        assert [str(error) for error in listener.failures] == [
            f"A step of the model did not end within {HANGS_S:g} s and was given up."
        ]
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        assert engine.stats.num_free_blocks == engine.stats.num_blocks
        model.go.set()
        await engine.close()

    HastyLoop.run(main())


class HangingLater:
    """A decoder whose n-th step hangs, and that keeps the requests of that step."""

    def __init__(self, decoder: TransformerDecoder, hanging_step: int) -> None:
        self.context, self.vocabulary_size = decoder.context, decoder.vocabulary_size
        self.num_blocks = decoder.num_blocks
        self.in_hanging_step: list[Request] = []
        self.go = threading.Event()
        self._decoder, self._left, self._loop = decoder, hanging_step, asyncio.get_running_loop()

    def step(self, step: Step) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self.in_hanging_step = [piece.request for piece in (*step.reading, *step.answering)]
            pass_over(self._loop, HANGS_S)
            self.go.wait()
        return self._decoder.step(step)


def test_a_prompt_read_in_part_by_a_decoder_that_hung_is_read_anew_and_answered_as_if_nothing_had_been() -> None:
    prompt, sampling = list(range(33)), Sampling(max_tokens=6, temperature=0.9, seed=1)
    limits = {"max_sequences": 2}

    def decoder() -> TransformerDecoder:
        return TransformerDecoder(MODEL, max_rows=32, **limits)

    async def main() -> None:
        # The first prompt fills the context: with its first token the model looks back at half of it, which is read
        # again and fills that step. So the third step is without the second prompt, of which a block has been read.
        model = HangingLater(decoder(), 3)
        engine = Engine(model, token_budget=32, run_timeout_s=HANGS_S, remake=decoder, **limits)
        first = engine.generate([7] * CONTEXT, Sampling(max_tokens=9))
        second = engine.generate(prompt, sampling)
        with pytest.raises(RunTimeoutError):
            await first.text()
        assert model.in_hanging_step == [first.request]
        found = [output.token async for output in second]
        await engine.close()
        model.go.set()
        async with engine_of(MODEL) as alone:
            assert found == await tokens_of(alone, prompt, sampling)

    HastyLoop.run(main())


def test_a_decoder_that_cannot_be_made_again_fails_the_requests_until_it_can() -> None:
    made: list[int] = []

    def remake() -> Failing:
        made.append(1)
        if len(made) == 1:
            raise MemoryError("no room for keys and values")
        return Failing(0)

    async def main() -> None:
        model = Hanging(asyncio.get_running_loop())
        engine = Engine(model, max_sequences=4, token_budget=32, run_timeout_s=HANGS_S, remake=remake)
        for wanted in (RunTimeoutError, BatchFunctionError):
            with pytest.raises(wanted):
                await engine.generate("a", Sampling(max_tokens=3)).text()
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        model.go.set()
        await engine.close()

    HastyLoop.run(main())


class Lazy(Failing):
    """A decoder that takes longer to be made than a step may take."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(0)
        pass_over(loop, 2 * HANGS_S)


def test_making_the_next_decoder_may_take_longer_than_a_step() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        model = Hanging(loop)
        limits = {"max_sequences": 4, "token_budget": 32}
        engine = Engine(model, run_timeout_s=HANGS_S, remake=lambda: Lazy(loop), **limits)
        with pytest.raises(RunTimeoutError):
            await engine.generate("a", Sampling(max_tokens=3)).text()
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        model.go.set()
        await engine.close()

    HastyLoop.run(main())


def test_where_every_step_hangs_there_is_an_end_to_threads_until_one_of_them_ends() -> None:
    made: list[Hanging] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def remake() -> Hanging:
            made.append(Hanging(loop))
            return made[-1]

        first = remake()
        engine = Engine(first, max_sequences=4, token_budget=32, run_timeout_s=HANGS_S, remake=remake)

        async def failure() -> str:
            with pytest.raises(RunTimeoutError) as raised:
                await engine.generate("a", Sampling(max_tokens=3)).text()
            return str(raised.value)

        told = [await failure() for _ in range(6)]
        assert told[3:] == [told[3], *["4 steps of the model hang, and no further one is begun."] * 2]
        assert len(made) == 4
        first.go.set()
        while await failure() == told[-1]:
            pass  # it has to wake up
        assert len(made) == 5
        for model in made:
            model.go.set()
        await engine.close()

    HastyLoop.run(main())


def test_a_decoder_with_fewer_blocks_does_not_take_the_place_of_one_that_hangs() -> None:
    class Smaller(Failing):
        num_blocks = Failing.num_blocks - 1

    async def main() -> None:
        model = Hanging(asyncio.get_running_loop())
        engine = Engine(model, token_budget=64, run_timeout_s=HANGS_S, remake=lambda: Smaller(0))
        for wanted in (RunTimeoutError, BatchFunctionError):
            with pytest.raises(wanted) as raised:
                await engine.generate("a", Sampling(max_tokens=3)).text()
        assert "is another, or has fewer blocks" in str(raised.value)
        model.go.set()
        await engine.close()

    HastyLoop.run(main())


@pytest.mark.parametrize("error", [concurrent.futures.CancelledError(), asyncio.CancelledError(), SystemExit()])
def test_an_error_that_would_end_a_task_fails_its_step_and_no_later_one(error: BaseException) -> None:
    class Cancelling(Failing):
        def step(self, step: Step) -> Tensor:
            self._left -= 1
            if self._left == 0:
                raise error
            return super().step(step)

    async def main() -> None:
        engine = Engine(Cancelling(1), max_sequences=4, token_budget=32)
        with pytest.raises(BatchFunctionError, match="The model failed"):
            await engine.generate("a", Sampling(max_tokens=3)).text()
        assert await tokens_of(engine, "a", Sampling(max_tokens=3)) == [0, 0, 0]
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_time_for_steps_without_another_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="run_timeout_s wants remake"):
        Engine(Failing(0), run_timeout_s=1.0)


@pytest.mark.parametrize("prompt", ["", [], [256], [-1]])
def test_a_prompt_that_is_none_is_refused(prompt: str | list[int]) -> None:
    async def main() -> None:
        async with engine_of(MODEL) as engine:
            with pytest.raises(InputError, match=r"prompt: wanted"):
                engine.generate(prompt)

    asyncio.run(main())


def test_a_token_without_a_text_fails_its_request_alone_and_the_engine_goes_on() -> None:
    class OneTextless(ByteVocabulary):
        def decode(self, token: int) -> bytes:
            if token == textless:
                raise KeyError(token)
            return super().decode(token)

    async def run() -> None:
        async with engine_of(MODEL, vocabulary=OneTextless()) as engine:
            failed = engine.generate([1, 2, 3], Sampling(max_tokens=4))
            others = [engine.generate(prompt, Sampling(max_tokens=4)) for prompt in prompts]
            with pytest.raises(BatchFunctionError, match=f"token {textless} has no text"):
                await failed.text()
            for other, wanted in zip(others, alone, strict=True):
                if textless not in wanted:
                    assert [output.token async for output in other if output.token is not None] == wanted
            assert engine.stats.num_free_blocks == engine.stats.num_blocks

    prompts = [[number, 2, 3, 4] for number in range(4, 12)]
    wanted_first = asyncio.run(answers([([1, 2, 3], Sampling(max_tokens=4))]))[0]
    textless = wanted_first[0]
    alone = asyncio.run(answers([(prompt, Sampling(max_tokens=4)) for prompt in prompts]))
    assert any(textless not in wanted for wanted in alone)
    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_answer_that_nobody_reads_is_cancelled_and_what_came_is_kept() -> None:
    async def run() -> None:
        forgotten: list[Generation] = []
        generation = Generation(Request([1], Sampling(max_tokens=2**40), CONTEXT, 1), forgotten.append)
        for _ in range(MOST_UNREAD + 2):
            generation.give(Output(65, "A"))
        assert forgotten == [generation]
        assert generation.finish_reason == "cancelled"
        assert await generation.text() == "A" * MOST_UNREAD

    asyncio.run(run())
