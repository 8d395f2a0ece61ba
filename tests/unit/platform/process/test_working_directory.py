"""A process whose working directory is deleted under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE_S

_BEFORE = """
import os, sys
os.chdir(sys.argv[1])
before = os.getcwd()
"""
_AFTER = """
from orchestray.platform.process.working_directory import import_torch
import_torch()
import torch
print(float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()), os.path.isdir("."))
"""


def run(code: str, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_torch_loads_though_the_directory_is_gone(tmp_path: Path) -> None:
    assert run(_BEFORE + "os.rmdir(before)\n" + _AFTER, tmp_path) == ["512.0", "True"]


def test_the_directory_stays_the_same_if_it_is_there(tmp_path: Path) -> None:
    assert run(_BEFORE + _AFTER + "print(os.getcwd() == before)\n", tmp_path) == ["512.0", "True", "True"]
