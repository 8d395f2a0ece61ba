"""Limit of waits in tests, on however slow a machine: only what hangs takes longer."""

from __future__ import annotations

PATIENCE_S = 600.0
"""Less than pytest's `faulthandler_timeout`, which ends the whole process."""
