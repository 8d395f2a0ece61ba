"""The measures of a network that can be objectives without training. Imported by the process of every trial."""

from __future__ import annotations

from typing import Final

MEASURES: Final = ("parameters", "flops", "latency_ms")
