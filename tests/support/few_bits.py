"""Sections of quantization, and the digits with networks of few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestray.trainers.few_bits.quantized_task import QuantizedTask
from orchestray.trainers.few_bits.registry import QUANTIZATIONS
from support.training import few_digits


def quantize_section(type: str, **keys: Any) -> dict[str, Any]:  # noqa: A002 - the config's key
    """Return all keys of a section `train.quantize`."""
    return QUANTIZATIONS.params(type)(type=type, **keys).model_dump()


def quantized_digits(type: str, *, task: Callable[[], Any] = few_digits, **keys: Any) -> Callable[[], QuantizedTask]:  # noqa: A002
    """Return a function that makes the digits' task, quantized.

    Args:
        type: the quantization.
        task: makes the task of floating-point numbers.
        keys: other keys of the section.
    """
    return lambda: QuantizedTask(task(), quantize_section(type, **keys))
