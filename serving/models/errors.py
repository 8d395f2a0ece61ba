"""Errors of requests to a model, and of the model itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from orchestray.platform.errors import OrchestrayError


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
