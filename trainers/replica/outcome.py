"""What a replica says when it has ended: free of torch, so that the driver can read it without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """How an attempt ended."""

    ended: str
    """`finished`, `until`, `time_limit_s` or `interrupted`."""
    step: int
    epochs: float
    final: dict[str, dict[str, Any] | None]
    bytes_sent: int
    bytes_dense: int
    samples: int
    """Samples this attempt trained on, over all replicas."""
    training_s: float
    memory: list[int] = field(default_factory=list)
    """Peak bytes of each worker's process."""
    usage: list[dict[str, Any]] = field(default_factory=list)
    """Of each worker: busy_s, span_s, peak_activation_bytes, bytes_by_link, timeline, and what is told of it."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of updates by their staleness; empty for a synchronous scheme."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the scheme has to say beside; goes into the result as it is."""
