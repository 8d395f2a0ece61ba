"""Workers of our own Ray cluster are forked from a process that has already done their imports.

The imports of a worker process take 0.9 s of CPU time for Ray and 1.5 s for torch. Pandas and the imports of a first
backward pass take another 0.7 s. Runs of two replicas, searches and recoveries would pay that for each worker.
`start_template` starts one process that pays it once (`worker_template.py`). The raylet starts `worker_shim.py` instead
of Ray's own script, and the shim makes the template fork. Workers with unusual requirements are started the normal way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestray.platform.cluster import ray_internals

NAME = "worker_template"
SHIM = str(Path(__file__).with_name("worker_shim.py"))

_SWITCH = "ORCHESTRAY_FORK_WORKERS"


def is_wanted() -> bool:
    """Return True on Linux, unless the environment variable ORCHESTRAY_FORK_WORKERS is 0."""
    return sys.platform == "linux" and os.environ.get(_SWITCH, "1") != "0"


def start_template(node: Any) -> Any:
    """Start the process that the workers of this Ray node are forked from; return Ray's description of the process.

    It ends when its standard input closes. Only this process holds that open, so the template ends with it in any case.
    Ray's own function to start a server does not fit, because it uses another malloc (jemalloc) than workers have.
    """
    script, address = Path(__file__).with_name("worker_template.py"), Path(node.get_sockets_dir_path(), NAME)
    worker = Path(ray_internals.find("ray._private.services:RAY_PATH"), "_private", "workers", "default_worker.py")
    output, errors = node.get_log_file_handles(NAME, unique=True)
    with output, errors:
        process = subprocess.Popen(
            [sys.executable, str(script), str(address), str(worker)],
            stdin=subprocess.PIPE,
            env=dict(os.environ),  # as Ray's servers get it: without what C libraries have added meanwhile
            stdout=output,
            stderr=errors,
            process_group=0,  # signals to the driver's group must not reach the workers
        )
    return ray_internals.find("ray._private.services:ProcessInfo")(
        process=process,
        stdout_file=output.name,
        stderr_file=errors.name,
        use_valgrind=False,
        use_gdb=False,
        use_valgrind_profiler=False,
        use_perftools_profiler=False,
        use_tmux=False,
    )
