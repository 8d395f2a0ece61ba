"""A Ray cluster of two machines that tests share: what one of them kills is there again for the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.ray_cluster import RayCluster

NUM_CPUS = 2
"""Logical CPUs of each machine: a task that asks for two has a machine to itself."""
_TESTS = str(Path(__file__).parents[1])
_NUM_MACHINES = 2


class Machines(RayCluster):
    """Two machines with a token, a home directory of their own, and no Python with Ray on their PATH.

    Args:
        folder: Where the home directory and the token are.
    """

    def __init__(self, folder: Path) -> None:
        self.away = folder / "away"
        self.away.mkdir()
        self.token_file = folder / "auth_token"
        self.token_file.write_text("5e" * 32, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
        # The processes of a run find what the tests have them host, and import what the tests import.
        path = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"HOME": str(self.away), "PATH": "/usr/bin:/bin", "PYTHONPATH": path, **self.token}
        self._leaving: list[subprocess.Popen[bytes]] = []
        super().__init__(num_cpus=NUM_CPUS, environment=environment)

    @property
    def token(self) -> dict[str, str]:
        """Environment of a user who may do anything here."""
        return {"RAY_AUTH_TOKEN_PATH": str(self.token_file)}

    def drain(self, node: str) -> None:
        """Announce that a node leaves, as the agent of a cloud does."""
        self._leaving += [each for each in self._nodes if self._node_id(self._family(each)) == node]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.gcs_address]
        command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        command += ["--deadline-remaining-seconds", "300"]
        subprocess.run(command, env={**os.environ, **self.token, "RAY_AUTH_MODE": "token"}, check=True)

    def kill_drained(self) -> None:
        """End the node that was announced to leave."""
        self._kill(self._leaving.pop())

    def repair(self) -> None:
        """Have two machines again, whatever a test has done to them."""
        self.wait_for_nodes()
        while self.num_nodes < _NUM_MACHINES:
            self.add_node(num_cpus=NUM_CPUS)
