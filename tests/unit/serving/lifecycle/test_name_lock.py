"""The name of an endpoint is one process's at a time, also where another one ends at that moment."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from orchestray.platform.errors import RunNameError
from orchestray.serving.lifecycle.name_lock import EndpointInfo, EndpointState, find_endpoint


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
