"""The layers of the product: a folder imports folders of lower layers only, and never one beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("platform", "trainers", "search", "serving")
TOP_FLOOR = ("cli", "dashboard", "loadtest")
"""Folders that stand in src/orchestray itself, and may import every room."""

LAYERS = """
    platform.errors

    platform.process  platform.usercode
    platform.config  platform.data  platform.task  platform.terminal
    platform.comm.channel  platform.jobs  platform.run
    platform.comm  platform.cluster  platform.report
    platform.comm.allreduce  platform.sim  platform.actors

    trainers  trainers.ps  trainers.ps.variants  trainers.parallel.pipeline.schedules
    trainers.aggregation  trainers.compression  trainers.layout  trainers.optim  trainers.trackers
    trainers.core  trainers.solvers
    trainers.few_bits
    trainers.analysis  trainers.parallel.pipeline  trainers.parallel.tensor  trainers.sync.common
    trainers.parallel.recompute  trainers.ensemble  trainers.machine
    trainers.sync.allreduce  trainers.sync.robust  trainers.sync.zero  trainers.tasks
    trainers.parallel  trainers.sync.local
    trainers.survey  trainers.survey.cluster  trainers.survey.consensus  trainers.survey.convergence
    trainers.survey.message_driven  trainers.survey.networks  trainers.survey.operators
    trainers.sync.compressed  trainers.survey.cost_models
    trainers.sync
    trainers.config
    trainers.saved  trainers.driver.runlog  trainers.ps.protocol
    trainers.distill  trainers.shrink
    trainers.loop  trainers.survey.lab  trainers.validate
    trainers.ps.coordinator
    trainers.ps.server
    trainers.ps.durability  trainers.ps.variants.hierarchy  trainers.ps.worker
    trainers.ps.variants.hogwild  trainers.ps.variants.model_parallel  trainers.survey.data_centres
    trainers.ps.hosts
    trainers.planning
    trainers.driver.control
    trainers.driver.servers
    trainers.driver.engines
    trainers.driver

    search.methods
    search.spaces.architectures
    search.spaces  search.spaces.drawing
    search.methods.controllers  search.methods.evolution  search.methods.hyper  search.methods.population
    search.methods.one_shot
    search.trials
    search.checkpoints  search.trials.one_shot
    search.registry
    search.config
    search.results  search.simulation
    search.engine
    search.tune
    search

    serving.runtime
    serving.batching.policies
    serving.batching
    serving.config
    serving.models
    serving.routing  serving.sharded
    serving.http  serving.replicas
    serving.generation  serving.http.overload
    serving.http.server
    serving.application
    serving.lifecycle
    serving.api
    serving

    loadtest  dashboard
    cli
    moved
    facade
"""
"""A line a layer, from the ground up. `search` and `serving` stand beside each other: neither imports the other."""


def level_of() -> dict[str, int]:
    """Return the layer of each folder, by its number."""
    lines = [line.split() for line in LAYERS.splitlines() if line.strip()]
    return {folder: number for number, folders in enumerate(lines) for folder in folders}


def module_files() -> dict[str, Path]:
    """Return every module of the product by its dotted name without `orchestray.`."""
    files = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            files[_dotted(file.relative_to(ROOT))] = file
    package = ROOT / "src" / "orchestray"
    for folder in TOP_FLOOR:
        for file in (package / folder).rglob("*.py"):
            files[_dotted(file.relative_to(package))] = file
    files["facade"], files["moved"] = package / "__init__.py", package / "moved.py"
    return files


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = module_files()
_NAMED = ("getLogger", "get_tracer")
_OF_MODULE = re.compile(r"orchestray\.([a-z_0-9.]+?)(:\w+)?")


def folder_of(module: str) -> str:
    """Return the folder of a module. One that stands in a room itself is a folder of its own where it is listed."""
    if module in LEVELS:
        return module
    return module.rpartition(".")[0] or module


def imported_modules(source: str) -> Iterator[str]:
    """Yield the modules of the product that a text imports: by statement, late or not, and by a string that names one.

    Imports for type checkers alone are left out.
    """
    yield from _imported(ast.parse(source))


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for statement in child.orelse:
                yield from _imported(statement)
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _NAMED:
            continue  # a logger may have a room's name
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "orchestray":
            yield f"orchestray.{child.attr}"  # the facade loads what it is asked for
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            named = _OF_MODULE.fullmatch(child.value)
            if named and named[1] in FILES:
                yield f"orchestray.{named[1]}"
        yield from _imported(child)


def upward_imports(module: str, source: str) -> list[str]:
    """Return what a module of the product imports from its own layer's other folders, or from layers above.

    Args:
        module: its dotted name without `orchestray.`.
        source: its text.
    """
    own = folder_of(module)
    found = []
    for imported in imported_modules(source):
        package, _, name = imported.partition(".")
        if package in ("trainers", "search", "serving") or (package == "platform" and name.partition(".")[0] in _BARE):
            found.append(imported)
        if package != "orchestray" or not name or name.startswith("__"):
            continue
        while name and name not in FILES:
            name = name.rpartition(".")[0]
        other = folder_of(name) if name else "facade"
        if other == own:
            continue
        beside = {own.partition(".")[0], other.partition(".")[0]} == {"search", "serving"}
        if LEVELS[other] >= LEVELS[own] or beside:
            found.append(imported)
    return found


LEVELS = level_of()
_BARE = {entry.stem for entry in (ROOT / "platform").iterdir()}
