"""Packages that are loaded but hidden from a program until it first imports one of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


class LateModules(MetaPathFinder):
    """A finder that hides imported packages from `sys.modules` until the first import of any brings all back.

    Until then, `sys.modules` looks as if none had been imported. Settings that they read while they were imported, such
    as environment variables, keep their values, except where `come` updates them.

    Args:
        packages: names of top-level packages; those that are not imported are ignored.
        come: called with all returning modules, by name, before any is visible. It must not import any of them, because
            a thread that waits for it holds the lock of the module that it imports.
    """

    def __init__(self, packages: Sequence[str], come: Callable[[Mapping[str, ModuleType]], None]) -> None:
        self._specs: dict[str, ModuleSpec] = {}
        for name in packages:
            module = sys.modules.get(name)
            if module is not None and module.__spec__ is not None and module.__file__ is not None:
                self._specs[name] = module.__spec__
                # Permanent: a thread that imports while another brings them back gets this loader too, and must not run
                # the module.
                module.__spec__.loader = _Present(module, module.__file__, self._bring_back)
        names = [name for name in sys.modules if name.partition(".")[0] in self._specs]
        self.modules: Mapping[str, ModuleType] = {name: sys.modules.pop(name) for name in names}
        """Hidden modules, by name."""
        self._come = come
        self._lock = threading.RLock()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return self._specs.get(name)

    def _bring_back(self) -> None:
        with self._lock:
            if self.modules:
                self._come(self.modules)
                sys.modules.update(self.modules)  # all at once: a package without its submodules would run them again
                self.modules = {}


class _Present(SourceFileLoader):
    """A loader of a module that is already loaded."""

    def __init__(self, module: ModuleType, path: str, bring_back: Callable[[], None]) -> None:
        super().__init__(module.__name__, path)
        self._module = module
        self._bring_back = bring_back

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Not in exec_module: by then the module is in `sys.modules` as unfinished, and other threads wait for it.
        self._bring_back()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module was executed when it was first loaded."""


def use_threads_of_environment(torch: Any) -> None:
    """Set the threads of torch and numpy, loaded with one thread each, to what they would choose if loaded now.

    Of the variables that they read at import, only the numbers of threads are applied here.
    """
    num_cpus = len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():
        # oneMKL's default; with its default setting MKL_DYNAMIC this is also its maximum.
        num_cores = _num_cores()
        num_threads = _number("MKL_NUM_THREADS", "OMP_NUM_THREADS") or num_cores
        is_dynamic = os.environ.get("MKL_DYNAMIC", "").upper() != "FALSE"
        torch.set_num_threads(min(num_threads, num_cores) if is_dynamic else num_threads)
    else:
        torch.set_num_threads(_number("OMP_NUM_THREADS") or num_cpus)
    num_threads = _number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS") or num_cpus
    if num_threads != 1:
        import threadpoolctl

        threadpoolctl.threadpool_limits(min(num_threads, num_cpus), user_api="blas")


def _number(*names: str) -> int:
    """Return the number of threads in the first variable that has one (OpenMP's may be a list); 0 if none has."""
    firsts = (os.environ.get(name, "").partition(",")[0].strip() for name in names)
    return next((int(text) for text in firsts if text.isdigit() and int(text) > 0), 0)


def _num_cores() -> int:
    """Count the physical cores among the CPUs this process may use; if the kernel does not report cores, count CPUs."""
    cpus, kernel = os.sched_getaffinity(0), Path("/sys/devices/system/cpu")
    try:
        return len({(kernel / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus})
    except OSError:
        return len(cpus)
