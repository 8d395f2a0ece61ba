"""The thread that steps a decoder, and chooses the next tokens; if a step hangs, both are abandoned."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from orchestray.serving.generation.decoder import Decoder
from orchestray.serving.generation.sampling import Sampling
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


def pick(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Choose the next token of each request. A row's result depends on that row alone.

    Args:
        logits: [requests, vocabulary].
        samplings: sampling of each request.
        uniforms: a number from [0, 1) for each request, which decides the draw; unused if `temperature` is 0.

    Returns:
        a token per request.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        chosen = [samplings[row] for row in drawn]
        at = torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64, device=logits.device)
        tokens[drawn] = _draw(logits[drawn].to(torch.float64), chosen, at)
    return [int(token) for token in tokens.tolist()]


def _draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> Tensor:
    """Draw by the inverse of the cumulative distribution, in which the likeliest tokens come first."""
    vocabulary = logits.shape[-1]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64)
    kept = torch.tensor([min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings])
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    # The largest is subtracted before the division: a temperature near 0 must not overflow.
    scaled = (ordered - ordered[:, :1]) / temperatures.to(logits.device)[:, None]
    beyond = torch.arange(vocabulary, device=logits.device) >= kept.to(logits.device)[:, None]
    weights = scaled.exp().masked_fill(beyond, 0.0)
    cumulative = weights.cumsum(dim=-1)
    if any(sampling.top_p < 1 for sampling in samplings):  # nucleus sampling: https://arxiv.org/abs/1904.09751
        # In float32 a small one would be 0, and nothing would be kept.
        top_p = torch.tensor([[sampling.top_p] for sampling in samplings], dtype=torch.float64, device=logits.device)
        before = (cumulative - weights) / cumulative[:, -1:]
        weights = weights.masked_fill((before >= top_p) & (top_p < 1), 0.0)
        kept = torch.minimum(kept, (weights > 0).sum(dim=-1).cpu())
        cumulative = weights.cumsum(dim=-1)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    places = torch.minimum(places, (kept - 1).to(logits.device)[:, None])
    return tokens.gather(-1, places)[:, 0]
