"""A process with torch, pandas and most of what Ray imports in memory, forked for every worker that the raylet starts.

Run as a script, with the path of the socket at which `worker_shim.py` asks. It has one thread, runs no user's code,
connects to nothing, and ends when its standard input does, or with the process that started it. A fork leaves the
loop with what it was asked for, and becomes Ray's worker: from there on it differs from one that was started plainly
in what it need not import, in that Arrow's allocator gives memory back without a thread for it, and in that of the
variables that torch, numpy and Arrow read when they are loaded it obeys, if they are set by a program rather than in
its environment, the numbers of threads alone.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # where it is set, Python puts no folder there
    # Of Ray's worker, as where it is started plainly; not this folder, whose names would hide the standard library's.
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

from orchestray.platform import collecting
from orchestray.platform.cluster.late_modules import LateModules, use_threads_of_environment

_READ_TIMEOUT_S = 5.0
_SHORTAGE_S = 0.5
"""Until it is looked again whether there are descriptors, or memory, to take a request."""
_NUM_BYTES_AT_ONCE = 1 << 16
_NUM_BYTES_OF_SIZE = 8
_NUM_STREAMS = 3
_SURE = b"+"
_NO_THREADS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""For the time of the imports: the threads of BLAS, and of the allocator of Arrow, would not come along into a fork."""
_LATE = ("torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "pyarrow", "pandas", "dateutil", "pytz")
"""What a plain worker has not imported when its first task comes."""
_OF_DATA = ("pyarrow.compute", "pandas")
"""Arrow looks for pandas as soon as it makes a column of numbers, and a run's data are such columns."""
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
"""What Ray imports of other packages, without a thread: two thirds of the time that its import takes."""
_OF_THE_WORKER = frozenset({"RAY_LD_PRELOAD_ON_WORKERS", "RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV"})
"""Variables that the raylet sets for a worker."""
_OF_THE_SETUP = ("--language=", "--serialized-runtime-env-context=")
"""Arguments that Ray's setup_worker.py keeps to itself."""

Request = tuple[list[str], dict[str, str], tuple[str, int, int, list[int], str]]
"""A worker's arguments, its environment, and what `worker_shim.own` says."""


def main(address: str) -> None:
    """Serve forks at this address until the standard input ends; returns in none but the forks, as finished workers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray has it in its servers, and so in workers
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
    """Import what workers do, but Ray itself: it reads the variables of a worker when it is loaded."""
    before = dict(os.environ)
    os.environ.update(_NO_THREADS)
    with collecting.pause():
        import numpy.random  # noqa: F401
        import threadpoolctl  # noqa: F401 - here, since it sets a variable: KMP_DUPLICATE_LIB_OK
        import torch
        import torch.fx.experimental.symbolic_shapes  # noqa: F401 - with sympy: the first way back through a model does

        for name in (*_OF_DATA, *_OF_RAY):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)
    late = LateModules(_LATE, come)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page of what all share
    return late


def come(modules: Mapping[str, ModuleType]) -> None:
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")  # as threadpoolctl does, which will not be loaded again
    use_threads_of_environment(modules["torch"])


def seed(modules: Mapping[str, Any]) -> None:
    """Seed the generators that all forks have from here; Python's own sees to itself."""
    modules["numpy"].random.seed()
    modules["torch"].default_generator.seed()
    if "sympy.core.random" in modules:
        modules["sympy.core.random"].rng.seed()


def is_single_threaded() -> bool:
    return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208


def serve(listener: socket.socket, environment: dict[str, str]) -> Request | None:
    """Fork for whoever asks: returns the request in the fork, None here once the standard input has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away what is left of an ended fork
    while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # of descriptors or memory there are too few: who asks waits in the queue
            say(f"No request can be taken now: {error}.")
            select([sys.stdin], [], [], _SHORTAGE_S)
            continue
        with connection:
            if (request := answer(connection, environment)) is not None:
                return request
    return None


def answer(connection: socket.socket, environment: dict[str, str]) -> Request | None:
    """Fork if that is what is asked for: returns the request in the fork, None here, whatever has been sent.

    Who gets no answer before the connection is closed starts plainly.
    """
    streams: list[int] = []
    try:
        connection.settimeout(_READ_TIMEOUT_S)
        request = read(connection, streams)
        if fits(request, environment) and os.fork() == 0:
            return in_place_of(connection, request, streams)
    except Exception as error:  # noqa: BLE001 - there is one template, for all
        say(f"A worker starts plainly, for its request failed: {error!r}.")
    finally:
        for stream in streams:
            os.close(stream)
    return None


def read(connection: socket.socket, streams: list[int]) -> Request:
    """What a shim asks for; its standard streams are put into `streams`, which is theirs who close them."""
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
    request: Request = marshal.loads(b"".join(parts))  # noqa: S302 - of the same user, by the socket's mode
    return request


def fits(request: Request, environment: dict[str, str]) -> bool:
    """Whether its environment is the one that everything here was imported in."""
    names = {name for name, value in request[1].items() ^ environment.items()}
    if others := names - _OF_THE_WORKER:
        say(f"A worker starts plainly, for its {', '.join(sorted(others))} in the environment.")
    return not others


def say(sentence: str) -> None:
    """To the log; what cannot be written there is no reason to end."""
    with contextlib.suppress(OSError):
        sys.stderr.write(sentence + "\n")


def in_place_of(connection: socket.socket, request: Request, streams: list[int]) -> Request:
    """Make this process what the shim is; ends it if the shim has not waited for that, or anything fails."""
    try:
        _, environment, (directory, umask, niceness, cpus, oom_score) = request
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # as the raylet starts its workers: it ends what they have started by their group
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(environment)
        os.umask(umask)
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        os.sched_setaffinity(0, cpus)
        with contextlib.suppress(OSError):  # lower than its own is for root alone
            Path("/proc/self/oom_score_adj").write_text(oom_score)
        with contextlib.suppress(OSError):  # deleted: any is better than none
            os.chdir(directory)
        connection.sendall(_SURE)
        if connection.recv(1) == _SURE:
            return request
    except BaseException:  # noqa: BLE001, S110 - nothing may lead back into the loop: there is one template
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
        del sys.modules[name]  # the driver's may be another, in a folder that Ray puts on the path
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main_module.__dict__)  # noqa: S102 - Ray's own


if __name__ == "__main__":
    main(sys.argv[1])
