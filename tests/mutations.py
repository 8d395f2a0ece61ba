"""Mutations of the table of systems: a row's tests must fail once the property that they name is switched off.

`python tests/mutations.py` tries all of `systems_mutations/`, `python tests/mutations.py NAME ...` those of some
rows. Each is applied to a copy of the project, in which the tests of its row then run; without one they must all pass.
It exits with 1 if a mutation survives, or cannot be tried.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestray.cli.systems_table import load_systems

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "systems_mutations"
"""The mutations, a file for each group of the table."""
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """A change of a file that switches a system off."""

    system: str
    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Return the file's text with the change.

        Raises:
            ValueError: the old text is not there exactly once, or Python cannot read the new one.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times what is to be changed")
        changed = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            try:
                ast.parse(changed)
            except SyntaxError as error:
                raise ValueError(f"{self.file} is no Python any more: {error}") from None
        return changed


def load_mutations() -> list[Mutation]:
    """Return the mutations, as the files have them."""
    return [
        Mutation(name, of["in"], of["old"].rstrip("\n"), of["new"].rstrip("\n"))
        for file in sorted(FOLDER.glob("*.yaml"))
        for name, of in yaml.safe_load(file.read_text(encoding="utf-8")).items()
    ]


def outcome(mutation: Mutation, tests: Sequence[str], copy: Path) -> str:
    """Return what became of a mutation: `killed`, `SURVIVED`, or why it could not be tried.

    Args:
        mutation: the mutation.
        tests: ids of the tests of its row.
        copy: a copy of the project, which is as before afterwards.
    """
    file = copy / mutation.file
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutation.applied(text), encoding="utf-8")
        done = tried(tests, copy)
    except ValueError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"its tests did not end within {_TIMEOUT_S} s"
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return "SURVIVED"
    if done.returncode == 1 and re.search(r"^(?:\d+ .*, )?\d+ failed", done.stdout, re.MULTILINE):
        return "killed"
    return f"its tests could not run: {done.stdout[-2_000:]}{done.stderr[-2_000:]}"


def tried(tests: Sequence[str], copy: Path, limit_s: float | None = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the project, up to the first failure, for at most `limit_s` seconds."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def copy_of_the_project(folder: Path) -> Path:
    """Copy the files that git knows, and those it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the mutations of the table of systems.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="systems; none: all that have a mutation")
    chosen = parser.parse_args().names
    tests = {system.name: system.tests for system in load_systems()}
    wanted = [one for one in load_mutations() if not chosen or one.system in chosen]
    if missing := set(chosen) - {one.system for one in wanted}:
        parser.error(f"no mutation is known of {', '.join(sorted(missing))}")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_project(Path(folder))
        plain = tried(sorted({test for one in wanted for test in tests[one.system]}), copy, limit_s=None)
        if plain.returncode:
            print(f"tests fail without a mutation, too:\n{plain.stdout[-2_000:]}")
            return 1
        for mutation in wanted:
            found = outcome(mutation, tests[mutation.system], copy)
            bad += found != "killed"
            print(f"{mutation.system}: {found}", flush=True)
    print(f"{len(wanted)} mutations, {bad} of them not killed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
