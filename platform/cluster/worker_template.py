"""A process with torch, pandas and most of Ray's dependencies loaded, forked for every worker that the raylet starts.

It runs as a script, with the path of the socket on which `worker_shim.py` sends requests. It has one thread, runs no
user code, and connects to nothing. It ends when its standard input closes, or with the process that started it. A fork
leaves the serving loop with its request and becomes Ray's worker.

From there on it differs from a normally started worker in three ways:

- It need not import the modules that are loaded here.
- Arrow's allocator returns memory without a thread for it.
- Of the variables that torch, numpy and Arrow read at import, only the numbers of threads apply if a program sets them
  later.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # if it is set, Python adds no folder there
    # The folder of Ray's worker, as in a plain start, instead of this one, whose names would hide the standard
    # library's.
    sys.path[0] = os.path.dirname(sys.argv[2])  # noqa: PTH120

import contextlib
import gc
import importlib
import marshal
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any

from orchestray.platform.cluster.late_modules import LateModules, use_threads_of_environment
from orchestray.platform.process import gc_control

_READ_TIMEOUT_S = 5.0
_SHORTAGE_S = 0.5
"""Seconds after which a request is tried again if file descriptors or memory were short."""
_NUM_BYTES_AT_ONCE = 1 << 16
_NUM_BYTES_OF_SIZE = 8
_NUM_STREAMS = 3
_SURE = b"+"
_NO_THREADS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables set during the imports: threads of BLAS and of Arrow's allocator would be missing in a fork."""
_LATE = ("torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "pyarrow", "pandas", "dateutil", "pytz")
"""Packages that a normally started worker has not yet imported when its first task comes."""
_OF_DATA = ("pyarrow.compute", "pandas")
"""Modules that Arrow imports as soon as it makes a column of numbers, as a run's data contain."""
_OF_RAY = (
    "filelock",
    "google.protobuf.descriptor_pool",
    "google.protobuf.internal.builder",
    "jsonschema",
    "msgpack",
    "packaging.version",
    "pydantic.v1",
    "requests",
    "uvloop",
    "yaml",
)
"""Modules of other packages that Ray imports, without starting a thread: two thirds of its import time."""
_OF_THE_WORKER = ("RAY_", "SPT_NOENV", "PL_DISABLE_FORK")
"""Beginnings of variables that only Ray and Lightning read, which are not loaded here.

The raylet, Ray Train, Tune and Serve set some.
"""
_OF_THE_SETUP = ("--language=", "--serialized-runtime-env-context=")
"""Arguments that Ray's setup_worker.py does not pass on."""

Request = tuple[list[str], dict[str, str], tuple[str, int, int, list[int], str]]
"""A worker's arguments, its environment, and the result of `worker_shim.own`."""


def main(address: str) -> None:
    """Serve forks at this address until the standard input closes; a fork returns once its worker is finished."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as in Ray's servers, and thus in workers
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)  # noqa: PTH101
        listener.listen(64)
        environment = dict(os.environ)
        late = load()
        os.chdir("/")
        if not is_single_threaded():
            say("Something imported here has started threads, which a fork would lack: all workers start plainly.")
            return
        request = serve(listener, environment)
    if request is not None:
        seed(late.modules)
        become_worker(request[0])


def load() -> LateModules:
    """Import what workers import, and hide it until the worker asks for it."""
    import_modules()
    late = LateModules(_LATE, come)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every shared page
    return late


def import_modules() -> None:
    """Import what workers import, except Ray itself: Ray reads a worker's variables when it is loaded."""
    before = dict(os.environ)
    os.environ.update(_NO_THREADS)
    with gc_control.pause():
        import numpy.random  # noqa: F401
        import threadpoolctl  # noqa: F401 - imported here because it sets a variable: KMP_DUPLICATE_LIB_OK
        import torch
        import torch.fx.experimental.symbolic_shapes  # noqa: F401 - with sympy: a first backward pass imports it

        for name in (*_OF_DATA, *_OF_RAY):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)


def come(modules: Mapping[str, ModuleType]) -> None:
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")  # as threadpoolctl does, which is not loaded again
    use_threads_of_environment(modules["torch"])


def seed(modules: Mapping[str, Any]) -> None:
    """Give new seeds to the generators that all forks inherit; Python's own reseeds itself."""
    modules["numpy"].random.seed()
    modules["torch"].default_generator.seed()
    if "sympy.core.random" in modules:
        modules["sympy.core.random"].rng.seed()


def is_single_threaded() -> bool:
    return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208


def serve(listener: socket.socket, environment: dict[str, str]) -> Request | None:
    """Fork on request: return the request in the fork, and None here once the standard input has closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # too few descriptors or too little memory: requests stay in the queue
            say(f"No request can be taken now: {error}.")
            select([sys.stdin], [], [], _SHORTAGE_S)
            continue
        with connection:
            if (request := answer(connection, environment)) is not None:
                return request
    return None


def answer(connection: socket.socket, environment: dict[str, str]) -> Request | None:
    """Fork if the request allows it: return the request in the fork, and None here.

    A shim whose connection is closed without an answer starts its worker normally.
    """
    streams: list[int] = []
    try:
        connection.settimeout(_READ_TIMEOUT_S)
        request = read(connection, streams)
        if fits(request, environment) and os.fork() == 0:
            return in_place_of(connection, request, streams)
    except Exception as error:  # noqa: BLE001 - the one template must survive any bad request
        say(f"A worker starts plainly, for its request failed: {error!r}.")
    finally:
        for stream in streams:
            os.close(stream)
    return None


def read(connection: socket.socket, streams: list[int]) -> Request:
    """Read a shim's request, and add its standard streams to `streams`, which the caller has to close."""
    head, received, _, _ = socket.recv_fds(connection, _NUM_BYTES_OF_SIZE, _NUM_STREAMS)
    streams += received
    if len(head) != _NUM_BYTES_OF_SIZE or len(received) != _NUM_STREAMS:
        raise EOFError
    left = int.from_bytes(head, "little")
    parts = []
    while left:
        parts.append(connection.recv(min(left, _NUM_BYTES_AT_ONCE)))
        left -= len(parts[-1])
        if not parts[-1]:
            raise EOFError
    request: Request = marshal.loads(b"".join(parts))  # noqa: S302 - from the same user, by the socket's mode
    return request


def fits(request: Request, environment: dict[str, str]) -> bool:
    """Return True if the request's environment is the one in which everything here was imported."""
    names = {name for name, value in request[1].items() ^ environment.items()}
    if others := {name for name in names if not name.startswith(_OF_THE_WORKER)}:
        say(f"A worker starts plainly, for its {', '.join(sorted(others))} in the environment.")
    return not others


def say(sentence: str) -> None:
    """Write a sentence to the log; ignore errors, as a full log must not end the template."""
    with contextlib.suppress(OSError):
        sys.stderr.write(sentence + "\n")


def in_place_of(connection: socket.socket, request: Request, streams: list[int]) -> Request:
    """Turn this process into the worker that the shim stands for; exit if the shim has given up or anything fails."""
    try:
        _, environment, (directory, umask, niceness, cpus, oom_score) = request
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # as the raylet starts its workers: it ends their descendants by process group
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(environment)
        os.umask(umask)
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        os.sched_setaffinity(0, cpus)
        with contextlib.suppress(OSError):  # a lower score than its own needs root
            Path("/proc/self/oom_score_adj").write_text(oom_score)
        with contextlib.suppress(OSError):  # the folder was deleted: any other will do
            os.chdir(directory)
        connection.sendall(_SURE)
        if connection.recv(1) == _SURE:
            return request
    except BaseException:  # noqa: BLE001, S110 - a fork must never return to the loop: there is one template
        pass
    os._exit(1)


def become_worker(arguments: list[str]) -> None:
    """Run Ray's worker as if Python had been started with these arguments."""
    sys.argv = [argument for argument in arguments if not argument.startswith(_OF_THE_SETUP)]
    main_module = ModuleType("__main__")
    main_module.__file__ = arguments[0]
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    for name in [name for name in sys.modules if name.partition(".")[0] == "orchestray"]:
        del sys.modules[name]  # the driver may use another copy, in a folder that Ray puts on the path
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main_module.__dict__)  # noqa: S102 - Ray's own


if __name__ == "__main__":
    main(sys.argv[1])
