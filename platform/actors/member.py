"""The process of one gang member: a thin actor that hosts one object and runs its methods.

`Member` is a plain class, which `gang.py` wraps with `ray.remote`, so that it can be used and tested without Ray. The
hosted object is named by an import path: this package contains no algorithm.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestray.platform.actors.gpus import assigned_gpus, own_gpu
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process import gc_control
from orchestray.platform.process.output import join_output
from orchestray.platform.process.pulse import PULSE, Sign
from orchestray.platform.process.sockets import listens
from orchestray.platform.process.working_directory import import_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.comm.backend import BackendKind

Answer = TypeVar("Answer")

_NOT_THE_USERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Directories of the standard library and of installed packages."""

_LOWEST_PRIORITY = 19
_STORE_TIMEOUT_S = 30.0

_MALLOC_OPTIONS = (
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: free memory kept at the top of the heap
    (-3, 32 * 2**20),  # M_MMAP_THRESHOLD, at its maximum: larger blocks are mapped, and unmapped when freed
    (-2, 64 * 2**20),  # M_TOP_PAD: memory requested beyond the need when the heap grows
)
"""Options of malloc.h, which defines them as macros."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Failure:
    """An exception of a member as data: the error that the caller raises, and its traceback."""

    error: OrchestrayError
    traceback: str


@dataclass(frozen=True)
class Identity:
    """The process id and the node of a member."""

    pid: int
    node: str
    """IP address of the member's node."""
    output: str = ""
    """Path of the file there that has what it prints; empty: there is none."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that Ray has assigned to it there."""


@dataclass(frozen=True)
class Meeting:
    """The rendezvous data of one generation of a gang: store address, number of members, timeout and backend."""

    generation: int
    host: str
    port: int
    size: int
    timeout_s: float
    backend: BackendKind = "gloo"


class Member:
    """A gang member's process, which hosts one object. Methods return a `Failure` instead of raising."""

    def __init__(self, num_threads: int) -> None:
        # Before torch is imported: OpenMP reads these once. Without them every worker uses every core.
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        keep_freed_memory()
        self._num_threads = num_threads
        self._output = join_output()
        self._hosted: Any = None
        self._refusal: Failure | None = None
        """Failure that prevented the object from being built."""
        self._abandoned = 0
        """Latest generation whose meeting was abandoned."""
        self._store: Any = None

    def identify(self) -> Identity:
        return Identity(os.getpid(), _node_address(), self._output, assigned_gpus())

    def look(self) -> Sign | None:
        """Return how the work of `call` goes on; None if there is none."""
        return PULSE.sign()

    def host(self, target: str, *arguments: Any) -> Failure | None:
        """Build the object to host from `target` ("module:callable"), and close the one hosted before."""

        def build() -> None:
            import_torch()
            import torch

            if self._hosted is not None:
                self._hosted.close()
                self._hosted = None

            torch.set_num_threads(self._num_threads)
            module, _, name = target.partition(":")
            with gc_control.pause():
                factory = getattr(importlib.import_module(module), name)
            self._hosted = factory(*arguments)

        self._refusal = as_data(build)
        return self._refusal

    def linger(self) -> None:
        """Block for ever: callers that wait for the answer learn of the process's end."""
        threading.Event().wait()

    def prepare(self, target: str) -> None:
        """Import what `host` will need, at the lowest priority; errors are left for `host` to report."""

        def load() -> None:
            # On Linux a thread has its own priority, so the process is back at its normal one when the thread ends.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            with contextlib.suppress(Exception), gc_control.pause():
                import_torch()
                importlib.import_module(target.partition(":")[0])

        thread = threading.Thread(target=load, name="prepare")
        thread.start()
        thread.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of the hosted object in the member's single working thread."""
        if self._refusal is not None:
            return self._refusal
        with PULSE.work():
            return as_data(lambda: getattr(self._hosted, method)(*arguments))

    def control(self, method: str, *arguments: Any) -> Any:
        """Run a method of the hosted object beside the working thread: it must be safe to call at any time."""
        if self._hosted is None:
            return None
        return as_data(lambda: getattr(self._hosted, method)(*arguments))

    def open_store(self) -> tuple[str, int]:
        """Serve a rendezvous store for one generation, and return its host and port."""
        import torch.distributed as dist

        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - nodes must reach it
        return _node_address(), self._store.port

    def join(self, meeting: Meeting, rank: int) -> bool:
        """Join the meeting's process group as `rank`, after leaving the group of an earlier generation.

        Returns:
            True if all members joined; False if the meeting was abandoned or another member was lost on the way.
        """
        import torch.distributed as dist

        from orchestray.platform.comm.process_groups import Backend, all_arrive, join_default_group

        pin_gloo_interface()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        if self._abandoned >= meeting.generation or not listens(meeting.host, meeting.port, _STORE_TIMEOUT_S):
            return False
        try:
            timeout = timedelta(seconds=_STORE_TIMEOUT_S)
            served = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            store = dist.PrefixStore(f"generation-{meeting.generation}", served)
            if not all_arrive(store, meeting.size, lambda: self._abandoned >= meeting.generation):
                return False
            backend = Backend(meeting.backend, own_gpu() if meeting.backend == "nccl" else None)
            join_default_group(store, rank, meeting.size, meeting.timeout_s, backend)
        except RuntimeError:
            return False
        return True

    def abandon(self, generation: int) -> None:
        """Make a `join` in progress give up: a member of that generation is lost."""
        self._abandoned = generation

    def flush(self) -> None:
        """Flush stdout and stderr: the process is about to be killed from outside.

        It never exits through the interpreter, because torch's autograd and gloo threads sometimes abort there after
        distributed work.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def as_data(action: Callable[[], Answer]) -> Answer | Failure:
    """Return the result of `action`, or its exception as a `Failure`."""
    try:
        return action()
    except OrchestrayError as error:
        return Failure(error, traceback.format_exc())
    except MemoryError:
        raise  # the process cannot continue: the driver has to see it die
    except SystemExit as error:  # the user's code gives up: another process would come to the same end
        text = f"The task ended its process: {exit_text(error)}{_place_of(error)}"
        return Failure(OrchestrayError(text), traceback.format_exc())
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - errors travel as data; the driver raises them
        text = f"{type(error).__name__}: {error}{_place_of(error)}"
        return Failure(OrchestrayError(text), traceback.format_exc())


def exit_text(error: SystemExit) -> str:
    """Return what `sys.exit` was called with, as the user wrote it."""
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def _place_of(error: BaseException) -> str:
    """Return the innermost place in the user's own code, in parentheses; empty if no frame is the user's."""
    package = str(Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((package, *_NOT_THE_USERS)) and Path(frame.filename).is_file():
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the system.

    Each training step frees and allocates the same tens of megabytes. If they were returned, the next step would fault
    in every page again (2,600 faults and 6 ms of a 95 ms step, measured). Does nothing without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOC_OPTIONS:
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Make glibc return the memory that `keep_freed_memory` made it keep. Does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def pin_gloo_interface(address: str = "") -> None:
    """Make gloo use the interface with this address, rather than the one the host name resolves to.

    Args:
        address: IP address of this node; default: the one by which Ray knows it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    address = address or _node_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
