"""Places of the processes of a run on a cluster of two machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.cli import outside
from support.machines import Machines
from support.patience import PATIENCE_S

_TESTS = str(Path(__file__).parents[1])


def test_copies_of_a_shard_are_on_different_machines_and_leaf_servers_on_those_of_their_workers(
    machines: Machines,
) -> None:
    path = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**outside(), "PYTHONPATH": path, **machines.token}
    command = [sys.executable, "-m", "support.placements", machines.gcs_address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    servers = found["parameter_server"]  # 2 shards, 2 copies of each
    assert servers[0] != servers[2]
    assert servers[1] != servers[3]
    workers = found["worker"]
    assert len(set(workers)) == 2
    assert [found["leaf_server"][group] for group in found["groups"]] == workers
