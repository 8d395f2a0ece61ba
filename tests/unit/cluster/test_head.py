"""When it is known that a Ray of our own will not come."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from orchestray.platform.cluster import forking
from orchestray.platform.cluster.head import has_lost_a_server
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
