"""The result of an attempt, as a replica returns it.

Free of torch, so that the driver reads it without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PEER_LOST = "peer_lost"
"""Answer of a worker whose peer is gone: it waits for the next generation."""


@dataclass
class Outcome:
    """The result of an attempt."""

    ended: str
    """Reason of the end: `finished`, `until`, `early_stopping`, `time_limit_s` or `interrupted`."""
    step: int
    epochs: float
    final: dict[str, dict[str, Any] | None]
    bytes_sent: int
    bytes_dense: int
    samples: int
    """Number of samples this attempt trained on, over all replicas."""
    training_s: float
    memory: list[int] = field(default_factory=list)
    """Peak bytes of each worker's process."""
    usage: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of each worker: busy_s, span_s, peak_activation_bytes, bytes_by_link, timeline and others."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of updates by their staleness; empty for a synchronous scheme."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Further entries of the scheme in the run's result."""

    @property
    def stopped_by(self) -> str | None:
        """Condition that ended the run before its budget: `until`, `early_stopping` or `time_limit_s`."""
        return None if self.ended in ("finished", "interrupted") else self.ended
