"""Workers of a Ray of our own are forked from a process that has their imports done.

Importing Ray takes a worker process 0.9 s of CPU time, torch 1.5 s, pandas and what the first way back through a model
imports 0.7 s, and a run of two replicas, a search, or a recovery pays that for each. `start_template` starts the one
process that pays it (`worker_template.py`); the raylet starts `worker_shim.py` in place of Ray's own script, which has
the template fork. Anything out of the ordinary starts plainly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NAME = "worker_template"
SHIM = str(Path(__file__).with_name("worker_shim.py"))

_SWITCH = "ORCHESTRAY_FORK_WORKERS"


def is_wanted() -> bool:
    """On Linux, unless the environment variable ORCHESTRAY_FORK_WORKERS says 0."""
    return sys.platform == "linux" and os.environ.get(_SWITCH, "1") != "0"


def start_template(node: Any) -> Any:
    """Start the process that workers of this Ray node are forked from; returns Ray's description of a process.

    It ends when its standard input does, which no other process holds open: with the one that started it, however that
    ends. Ray's own way to start a server is of no use: that one gets another malloc (jemalloc) than workers have.
    """
    from ray._private import services

    script, address = Path(__file__).with_name("worker_template.py"), Path(node.get_sockets_dir_path(), NAME)
    worker = Path(services.RAY_PATH, "_private", "workers", "default_worker.py")
    output, errors = node.get_log_file_handles(NAME, unique=True)
    with output, errors:
        process = subprocess.Popen(
            [sys.executable, str(script), str(address), str(worker)],
            stdin=subprocess.PIPE,
            env=dict(os.environ),  # as Ray's servers get it: without what C libraries have put in it meanwhile
            stdout=output,
            stderr=errors,
            process_group=0,  # a signal to the driver's group is not for the workers
        )
    return services.ProcessInfo(
        process=process,
        stdout_file=output.name,
        stderr_file=errors.name,
        use_valgrind=False,
        use_gdb=False,
        use_valgrind_profiler=False,
        use_perftools_profiler=False,
        use_tmux=False,
    )
