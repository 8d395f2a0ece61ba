"""Errors of requests to a model, and of the model itself, whose failing samples are found by halving a batch."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestray.platform.errors import OrchestrayError

if TYPE_CHECKING:
    from orchestray.serving.models.signature import Answers, Output, Sample

_log = logging.getLogger("orchestray.serving")


class InputError(OrchestrayError):
    """The error that a sample is invalid (HTTP: 422); names the field, what was wanted and what came."""

    def __init__(self, field: str, wanted: str, got: str) -> None:
        self.field = field
        self.wanted = wanted
        self.got = got
        super().__init__(f"{field}: wanted {wanted}, got {got}.")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        return type(self), (self.field, self.wanted, self.got)


class RequestError(OrchestrayError):
    """The error that the task of a model refuses a request (HTTP: 422), in the task's own words."""


def reason_of(error: BaseException) -> str:
    """Return the text of an error with which code of the user's own refuses a request; many have none."""
    return str(error) or "the model refuses this request, and does not say why"


class ModelError(OrchestrayError):
    """The error that the model raised on a sample (HTTP: 500 for that request alone); its own error is the cause.

    In another process the cause is a `RemoteError`: the class of the model's own may be unknown there.
    """

    def __reduce__(self) -> tuple[Callable[..., ModelError], tuple[str, str | None]]:
        cause = self.__cause__
        return _received, (str(self), None if cause is None else "".join(traceback.format_exception(cause)))


class RemoteError(Exception):
    """An error of another process, as its traceback."""


def _received(text: str, cause: str | None) -> ModelError:
    error = ModelError(text)
    error.__cause__ = None if cause is None else RemoteError(f"\n{cause}")
    return error


class UnknownModelError(OrchestrayError):
    """The error that a model or version does not exist (HTTP: 404)."""


def run_isolated(name: str, run: Callable[[Sequence[Sample]], Sequence[Output]], samples: Sequence[Sample]) -> Answers:
    """Return an answer for each sample, by one call of `run`.

    If that fails, the batch is halved until the samples that fail are alone; the others are answered. A `RequestError`
    stays what it is, and anything else is a `ModelError`.

    Args:
        name: name of the model.
        run: answers a batch, or raises anything.
        samples: the batch.
    """
    try:
        return list(run(samples))
    except BaseException as error:  # noqa: BLE001 - the user's model may raise anything, `SystemExit` among it
        if len(samples) == 1:
            return [error if isinstance(error, RequestError) else _failure(name, error)]
        middle = len(samples) // 2
        return [*run_isolated(name, run, samples[:middle]), *run_isolated(name, run, samples[middle:])]


def _failure(name: str, error: BaseException) -> ModelError:
    _log.warning("model %s raised on a request", name, exc_info=error)
    failed = ModelError(f"The model raised {type(error).__name__} on this request.")
    failed.__cause__ = error
    return failed
