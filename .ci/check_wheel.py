"""Build the wheel and the source distribution, and import every module of each from a fresh environment.

The environment sees the dependencies that are installed beside this interpreter (through a .pth file), but not the
checkout: a module that the wheel lacks is not found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("platform", "trainers", "search", "serving", "configs")

IMPORT_ALL = """
import importlib, importlib.metadata, pathlib, re, sys
import orchestray
home = pathlib.Path(orchestray.__file__).parent
assert home.is_relative_to(sys.prefix), f"{home} is not in the environment under test"
names = []
for file in sorted(home.rglob("*.py")):
    parts = file.relative_to(home).with_suffix("").parts
    names.append(".".join(["orchestray", *(part for part in parts if part != "__init__")]))
optional = set(importlib.metadata.metadata("orchestray").get_all("Provides-Extra"))
wanted = [text for text in importlib.metadata.requires("orchestray") if "extra ==" in text]
optional |= {re.match(r"[\\w-]+", text)[0] for text in wanted}
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a module for an extra needs one of its packages, which may be absent
        if str(error.name).split(".")[0] not in optional:
            raise
print(f"imported {len(names)} modules")
"""


def main() -> None:
    """Check both distributions; the first thing that is wrong ends it with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="a folder to build in")
    scratch = parser.parse_args().scratch.resolve()
    run(sys.executable, "-m", "build", "--outdir", scratch / "direct", "--wheel", ROOT)
    run(sys.executable, "-m", "build", "--outdir", scratch / "source", "--sdist", ROOT)
    source = only(scratch / "source", "*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    run(sys.executable, "-m", "build", "--outdir", scratch / "indirect", "--wheel", only(scratch / "unpacked", "*"))
    expected = shipped_files()
    for folder in ("direct", "indirect"):
        wheel = only(scratch / folder, "*.whl")
        check_contents(wheel, expected)
        check_imports(wheel, scratch / f"{folder}-environment")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; its failure is ours."""
    if subprocess.run(list(map(str, command)), cwd=cwd, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def only(folder: Path, pattern: str) -> Path:
    """Return the one entry of a folder that matches."""
    (entry,) = folder.glob(pattern)
    return entry


def shipped_files() -> set[str]:
    """Return what git tracks in the rooms, by the names it has in a wheel."""
    folders = [*ROOMS, "src/orchestray"]
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    links = {f"src/orchestray/{room}" for room in ROOMS}
    return {f"orchestray/{name.removeprefix('src/orchestray/')}" for name in tracked if name not in links}


def check_contents(wheel: Path, expected: set[str]) -> None:
    """Every tracked file is in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        lacking = sorted(expected - set(archive.namelist()))
    if lacking:
        sys.exit(f"{wheel.parent.name}/{wheel.name} lacks {', '.join(lacking)}")
    print(f"{wheel.parent.name}/{wheel.name}: all {len(expected)} files are there")


def check_imports(wheel: Path, environment: Path) -> None:
    """Every module of the wheel imports, and the console script answers, in an environment of its own."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    own_packages = only(environment / "lib", "python*") / "site-packages"
    # A path in a .pth file comes after the environment's own packages, and its own .pth files (the editable install's
    # among them) are not read.
    (own_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(python, "-I", "-c", IMPORT_ALL, cwd=environment)
    run(environment / "bin" / "orchestray", "validate", own_packages / "orchestray/configs/train/digits.yaml")


if __name__ == "__main__":
    main()
