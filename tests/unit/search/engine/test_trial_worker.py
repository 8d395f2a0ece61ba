"""The process of a trial: when it writes a state down, and what it leaves when it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestray.platform.errors import NodeLeavesError
from orchestray.search.engine.messages import TrialLimits, TrialTask
from orchestray.search.engine.trial_worker import TrialHost
from orchestray.search.trials.program import Progress
from orchestray.search.trials.training import TrainingTrial
from support.search_loop import ACCURACY, make_config


def test_a_trial_whose_state_was_just_written_for_others_does_not_pause_to_have_it_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = TrialHost(TrialLimits(ACCURACY, str(tmp_path), save_every_s=600.0))
    advance = TrainingTrial.advance

    def for_an_hour(trial: TrainingTrial, step: int) -> Progress:
        progress = advance(trial, step)
        host._saved_s -= 3600.0
        return progress

    monkeypatch.setattr(TrainingTrial, "advance", for_an_hour)
    told = host.work(TrialTask(0, 3, config=make_config({}, None, 6, 0), begins=True, is_exact=True, writes_state=True))
    pause_s = host._pause_s()
    host.close()
    assert told.error is None
    assert pause_s is not None
    assert pause_s > 0


def test_a_process_whose_trial_cannot_be_closed_still_ends_its_workers(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("it cannot be closed")

    ended: list[str] = []
    host = TrialHost(TrialLimits(ACCURACY, str(tmp_path)))
    program: Any = SimpleNamespace(close=refuse)
    room: Any = SimpleNamespace(close=lambda: ended.append("workers"))
    host._program, host._room = program, room
    with pytest.raises(OSError, match="cannot be closed"):
        host.close()
    assert ended == ["workers"]


def test_a_trial_whose_machine_leaves_gives_its_process_up_with_the_state_of_the_moment_on_disk(tmp_path: Path) -> None:
    task = TrialTask(0, 200, config=make_config({}, None, 200, 0), begins=True)
    staying = TrialHost(TrialLimits(ACCURACY, str(tmp_path / "staying"), save_every_s=600.0))
    expected = staying.work(task)
    host = TrialHost(TrialLimits(ACCURACY, str(tmp_path), save_every_s=1e-4), is_leaving=lambda: True)
    with pytest.raises(NodeLeavesError):
        host.work(task)
    state = host._files.on_the_way(0)
    host.close()
    assert state is not None
    another = TrialHost(TrialLimits(ACCURACY, str(tmp_path), save_every_s=600.0))
    result = another.work(replace(task, source=state))
    assert result.metrics == expected.metrics
    for each in (staying, another):
        each.close()
