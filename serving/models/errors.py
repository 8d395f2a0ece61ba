"""What is wrong with a request for a model, or with the model itself."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


class InputError(OrchestrayError):
    """A sample is not what the model takes (HTTP: 422); names the field, what was wanted and what came."""

    def __init__(self, field: str, wanted: str, got: str) -> None:
        self.field = field
        self.wanted = wanted
        self.got = got
        super().__init__(f"{field}: wanted {wanted}, got {got}.")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        return type(self), (self.field, self.wanted, self.got)


class ModelError(OrchestrayError):
    """The model raised on a sample (HTTP: 500 for that request alone); its error is the cause."""


class UnknownModelError(OrchestrayError):
    """There is no model of that name, or not in that version (HTTP: 404)."""
