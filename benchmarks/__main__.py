"""Run a benchmark by its name: `python benchmarks step_time --quick`. Without a name, print the names there are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_RUNS = 'if __name__ == "__main__":'
_CHECKS = "gpu"
"""Folder of checks on GPUs, which compare nothing: its own run_all.sh runs them."""


def main() -> None:
    """Replace this process by the one of the named file, with the folder of benchmarks on its path."""
    candidates = (file for file in sorted(FOLDER.glob("*/*.py")) if file.parent.name != _CHECKS)
    files = {file.stem: file for file in candidates if _RUNS in file.read_text(encoding="utf-8")}
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        for folder in dict.fromkeys(file.parent.name for file in files.values()):
            print(f"{folder}: {', '.join(name for name, file in files.items() if file.parent.name == folder)}")
        return
    name, *arguments = sys.argv[1:]
    if name not in files:
        sys.exit(f"there is no benchmark {name!r}: `python benchmarks` prints the names")
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    # Without -P the file's own folder would come first, where names of files hide modules of others.
    command = [sys.executable, "-P", str(files[name]), *arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})  # noqa: S606 a shell would add nothing


if __name__ == "__main__":
    main()
