"""The process of a trial: when it writes a state down, and what it leaves when it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.search.engine.host import TrialHost
from orchestray.search.engine.orders import Rules
from support.search_loop import ACCURACY


def test_a_process_whose_trial_cannot_be_closed_still_ends_its_workers_and_hands_nothing_out(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("it cannot be closed")

    ended: list[str] = []
    host = TrialHost(Rules(ACCURACY, str(tmp_path)))
    program: Any = SimpleNamespace(close=refuse)
    room: Any = SimpleNamespace(close=lambda: ended.append("workers"))
    host._program, host._room = program, room
    with pytest.raises(OSError, match="cannot be closed"):
        host.close()
    assert ended == ["workers"]
    assert not host._vault._door.is_alive()
