"""Clusters that were started without a token, asked from a machine that has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import TIMEOUT_S
from support.ray_cluster import ray_cluster

_CONNECT = """
from orchestray.platform.cluster.cluster import connect

connect({address!r}).close()
"""


@pytest.mark.slow
def test_a_cluster_without_a_token_is_refused_where_this_machine_has_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    with ray_cluster(environment={**unset, "RAY_AUTH_MODE": "disabled"}) as cluster:

        def connect(**variables: str) -> subprocess.CompletedProcess[str]:
            code = _CONNECT.format(address=cluster.gcs_address)
            given = {**unset, "RAY_AUTH_TOKEN_PATH": str(token), **variables}
            command = [sys.executable, "-c", code]
            return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

        refused = connect()
        assert refused.returncode == 1
        last = refused.stderr.splitlines()[-1]
        assert "was started without a token, and this machine has one" in last
        assert "RAY_AUTH_MODE=disabled" in last
        assert connect(RAY_AUTH_MODE="disabled").returncode == 0
