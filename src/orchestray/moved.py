"""Modules that a user's own file may import under the names of version 0.1: they are found, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_SPACES = "orchestray.search.spaces"
MOVED: Mapping[str, str] = {
    **{
        f"{_SPACES}.{name}": f"{_SPACES}.architectures.{name}"
        for name in (
            "base",
            "cell",
            "chain",
            "choices",
            "genetic",
            "hierarchical",
            "inherit",
            "layer_graph",
            "modules",
            "network",
            "operations",
            "plan",
            "planned",
            "topology",
        )
    },
    f"{_SPACES}.draw": f"{_SPACES}.drawing.draw",
    "orchestray.platform.run.load": "orchestray.trainers.saved.run",
    "orchestray.search.engine.scheduler": "orchestray.search.tune.scheduler",
    "orchestray.search.engine.searcher": "orchestray.search.tune.searcher",
    "orchestray.search.methods.registry": "orchestray.search.registry.methods",
    "orchestray.serving.deployments": "orchestray.serving.replicas",
    "orchestray.serving.deployments.scaling": "orchestray.serving.replicas.scaling",
    "orchestray.trainers.consolidation": "orchestray.trainers.ensemble",
    "orchestray.trainers.consolidation.snapshots": "orchestray.trainers.saved.snapshots",
    "orchestray.trainers.tensor": "orchestray.trainers.parallel.tensor",
    "orchestray.trainers.tensor.branches": "orchestray.trainers.parallel.tensor.branches",
    "orchestray.trainers.tensor.locality": "orchestray.trainers.parallel.tensor.locality",
}
"""New name of each module that docs or examples of version 0.1 import."""
_OUTSIDE: Mapping[str, str] = {
    "orchestray.search.tabular": "lab/tabular",
    "orchestray.serving.batching.simulation": "lab/batching_simulation.py",
    "orchestray.serving.deployments.price": "lab/price.py",
    "orchestray.serving.deployments.rehearsal": "lab/rehearsal.py",
}
"""Places, in the folder `benchmarks` of the repository, of modules of version 0.1 that the package no longer has."""


class _Finder(MetaPathFinder, Loader):
    """The last finder of modules, asked only for those that nothing else finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if place := _OUTSIDE.get(fullname):
            text = f"{fullname} is no longer part of the package; it is benchmarks/{place} in the repository"
            raise ModuleNotFoundError(f"{text}, for programs with `benchmarks` on their PYTHONPATH.", name=fullname)
        return ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module with what the new one holds."""
        now = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {now}; the old name goes with the next version", stacklevel=2)
        vars(module).update({name: value for name, value in vars(import_module(now)).items() if name[:2] != "__"})


def install() -> None:
    """Have old names found, once a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
