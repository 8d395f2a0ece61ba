"""Errors of requests to a model, and of the model itself."""

from __future__ import annotations

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


class ModelError(OrchestrayError):
    """The error that the model raised on a sample (HTTP: 500 for that request alone); its own error is the cause."""


class UnknownModelError(OrchestrayError):
    """The error that a model or version does not exist (HTTP: 404)."""
