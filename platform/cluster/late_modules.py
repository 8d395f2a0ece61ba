"""Packages that are in memory, and come into being for a program when it first imports them."""

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
    """Takes imported packages out of `sys.modules`; the first import of any brings all of them back.

    Until then the process looks, to who asks `sys.modules`, as if none had been imported. What they have read when
    they were, as environment variables, stays as it was then, but for what `come` sees to.

    Args:
        packages: names of top-level packages; those that are not imported are passed over.
        come: called with all that come back, by name, before any is to be seen. It must import none of them: a thread
            that waits for its end holds the lock of the module that it imports.
    """

    def __init__(self, packages: Sequence[str], come: Callable[[Mapping[str, ModuleType]], None]) -> None:
        self._specs: dict[str, ModuleSpec] = {}
        for name in packages:
            module = sys.modules.get(name)
            if module is not None and module.__spec__ is not None and module.__file__ is not None:
                self._specs[name] = module.__spec__
                # For good: a thread that asks while another brings them back is given this too, and must not run it.
                module.__spec__.loader = _Present(module, module.__file__, self._bring_back)
        names = [name for name in sys.modules if name.partition(".")[0] in self._specs]
        self.modules: Mapping[str, ModuleType] = {name: sys.modules.pop(name) for name in names}
        """Those that are out of sight, by name."""
        self._come = come
        self._lock = threading.RLock()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return self._specs.get(name)

    def _bring_back(self) -> None:
        with self._lock:
            if self.modules:
                self._come(self.modules)
                sys.modules.update(self.modules)  # at once: a package without its parts would have them run again
                self.modules = {}


class _Present(SourceFileLoader):
    """The loader of a module that has been loaded."""

    def __init__(self, module: ModuleType, path: str, bring_back: Callable[[], None]) -> None:
        super().__init__(module.__name__, path)
        self._module = module
        self._bring_back = bring_back

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Not when it is executed: then it is in `sys.modules` already, and counts as unfinished, which others wait for.
        self._bring_back()
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed."""


def use_threads_of_environment(torch: Any) -> None:
    """Have torch and numpy, loaded with one thread each, use as many as they would, were they loaded now.

    Of the variables that they read when they are loaded, the numbers of threads alone are obeyed here.
    """
    num_cpus = len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():
        # oneMKL's default; by its own default (MKL_DYNAMIC) also what it takes at most.
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
    """Of threads, by the first of these variables that says one (OpenMP's may be a list, by level); 0 if none does."""
    firsts = (os.environ.get(name, "").partition(",")[0].strip() for name in names)
    return next((int(text) for text in firsts if text.isdigit() and int(text) > 0), 0)


def _num_cores() -> int:
    """Physical cores among the CPUs that this process may use; each CPU counts where the kernel does not say."""
    cpus, kernel = os.sched_getaffinity(0), Path("/sys/devices/system/cpu")
    try:
        return len({(kernel / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus})
    except OSError:
        return len(cpus)
