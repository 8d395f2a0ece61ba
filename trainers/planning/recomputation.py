"""The activations that `train.recompute` would spare, and the operations that it would add."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from orchestray.platform.data.nested import tensors_in
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.parallel.recompute.choose import HOWS, recompute
from orchestray.trainers.parallel.recompute.meter import ActivationMeter
from orchestray.trainers.planning.subject import Subject


@dataclass(frozen=True)
class Recomputation:
    """A step with a value of `train.recompute`."""

    how: str
    """Value of `train.recompute`."""
    parts: tuple[str, ...]
    """Parts of the model that are computed again."""
    peak_bytes: int
    """Most bytes of activations kept at a time; without the batch, parameters and buffers."""
    work: int
    """Scalar operations of the whole step."""


def recomputations(subject: Subject) -> tuple[Recomputation, ...]:
    """Return a step with each way of recomputation that finds parts of the model.

    The product's own recomputation runs, on the subject's device: on `meta` nothing is computed.
    """
    found = (step_with(subject, how) for how in HOWS if how != "none")
    return tuple(step for step in found if step is not None and step.parts)


def step_with(subject: Subject, how: str) -> Recomputation | None:
    """Return a step of a copy of the model with a value of `train.recompute`; None if it cannot be run so."""
    try:
        model = copy.deepcopy(subject.model)
        meter = ActivationMeter(model)
        parts = tuple(recompute(model, how, meter=meter, inputs=lambda: subject.inputs).parts)
        recorder: Any = Recorder(has_layers=False)
        with recorder, meter.watching(*tensors_in(subject.inputs)):
            loss = replace(subject, model=model).forward()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except (OrchestrayError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return Recomputation(how, parts, meter.peak_bytes, recorder.graph.work)
