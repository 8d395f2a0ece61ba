"""The process of one gang member: a thin actor that hosts one object and runs its methods.

A plain class, wrapped by `ray.remote` at the edge (`gang.py`), so that it is usable and testable without Ray. What it
hosts is named by an import path: this room knows no algorithm.
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

from orchestray.platform import collecting
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.listening import listens
from orchestray.platform.working_directory import import_torch

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

_NOT_THE_USERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
"""Where the code of Python and of installed packages is."""

_LOWEST_PRIORITY = 19
_STORE_TIMEOUT_S = 30.0

_MALLOC_OPTIONS = (
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: free memory at the top that is kept
    (-3, 32 * 2**20),  # M_MMAP_THRESHOLD, at its maximum: what is larger is mapped, and unmapped when freed
    (-2, 64 * 2**20),  # M_TOP_PAD: what is asked for beside the need when the heap grows
)
"""Options of malloc.h, which has them as macros."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Failure:
    """An exception of a member as data: what it was, where, and which type the caller shall raise."""

    error: OrchestrayError
    traceback: str


@dataclass(frozen=True)
class Identity:
    """Where a member lives."""

    pid: int
    node: str
    """IP address of its node."""


@dataclass(frozen=True)
class Meeting:
    """What the members of a gang need to find each other: one for every generation of the gang."""

    generation: int
    host: str
    port: int
    size: int
    timeout_s: float


class Member:
    """Hosts one object of one gang member. Methods return a `Failure` in place of raising."""

    def __init__(self, num_threads: int) -> None:
        # Before torch is imported: OpenMP reads these once. Without them every worker takes every core.
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        keep_freed_memory()
        self._num_threads = num_threads
        self._hosted: Any = None
        self._refusal: Failure | None = None
        """Why the object could not be built."""
        self._abandoned = 0
        """The latest generation that will not come about."""
        self._store: Any = None

    def identify(self) -> Identity:
        return Identity(pid=os.getpid(), node=_node_address())

    def host(self, target: str, *arguments: Any) -> Failure | None:
        """Build the object to host, in place of an earlier one, which is closed: `target` is "module:callable"."""

        def build() -> None:
            import_torch()
            import torch

            if self._hosted is not None:
                self._hosted.close()
                self._hosted = None

            torch.set_num_threads(self._num_threads)
            module, _, name = target.partition(":")
            with collecting.pause():
                factory = getattr(importlib.import_module(module), name)
            self._hosted = factory(*arguments)

        self._refusal = as_data(build)
        return self._refusal

    def linger(self) -> None:
        """Never return: who waits for this learns of the process's end."""
        threading.Event().wait()

    def prepare(self, target: str) -> None:
        """Import what `host` will need, with the time that others leave; what goes wrong shows in `host`."""

        def load() -> None:
            # On Linux a thread has a priority of its own: the process goes back to its own with the thread's end.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            with contextlib.suppress(Exception), collecting.pause():
                import_torch()
                importlib.import_module(target.partition(":")[0])

        thread = threading.Thread(target=load, name="prepare")
        thread.start()
        thread.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of the hosted object in the member's one working thread."""
        if self._refusal is not None:
            return self._refusal
        return as_data(lambda: getattr(self._hosted, method)(*arguments))

    def control(self, method: str, *arguments: Any) -> Any:
        """Run a method of the hosted object beside the working thread: it must be safe to call at any time."""
        if self._hosted is None:
            return None
        return as_data(lambda: getattr(self._hosted, method)(*arguments))

    def open_store(self) -> tuple[str, int]:
        """Serve a rendezvous store for one generation; returns its host and port."""
        import torch.distributed as dist

        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - nodes must reach it
        return _node_address(), self._store.port

    def join(self, meeting: Meeting, rank: int) -> bool:
        """Become `rank` of the meeting's process group, leaving the group of an earlier generation.

        Returns:
            Whether all came; False if the meeting was abandoned, or another member was lost on the way.
        """
        import torch.distributed as dist

        from orchestray.platform.process_groups import all_arrive, join_default_group

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
            join_default_group(store, rank, meeting.size, meeting.timeout_s)
        except RuntimeError:
            return False
        return True

    def abandon(self, generation: int) -> None:
        """Have a `join` under way give up: a member of that generation is lost."""
        self._abandoned = generation

    def flush(self) -> None:
        """Hand over what was printed: the process is about to be ended from outside.

        It never runs the interpreter's own way out, which torch's autograd and gloo threads abort at times after
        distributed work.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def as_data(action: Callable[[], Answer]) -> Answer | Failure:
    """What `action` returns, or its exception as a `Failure`."""
    try:
        return action()
    except OrchestrayError as error:
        return Failure(error, traceback.format_exc())
    except MemoryError:
        raise  # the process is in no state to go on: its death is what the driver shall see
    except Exception as error:  # noqa: BLE001 - errors travel as data; the driver raises them
        text = f"{type(error).__name__}: {error}{_place_of(error)}"
        return Failure(OrchestrayError(text), traceback.format_exc())


def _place_of(error: BaseException) -> str:
    """Where in the user's own code it was raised, in parentheses; nothing if no frame is of the user's code."""
    package = str(Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((package, *_NOT_THE_USERS)) and Path(frame.filename).is_file():
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next allocation, where it would give it back to the system.

    A training step frees and allocates the same tens of megabytes each time; given back, every page of them is faulted
    in again by the next step (2,600 faults and 6 ms of a 95 ms step, measured). Elsewhere than on glibc: nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _MALLOC_OPTIONS:
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Have glibc give to the system what `keep_freed_memory` has had it keep so far. Elsewhere: nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def pin_gloo_interface(address: str = "") -> None:
    """Let gloo use the interface of this address of the node's, not whatever the host name resolves to.

    Args:
        address: default: the one Ray knows this node by.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    address = address or _node_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
