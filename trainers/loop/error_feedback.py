"""The residuals of error feedback in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RESIDUALS = "residuals"
"""Key of a checkpoint's state for the scheme and the number of replicas that its residuals belong to."""


def dropped_residuals(state: Mapping[str, Any]) -> str:
    """Return the warning for a run that resumes without the residuals of a checkpoint; empty if there were none.

    Args:
        state: state of the checkpoint.
    """
    if not state.get(RESIDUALS):
        return ""
    return (
        "the checkpoint was made under another exchange or compression, or by another number of workers or servers: "
        "what was still to be sent of earlier gradients there is left out."
    )
