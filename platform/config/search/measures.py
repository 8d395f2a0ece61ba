"""What a search may look for that is measured of a network, and not learned. Imported by the process of every trial."""

from __future__ import annotations

from typing import Final

MEASURES: Final = ("parameters", "flops", "latency_ms")
