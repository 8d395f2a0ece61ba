"""Virtual environments with packages of peers, which borrow what is large from ours."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import benchmark

_INSTALL_S = 900.0


def add_options(parser: Any) -> None:
    """Add the options of benchmarks that need packages of peers."""
    parser.add_argument(
        "--peers-environment",
        type=Path,
        default=None,
        help="virtual environment with the peers' packages, made there if it is missing; default: in the workspace",
    )


def peers_python(options: benchmark.Options, packages: Sequence[str], *, built_on_torch: bool = False) -> Path:
    """Make an interpreter that has the peers' packages, and torch from ours (it is large, and the same is wanted).

    Args:
        options: options of the benchmark.
        packages: packages with their versions.
        built_on_torch: True if they need torch, so that pip has to find ours.
    """
    place: Path = options.arguments.peers_environment or options.workspace / "peers"
    python = place.resolve() / "bin" / "python"
    wanted = "\n".join(packages)
    told = place / "packages.txt"
    if told.exists() and told.read_text(encoding="utf-8") == wanted:
        return python
    benchmark.say(f"installing {', '.join(packages)}")
    venv.create(place, clear=True, symlinks=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    if built_on_torch:
        import torch

        _borrow(place)
        held = place / "constraints.txt"
        held.write_text(f"torch=={torch.__version__}\n", encoding="utf-8")
        command += ["--constraint", str(held)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode != 0:
        raise benchmark.BenchmarkError(f"the peers' packages could not be installed:\n{done.stderr[-2000:]}")
    _borrow(place)
    told.write_text(wanted, encoding="utf-8")
    return python


def _borrow(place: Path) -> None:
    """Put our packages behind an environment's own."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = benchmark.FOLDER, *[Path(path) for path in sys.path if path.endswith("site-packages")]
    (place / "lib" / name / "site-packages" / "ours.pth").write_text("\n".join(map(str, own)), encoding="utf-8")


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in an environment."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {tuple(names)!r}}}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
