"""The thread that steps a decoder: where a step hangs, both are left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import torch

from orchestray.serving.generation.decoder import Decoder
from orchestray.serving.generation.picking import pick
from orchestray.serving.generation.scheduler import Step
from orchestray.serving.models.errors import ModelError
from orchestray.serving.work_thread import WorkThread


class StepThread:
    """A decoder, and the only thread that calls it.

    A step that hangs may go on to write keys and values whenever it wakes up: so what takes its place has a decoder of
    its own.

    Args:
        make: the decoder; is called in the thread, before its first step.
        num_threads: of the CPU, in a step; None: as many as torch takes.
    """

    def __init__(self, make: Callable[[], Decoder], num_threads: int | None) -> None:
        self._make = make
        self._decoder: Decoder | None = None
        self._thread = WorkThread("generation", partial(_pin_threads, num_threads))

    async def compute(self, step: Step, timeout_s: float | None) -> list[int | None]:
        """The next token of each piece that gives one; None where the model's answer is no number.

        Args:
            step: what goes through the model.
            timeout_s: None: as long as it takes.

        Raises:
            StepHangsError: it has taken longer; nothing more can be asked of this.
            Exception: whatever the decoder raises, or what it gave is wrong.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await loop.run_in_executor(self._thread, self._compute, step)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the decoder's own
            raise StepHangsError from error

    def _compute(self, step: Step) -> list[int | None]:
        if self._decoder is None:
            self._decoder = self._make()
        requests = step.answered
        logits = self._decoder.step(step)
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

    def leave(self) -> None:
        """Run nothing more than what is running."""
        self._thread.shutdown(cancel_futures=True)


class StepHangsError(Exception):
    """A step did not end in its time."""


def _pin_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
