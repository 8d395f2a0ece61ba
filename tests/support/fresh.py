"""Modules that a piece of code loads: one fresh interpreter answers for several pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, sys
loaded = {}
for name, code in json.load(sys.stdin).items():
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
    loaded[name] = sorted(sys.modules)
print()
print(json.dumps(loaded))
"""


def loaded_after(steps: Mapping[str, str]) -> dict[str, set[str]]:
    """Run one step after the other in a fresh interpreter.

    Returns:
        By the name of a step all modules that are loaded after it, those of the steps before it too: a step that loads
        none of some modules comes before those that do.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, modules in json.loads(done.stdout.splitlines()[-1]).items()}
