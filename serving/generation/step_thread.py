"""The thread that steps a decoder; if a step hangs, both are abandoned."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from orchestray.serving.generation.choose_token import pick
from orchestray.serving.generation.decoder import Decoder
from orchestray.serving.generation.scheduler import Step
from orchestray.serving.models.errors import ModelError
from orchestray.serving.runtime.work_thread import WorkThread

Found = TypeVar("Found")


class StepThread:
    """A decoder, and the only thread that calls it.

    A step that hangs may still write keys and values when it wakes up. So its replacement has a decoder of its own.

    Args:
        make: makes the decoder.
        num_threads: CPU threads of a step; None: torch's default.
    """

    def __init__(self, make: Callable[[], Decoder], num_threads: int | None) -> None:
        self._make = make
        self._decoder: Decoder | None = None
        self._thread = WorkThread("generation", partial(_pin_threads, num_threads))

    async def start(self) -> None:
        """Make the decoder in the thread if not done yet, without a time limit.

        Raises:
            Exception: any error of `make`.
        """
        if self._decoder is None:
            self._decoder = await asyncio.wrap_future(self._thread.submit(_contained, self._make))

    async def compute(self, step: Step, timeout_s: float | None) -> list[int | None]:
        """Return the next token of each piece that gives one; None if its logits are not finite.

        Args:
            step: pieces that go through the model.
            timeout_s: time limit; None: no limit.

        Raises:
            StepHangsError: the limit was exceeded; this thread can do nothing more.
            Exception: any error of the decoder, or its logits have a wrong shape.
        """
        assert self._decoder is not None
        call = partial(_compute, self._decoder, step)
        future: concurrent.futures.Future[list[int | None]] = self._thread.submit(_contained, call)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the decoder's own error
            if future.done():  # the event loop itself took that long
                return future.result()
            raise StepHangsError(future) from error

    def leave(self) -> None:
        """Run nothing more after the current step."""
        self._thread.shutdown(cancel_futures=True)


class StepHangsError(Exception):
    """The error that a step did not end within its time limit.

    Args:
        future: future of the step, done if it ends after all.
    """

    def __init__(self, future: concurrent.futures.Future[list[int | None]]) -> None:
        super().__init__("a step of the model hangs")
        self.future = future


def _compute(decoder: Decoder, step: Step) -> list[int | None]:
    requests = step.answered
    logits = decoder.step(step)
    if not requests:
        return []
    if logits.dim() != 2 or len(logits) != len(requests):
        raise ModelError(
            f"the decoder gave logits of shape {list(logits.shape)}: wanted two dimensions, "
            f"with a row for each of {len(requests)} pieces with is_last"
        )
    is_finite = logits.isfinite().all(dim=-1).tolist()
    samplings = [request.sampling for request in requests]
    tokens = pick(logits.nan_to_num(), samplings, [request.next_uniform() for request in requests])
    return [token if finite else None for token, finite in zip(tokens, is_finite, strict=True)]


def _contained(function: Callable[[], Found]) -> Found:
    """Call a function; errors that would end the waiting task, such as cancellation, become ordinary ones."""
    try:
        return function()
    except concurrent.futures.CancelledError as error:
        raise ModelError("what it waited for was cancelled") from error
    except Exception:
        raise
    except BaseException as error:
        raise ModelError(f"it raised {type(error).__name__}") from error


def _pin_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
