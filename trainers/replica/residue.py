"""What compression with error feedback has yet to send, as a checkpoint tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RESIDUALS = "residuals"
"""Of a checkpoint's state, where it holds such: under which scheme, and by how many, it was kept."""


def dropped_residue(state: Mapping[str, Any]) -> str:
    """What the user is told where a run goes on without what was kept in a checkpoint; empty if nothing was.

    Args:
        state: of the checkpoint.
    """
    if not state.get(RESIDUALS):
        return ""
    return (
        "the checkpoint was made under another exchange or compression, or by another number of workers or servers: "
        "what was still to be sent of earlier gradients there is left out."
    )
