"""A batch whose failing samples are found by halving, so that the others are answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from orchestray.serving.models.errors import ModelError, RequestError
from orchestray.serving.models.signature import Output, Sample

_log = logging.getLogger("orchestray.serving")

Answers = list[Output | Exception]


def run_isolated(
    name: str, run: Callable[[Sequence[Sample]], Sequence[Output | Exception]], samples: Sequence[Sample]
) -> Answers:
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
