"""A worker that was forked from the template computes on a GPU: the template has not touched CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

from gpu.check import Place, Verdict, main

_CODE = """
import os, sys, torch
from orchestray.platform.cluster import worker_template
worker_template.import_modules()
if torch.cuda.is_initialized():
    sys.exit("the template has started CUDA")
if (child := os.fork()) == 0:
    import gpu.training as training
    replica = training.replica_of(training.DIGITS, torch.device(sys.argv[1]), steps=2)
    os._exit(0 if len(training.trained(replica)) == 2 else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run(place: Place) -> Verdict:
    """Import what the template imports, fork, and train two steps in the child."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CODE, str(place.device())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    if done.returncode:
        return Verdict(False, f"the forked worker failed: {reason[0]}")
    return Verdict(True, f"a fork of the template trained on {place.device()}")


if __name__ == "__main__":
    main(run)
