"""The process that dry runs are forked from has what a worker is forked with, and no thread that a fork would lack."""

from __future__ import annotations

import json
import subprocess
import sys

_SEEN = """
import json, os, sys
import orchestray.trainers.planning.preloaded
print(json.dumps([sorted(sys.modules), len(os.listdir("/proc/self/task"))]))
"""


def test_dry_runs_are_forked_with_the_modules_of_workers_and_without_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _SEEN], capture_output=True, text=True, check=True)
    modules, num_threads = json.loads(done.stdout)
    assert {"pandas", "pyarrow.compute", "sympy", "torch.fx.experimental.symbolic_shapes"} <= {*modules}
    assert {f"orchestray.trainers.planning.{name}" for name in ("dry_run", "served")} <= {*modules}
    assert num_threads == 1
