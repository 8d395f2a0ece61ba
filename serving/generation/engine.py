"""Continuous batching: one thread that steps the model, and requests that join and leave between its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from prometheus_client import Histogram

from orchestray.serving.batching.errors import (
    BatcherClosedError,
    BatchFunctionError,
    DeadlineError,
    QueueFullError,
    RunTimeoutError,
)
from orchestray.serving.batching.listener import SHED_EXPIRED, SHED_INFEASIBLE, SHED_QUEUE_FULL, BatchListener
from orchestray.serving.generation.decoder import Decoder
from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.metrics import times_of_an_engine
from orchestray.serving.generation.request import Request
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.scheduler import BlockPool, Scheduler, Step
from orchestray.serving.generation.step_thread import StepHangsError, StepThread
from orchestray.serving.generation.text import ByteVocabulary, Vocabulary
from orchestray.serving.models.errors import InputError, ModelError

_MOST_LEFT = 4
_RATE = 0.05
"""Weight of the newest value in a moving average."""


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine, and totals of its work."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_tokens: int
    """Number of generated tokens."""
    num_read: int
    """Number of prompt tokens read."""
    step_s: float
    """Seconds per step, a moving average."""
    cache_bytes: int
    """Bytes of all keys and values; 0: unknown."""
    first_token: Histogram
    """Seconds from a request to its first token."""
    between_tokens: Histogram
    """Seconds between consecutive tokens of an answer."""

    @property
    def cache_used(self) -> float:
        """Used part of the memory of keys and values."""
        return 1 - self.num_free_blocks / self.num_blocks


class Engine:
    """An engine that answers prompts with a model, many at once.

    It belongs to one event loop. The answer to a request does not depend, bit for bit, on other requests.

    Args:
        decoder: the model, with its cache.
        vocabulary: text to tokens; default: bytes.
        max_sequences: largest number of requests that are answered at once.
        token_budget: largest number of tokens in a step of the model; the decoder must be made for as many rows.
        max_queue: largest number of requests that may wait.
        continuous: False answers batch after batch, as a whole, for comparison.
        num_threads: CPU threads of a step; None: torch's default.
        run_timeout_s: seconds after which a step is considered hung; None: never.
        remake: makes another decoder like this one, to replace it if a step hangs.
        listener: receives requests that are not answered, and steps that hang, like that of a batcher.

    Raises:
        ValueError: steps have a timeout, and `remake` is missing.
    """

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: Vocabulary | None = None,
        *,
        max_sequences: int = 32,
        token_budget: int = 256,
        max_queue: int = 1024,
        continuous: bool = True,
        num_threads: int | None = None,
        run_timeout_s: float | None = None,
        remake: Callable[[], Decoder] | None = None,
        listener: BatchListener | None = None,
    ) -> None:
        if run_timeout_s is not None and remake is None:
            raise ValueError("run_timeout_s wants remake: the decoder of a step that hangs cannot be used again")
        self.vocabulary: Vocabulary = vocabulary or ByteVocabulary()
        self.context = decoder.context
        self._vocabulary_size = decoder.vocabulary_size
        self._cache_bytes = int(getattr(decoder, "cache_bytes", 0))
        self._listener = listener or BatchListener()
        self._pool = BlockPool(decoder.num_blocks)
        self._scheduler = Scheduler(
            self._pool, max_sequences=max_sequences, token_budget=token_budget, continuous=continuous
        )
        self._max_queue = max_queue
        self._max_sequences = max_sequences
        self._generations: dict[Request, Generation] = {}
        self._run_timeout_s, self._remake, self._num_threads = run_timeout_s, remake, num_threads
        self._thread = StepThread(lambda: decoder, num_threads)
        self._left: list[Future[Any]] = []
        """Futures of steps that hang, in abandoned threads."""
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._num_requests = self._num_steps = self._num_tokens = self._num_read = 0
        self._step_s = 0.0
        self._first_token, self._between_tokens = times_of_an_engine()
        self._answer_tokens = 0.0

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        """Begin an answer, and return it for iteration. Call on the engine's event loop.

        Args:
            prompt: text, or tokens.
            sampling: choice of the tokens.
            priority: higher goes first.
            deadline_s: time after which the answer is useless, on the loop's clock.

        Raises:
            InputError: the prompt is empty, or has a token outside the vocabulary.
            QueueFullError, DeadlineError, BatcherClosedError: as in `Batcher.submit`.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise BatcherClosedError("The engine was closed and takes no more requests.")
        tokens = self.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(tokens)
        waiting = len(self._scheduler.waiting)
        if waiting >= self._max_queue:
            self._listener.shed(SHED_QUEUE_FULL)
            raise QueueFullError(self._max_queue, self._wait_s())
        if deadline_s is not None and loop.time() + self._wait_s() >= deadline_s:
            self._listener.shed(SHED_INFEASIBLE)
            raise DeadlineError(self._wait_s())
        self._num_requests += 1
        request = Request(tokens, sampling or Sampling(), self.context, self._num_requests, priority)
        generation = self._generations[request] = Generation(request, self._forget)
        generation.since_s = loop.time()
        if deadline_s is not None:
            generation.timer = loop.call_at(deadline_s, self._expire, generation)
        self._scheduler.add(request)
        self._wake.set()
        if self._task is None:
            self._task = loop.create_task(self._work())
        return generation

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("prompt", "at least one character", "none")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary_size:
            raise InputError("prompt", f"tokens from 0 to {self._vocabulary_size - 1}", "another")

    def _wait_s(self) -> float:
        """Return the seconds until a new request is begun, estimated from the length of recent answers."""
        if len(self._generations) < self._max_sequences and not self._scheduler.waiting:
            return 0.0
        ahead = len(self._scheduler.waiting) + 1
        return ahead * self._answer_tokens * self._step_s / self._max_sequences

    def _expire(self, generation: Generation) -> None:
        self._listener.shed(SHED_EXPIRED)
        is_waiting = generation.request in self._scheduler.waiting
        generation.fail(DeadlineError(self._wait_s() if is_waiting else None))

    def _forget(self, generation: Generation) -> None:
        """Free the request's blocks at once: no step is planned while one runs."""
        self._scheduler.remove(generation.request)
        self._generations.pop(generation.request, None)

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            step = self._scheduler.plan()
            if not step.num_tokens:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._check_left()
                await self._thread.start()
                begin_s = loop.time()
                tokens = await self._thread.compute(step, self._run_timeout_s)
                self._count(step, loop.time() - begin_s)
                self._deliver(step, tokens)
            except StepHangsError as error:
                self._replace(step, error.future)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is passed to the requests of the step
                self._fail(step, error)

    def _deliver(self, step: Step, tokens: Sequence[int | None]) -> None:
        for request, token in zip(step.answered, tokens, strict=True):
            generation = self._generations.get(request)
            if generation is None:
                continue  # cancelled, or late, while the step ran
            if token is None:
                generation.fail(BatchFunctionError("The model's outputs for this request are not finite."))
                continue
            try:
                self._give(generation, token)
            except Exception as error:  # noqa: BLE001 - a vocabulary that fails on a token fails one request
                generation.fail(_failure(f"The token {token} has no text", error))

    def _give(self, generation: Generation, token: int) -> None:
        request = generation.request
        if token in request.sampling.stop_tokens:
            self._finish(generation, "stop", None, request.text.finish())
            return
        request.tokens.append(token)
        self._num_tokens += 1
        self._time(generation)
        text = request.text.feed(self.vocabulary.decode(token))
        if request.text.stopped:
            self._finish(generation, "stop", token, text)
        elif request.num_generated >= request.sampling.max_tokens:
            self._finish(generation, "length", token, text + request.text.finish())
        else:
            generation.give(Output(token, text))

    def _time(self, generation: Generation) -> None:
        now_s = asyncio.get_running_loop().time()
        times = self._first_token if generation.request.num_generated == 1 else self._between_tokens
        times.observe(now_s - generation.since_s)
        generation.since_s = now_s

    def _finish(self, generation: Generation, reason: str, token: int | None, text: str) -> None:
        request = generation.request
        request.finish_reason = "stop" if reason == "stop" else "length"
        self._answer_tokens = _moved(self._answer_tokens, float(max(1, request.num_generated)))
        if token is not None or text:
            generation.give(Output(token, text))
        generation.end()

    def _fail(self, step: Step, error: Exception) -> None:
        for generation in self._of(step):  # an object for each, so that tracebacks do not mix
            is_timeout = isinstance(error, RunTimeoutError)
            generation.fail(RunTimeoutError(*error.args) if is_timeout else _failure("The model failed", error))

    def _replace(self, step: Step, hanging: Future[Any]) -> None:
        """Go on with another thread and decoder; partly read prompts of other requests are read from the start."""
        self._thread.leave()
        self._left.append(hanging)
        self._thread = StepThread(self._make_another, self._num_threads)
        text = f"A step of the model did not end within {self._run_timeout_s:g} s and was given up."
        for generation in self._of(step):
            generation.fail(RunTimeoutError(text))
        self._scheduler.forget_cached()
        self._listener.runner_failed("generation", RunTimeoutError(text))

    def _check_left(self) -> None:
        """Limit the abandoned steps, each of which keeps a thread, with keys and values.

        Raises:
            RunTimeoutError: too many steps hang; one must end before another begins.
        """
        self._left = [future for future in self._left if not future.done()]
        if len(self._left) >= _MOST_LEFT:
            raise RunTimeoutError(f"{len(self._left)} steps of the model hang, and no further one is begun.")

    def _make_another(self) -> Decoder:
        """Make another decoder; called in its thread."""
        assert self._remake is not None
        decoder = self._remake()
        is_alike = (decoder.context, decoder.vocabulary_size) == (self.context, self._vocabulary_size)
        if not is_alike or decoder.num_blocks < self._pool.num_blocks:
            raise ModelError("the decoder that takes the place of one that hangs is another, or has fewer blocks")
        return decoder

    def _of(self, step: Step) -> list[Generation]:
        """Return the generations of a step's requests that are still wanted."""
        requests = [piece.request for piece in (*step.reading, *step.answering)]
        return [self._generations[request] for request in requests if request in self._generations]

    def _count(self, step: Step, seconds: float) -> None:
        self._num_steps += 1
        self._num_read += sum(len(piece.tokens) for piece in step.reading)
        self._step_s = _moved(self._step_s, seconds)

    # -- end and statistics --------------------------------------------------------------------------------------------

    async def close(self, *, drain: bool = True) -> None:
        """Take no more requests; answer those that exist (`drain`), or fail them with BatcherClosedError.

        Without `drain` a running step is not waited for: it may hang.
        """
        self._closed = True
        if not drain:
            for generation in list(self._generations.values()):
                generation.fail(BatcherClosedError("The engine was closed before the answer was whole."))
            if self._task is not None:
                self._task.cancel()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})  # a close that drains may have been ended by one that does not
            if not self._task.cancelled():
                self._task.result()
        self._thread.leave()

    @property
    def stats(self) -> EngineStats:
        """Current state of the engine."""
        return EngineStats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_read=self._num_read,
            step_s=self._step_s,
            cache_bytes=self._cache_bytes,
            first_token=self._first_token,
            between_tokens=self._between_tokens,
        )


def _failure(text: str, error: Exception) -> BatchFunctionError:
    failure = BatchFunctionError(f"{text}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _moved(average: float, value: float) -> float:
    return value if average == 0.0 else average + _RATE * (value - average)
