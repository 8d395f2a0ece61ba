"""A CPU run on a machine with GPUs makes no CUDA context, and starts as fast as where the GPUs are hidden."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from gpu.check import Place, Verdict, main

_BOUND = 1.1
_CODE = """
import json, os, time
began_s = time.perf_counter()
import torch
from gpu import training
replica = training.replica_of(training.DIGITS, torch.device("cpu"), steps=3)
training.trained(replica)
seconds = time.perf_counter() - began_s
touched, pids = torch.cuda.is_initialized(), []
if %r:
    from gpu.machine import processes_on_gpus
    from gpu.check import Skip
    try:
        pids = processes_on_gpus()
    except Skip:
        pass
print(json.dumps([seconds, touched or os.getpid() in pids]))
"""


def run(place: Place) -> Verdict:
    """Train in fresh processes, the GPUs visible and hidden in turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    touched = False
    for number in range(place.sized(10, 2)):
        hidden = number % 2 == 0
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if hidden:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        code = _CODE % (not place.is_rehearsal and not hidden)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        time_s, has_context = json.loads(done.stdout.splitlines()[-1])
        seconds[hidden].append(time_s)
        touched |= has_context
    ratio = statistics.median(seconds[False]) / statistics.median(seconds[True])
    holds = not touched and (place.is_rehearsal or ratio <= _BOUND)
    context = "a CUDA context" if touched else "no CUDA context"
    return Verdict(holds, f"{context}; start to third step {ratio:.2f} x that with hidden GPUs (<= {_BOUND:g} x)")


if __name__ == "__main__":
    main(run)
