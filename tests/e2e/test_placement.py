"""Where the processes of a run are on a cluster of two machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE_S
from support.ray_cluster import ray_cluster

_TESTS = str(Path(__file__).parents[1])


def test_copies_of_a_shard_are_on_different_machines_and_leaf_servers_on_those_of_their_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]))
    with ray_cluster(num_cpus=2, num_nodes=2) as cluster:
        command = [sys.executable, "-m", "support.placements", cluster.gcs_address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    servers = found["parameter_server"]  # 2 shards, 2 copies of each
    assert servers[0] != servers[2]
    assert servers[1] != servers[3]
    workers = found["worker"]
    assert len(set(workers)) == 2
    assert [found["leaf_server"][group] for group in found["groups"]] == workers
