"""The check that both sides of a comparison train alike: else their times cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.benchmark import BenchmarkError

COMPARED_STEPS = 10
LOSS_TOLERANCE = 1e-3


def check_same_training(model: str, found: Mapping[str, Sequence[Mapping[str, Any]]], peer: str) -> None:
    """Check that all sides have the losses of one of them in the first steps.

    Args:
        model: name of the model.
        found: runs of each side, with their `losses`.
        peer: side that the others are held against.

    Raises:
        BenchmarkError: one trains something else.
    """
    wanted = found[peer][0]["losses"][:COMPARED_STEPS]
    for name, runs in found.items():
        for run in runs:
            losses = run["losses"][:COMPARED_STEPS]
            apart = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, wanted, strict=True))
            if apart > LOSS_TOLERANCE:
                raise BenchmarkError(
                    f"{model}: {name} does not train what {peer} trains: losses {losses} against {wanted}"
                )
