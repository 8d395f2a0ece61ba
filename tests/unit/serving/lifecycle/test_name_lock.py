"""The name of an endpoint is one process's at a time, also where another one ends at that moment."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

from orchestray.platform.errors import RunNameError
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState, find_endpoint
from support.patience import PATIENCE_S


def test_a_name_is_taken_once_also_by_who_opened_its_file_as_the_one_before_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [EndpointState(tmp_path, "endpoint")]
    lock = fcntl.flock

    def late(file: int, operation: int) -> None:
        """Close the lock before this one, which removes the file, between its opening and its lock."""
        if before:
            before.pop().close()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    state = EndpointState(tmp_path, "endpoint")
    assert not before
    with pytest.raises(RunNameError, match="runs already"):
        EndpointState(tmp_path, "endpoint")
    state.write(EndpointInfo("endpoint", 1, "http://127.0.0.1:1"))
    assert find_endpoint(tmp_path, "endpoint").url == "http://127.0.0.1:1"
    state.close()
    EndpointState(tmp_path, "endpoint").close()


def test_a_change_waits_for_an_endpoint_that_is_about_to_be_ready_but_not_for_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = EndpointState(tmp_path, "endpoint")
    monkeypatch.setattr(time, "sleep", lambda _: state.write(EndpointInfo("endpoint", 1, "http://127.0.0.1:1")))
    with pytest.raises(RunNameError, match="still starting"):
        find_endpoint(tmp_path, "endpoint")
    assert find_endpoint(tmp_path, "endpoint", patience_s=PATIENCE_S).url == "http://127.0.0.1:1"
    state.close()
    with pytest.raises(RunNameError, match="no endpoint"):
        find_endpoint(tmp_path, "endpoint", patience_s=PATIENCE_S)
