from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from orchestray.search.engine.messages import TrialTask
from orchestray.search.engine.processes import warm_modules
from orchestray.search.registry.programs import find_program


def test_a_process_that_starts_early_imports_the_module_that_its_task_needs() -> None:
    task = TrialTask(0, 1, config={}, begins=True)
    (module,) = warm_modules(task)
    assert vars(import_module(module))[find_program(task.program).__name__] is find_program(task.program)


def test_a_program_of_another_kind_is_imported_when_its_task_has_come() -> None:
    assert warm_modules(replace(TrialTask(0, 1, config={}, begins=True), program="gang")) == ()
