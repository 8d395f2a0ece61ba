"""Requests to the driver of a live run: files that two processes see."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.control_files import Asked, Inbox, NotAnsweredError
from orchestray.platform.run.directory import RunDirectory
from support.patience import PATIENCE_S

ASK = (
    "import sys, pathlib; from orchestray.platform.run.control_files import Asked\n"
    "print(Asked(pathlib.Path(sys.argv[1]), {'scale': {'data': 3}}).wait(600)['step'])\n"
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with RunDirectory.create(tmp_path, "live") as directory:
        yield directory


def taken(inbox: Inbox) -> Any:
    """Return the next request; look as often as it takes."""
    while (request := inbox.take()) is None:
        threading.Event().wait(0.01)
    return request


def test_a_request_of_another_process_is_taken_and_answered(run: RunDirectory) -> None:
    inbox = Inbox(run.path, Clock())
    with subprocess.Popen([sys.executable, "-c", ASK, str(run.path)], stdout=subprocess.PIPE, text=True) as process:
        request = taken(inbox)
        assert request.content == {"scale": {"data": 3}}
        inbox.answer(request, {"step": 120})
        assert process.communicate(timeout=PATIENCE_S)[0] == "120\n"
    assert list((run.path / ".requests").iterdir()) == []


def test_requests_are_taken_in_the_order_in_which_they_came_each_once(run: RunDirectory) -> None:
    inbox = Inbox(run.path, Clock())
    for number in range(3):
        Asked(run.path, {"number": number})
    assert [taken(inbox).content["number"] for _ in range(3)] == [0, 1, 2]
    assert inbox.take() is None


def test_the_directory_is_looked_at_only_now_and_then(run: RunDirectory) -> None:
    times = iter([0.0, 0.0, 0.1, 5.0, 5.0])
    inbox = Inbox(run.path, lambda: next(times))
    assert inbox.take() is None
    Asked(run.path, {})
    assert inbox.take() is None
    assert inbox.take() is not None


def test_a_request_nobody_takes_in_time_is_taken_back(run: RunDirectory) -> None:
    inbox = Inbox(run.path, Clock())
    with pytest.raises(NotAnsweredError, match="did not look at the request within 0 s, and it was taken back"):
        Asked(run.path, {}).wait(0.0)
    assert inbox.take() is None


def test_a_request_that_was_taken_is_not_taken_back(run: RunDirectory) -> None:
    inbox = Inbox(run.path, Clock())
    asked = Asked(run.path, {})
    request = taken(inbox)
    with pytest.raises(NotAnsweredError, match="has taken the request up, and is not done with it after 0 s"):
        asked.wait(0.0)
    assert asked.withdraw() is False
    inbox.answer(request, {"step": 1})
    assert asked.wait(0.0) == {"step": 1}


def test_who_asks_a_run_that_dies_learns_of_it(run: RunDirectory) -> None:
    asked = Asked(run.path, {})
    run.close()
    with pytest.raises(NotAnsweredError, match="Run 'live' ended before it could answer"):
        asked.wait(60.0)


def test_what_is_still_asked_when_a_run_ends_is_answered(run: RunDirectory) -> None:
    inbox = Inbox(run.path, Clock())
    asked = [Asked(run.path, {}) for _ in range(2)]
    inbox.close({"error": "it has ended"})
    assert [one.wait(0.0) for one in asked] == [{"error": "it has ended"}] * 2


def test_a_run_that_goes_on_forgets_what_was_asked_of_the_one_before(run: RunDirectory) -> None:
    asked = Asked(run.path, {})
    inbox = Inbox(run.path, Clock())
    assert inbox.take() is None
    with pytest.raises(NotAnsweredError, match="ended before"):
        asked.wait(60.0)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_what_is_no_request_is_passed_over(run: RunDirectory, text: str) -> None:
    inbox = Inbox(run.path, Clock())
    (run.path / ".requests").mkdir()
    (run.path / ".requests" / "0.json").write_text(text)
    Asked(run.path, {"number": 1})
    assert taken(inbox).content == {"number": 1}
