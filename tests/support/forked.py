"""Processes that find torch imported: forks of one that has imported it once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from support.patience import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "orchestray.trainers.loop.replica"])


class Forked:
    """A process that runs a script as `python SCRIPT ARGUMENTS` would; it ends by SIGKILL with the `with` block."""

    def __init__(self, script: Path | str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start it.

        Args:
            script: The path of a program, or its text.
            arguments: What follows in `sys.argv`.
            env: Variables beside those of this process.
        """
        self._printed = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it is closed with this object
        variables = {**os.environ, **(env or {})}
        self._process = _CONTEXT.Process(
            target=_run, args=(script, arguments, variables, self._printed.name), daemon=True
        )
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._printed.close()

    def kill(self) -> None:
        """Kill it by SIGKILL, and return when it is dead."""
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Return its exit status when it has ended: minus the signal that killed it."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def printed(self) -> str:
        """Return what it has written to stdout and stderr."""
        return Path(self._printed.name).read_text(encoding="utf-8")


def _run(script: Path | str, arguments: tuple[str, ...], variables: Mapping[str, str], printed: str) -> None:
    with Path(printed).open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(variables)
    sys.argv = [str(script), *arguments]
    code = script.read_text(encoding="utf-8") if isinstance(script, Path) else script
    exec(compile(code, str(script) if isinstance(script, Path) else "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102
