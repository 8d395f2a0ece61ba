"""Signs that a Ray of our own will not come."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestray.platform.cluster import forking, head
from orchestray.platform.cluster.head import ServerEndedError, ended_if_its_start_fails, has_lost_a_server
from support.patience import PATIENCE_S


@pytest.fixture
def running() -> Iterator[SimpleNamespace]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield SimpleNamespace(process=process)
        process.kill()


@pytest.fixture
def ended() -> SimpleNamespace:
    process = subprocess.Popen(["true"])
    process.wait(timeout=PATIENCE_S)
    return SimpleNamespace(process=process)


def test_a_server_that_has_ended_is_lost_and_the_template_of_workers_is_none(
    running: SimpleNamespace, ended: SimpleNamespace
) -> None:
    assert not has_lost_a_server({"gcs_server": [running], "raylet": [running], forking.NAME: [running]})
    assert not has_lost_a_server({"gcs_server": [running], "raylet": [running], forking.NAME: [ended]})
    assert has_lost_a_server({"gcs_server": [running], "raylet": [running, ended], forking.NAME: [running]})


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_start_that_fails_leaves_no_process_and_is_worth_another_if_one_has_ended(
    has_ended: bool, running: SimpleNamespace, ended: SimpleNamespace
) -> None:
    def kill_all_processes(**_: bool) -> None:
        running.process.kill()

    servers = {"gcs_server": [ended if has_ended else running], "raylet": [running]}
    node = SimpleNamespace(all_processes=servers, kill_all_processes=kill_all_processes)
    with (
        pytest.raises(ServerEndedError if has_ended else OSError, match=None if has_ended else "no room"),
        ended_if_its_start_fails(node),
    ):
        raise OSError("no room")
    assert running.process.wait(timeout=PATIENCE_S) != 0


@pytest.mark.parametrize("num_failures", [0, 2, 3])
def test_a_node_of_which_a_server_ends_while_it_starts_is_started_again(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = []

    def start(num_cpus: int) -> SimpleNamespace:
        starts.append(num_cpus)
        if len(starts) <= num_failures:
            raise ServerEndedError("ended")
        folder = lambda: str(tmp_path / "session_1")  # noqa: E731
        return SimpleNamespace(gcs_address="127.0.0.1:7", all_processes={}, get_session_dir_path=folder)

    monkeypatch.setattr(head, "_slim_node", start)
    if num_failures == 3:
        with pytest.raises(ServerEndedError):
            head.start(2)
        return
    started = head.start(2)
    assert started is not None
    started.kill()
    assert starts == [2] * (num_failures + 1)
