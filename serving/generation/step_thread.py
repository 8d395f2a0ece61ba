"""The thread that steps a decoder: where a step hangs, both are left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from orchestray.serving.generation.decoder import Decoder
from orchestray.serving.generation.picking import pick
from orchestray.serving.generation.scheduler import Step
from orchestray.serving.models.errors import ModelError
from orchestray.serving.work_thread import WorkThread

Found = TypeVar("Found")


class StepThread:
    """A decoder, and the only thread that calls it.

    A step that hangs may go on to write keys and values whenever it wakes up: so what takes its place has a decoder of
    its own.

    Args:
        make: the decoder.
        num_threads: of the CPU, in a step; None: as many as torch takes.
    """

    def __init__(self, make: Callable[[], Decoder], num_threads: int | None) -> None:
        self._make = make
        self._decoder: Decoder | None = None
        self._thread = WorkThread("generation", partial(_pin_threads, num_threads))

    async def start(self) -> None:
        """Make the decoder, in the thread, if that is not done: it takes as long as it takes.

        Raises:
            Exception: whatever `make` raises.
        """
        if self._decoder is None:
            self._decoder = await asyncio.wrap_future(self._thread.submit(_told, self._make))

    async def compute(self, step: Step, timeout_s: float | None) -> list[int | None]:
        """The next token of each piece that gives one; None where the model's answer is no number.

        Args:
            step: what goes through the model.
            timeout_s: None: as long as it takes.

        Raises:
            StepHangsError: it has taken longer; nothing more can be asked of this.
            Exception: whatever the decoder raises, or what it gave is wrong.
        """
        assert self._decoder is not None
        call = partial(_compute, self._decoder, step)
        future: concurrent.futures.Future[list[int | None]] = self._thread.submit(_told, call)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the decoder's own
            if future.done():  # it was the event loop that took so long
                return future.result()
            raise StepHangsError(future) from error

    def leave(self) -> None:
        """Run nothing more than what is running."""
        self._thread.shutdown(cancel_futures=True)


class StepHangsError(Exception):
    """A step did not end in its time.

    Args:
        future: is done when it has ended all the same.
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


def _told(function: Callable[[], Found]) -> Found:
    """What it returns or raises; what would end the task that waits for it is an error like any other."""
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
