"""Fixtures of the tests of plans."""

from __future__ import annotations

import pytest

from orchestray.trainers.planning import dry_run


@pytest.fixture
def _few_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a dry run measure no more steps than it must: for tests of bytes, which are the same in each."""
    monkeypatch.setattr(dry_run, "_AIM_S", 0.0)
