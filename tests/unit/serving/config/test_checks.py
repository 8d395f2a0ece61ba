"""Checks of what an endpoint cannot start with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from orchestray.platform.errors import ConfigError


def test_a_propagator_that_is_not_installed_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def echo(batch):\n    return batch\n")
    command = [sys.executable, "-m", "orchestray.cli.app", "serve", f"{file}:echo", "--runs-dir", str(tmp_path)]
    variables = {**os.environ, "OTEL_PROPAGATORS": "tracecontext,nope"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_status
    assert "OTEL_PROPAGATORS: Propagator nope not found" in done.stderr
    assert "correct the variable, or unset it" in done.stderr
    assert "Traceback" not in done.stderr
