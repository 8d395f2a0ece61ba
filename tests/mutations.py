"""Mutations of the table of systems: a row's tests must fail once the property that they name is switched off.

`python tests/mutations.py` tries all of `systems_mutations/`, `--group X` those of a group, and names those of some
rows. Each is applied to a copy of the project, in which the tests of its row run twice: first without it, when all must
pass, then with it. It exits with 1 if a mutation survives, or cannot be tried, and lists those.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from orchestray.cli.systems_table import load_systems

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "systems_mutations"
"""The mutations, a file for each group of the table."""
_TIMEOUT_S = 600
"""Longest that a row's tests may take with a mutation: it has made them hang."""
_BROKEN = re.compile(
    r"^E +(?:\w+\.)*(SyntaxError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError|AttributeError): .*",
    re.MULTILINE,
)
"""Errors of code that is broken, not of a system that is switched off."""


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
                compile(changed, self.file, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise ValueError(f"{self.file} does not compile any more: {error}") from None
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
    return verdict(done.returncode, done.stdout, done.stderr)


def verdict(status: int, stdout: str, stderr: str = "") -> str:
    """Return what the tests of a row say of its mutation, by the status and the output of pytest."""
    if status == 0:
        return "SURVIVED"
    if status == 1 and re.search(r"^(?:\d+ .*, )?\d+ failed", stdout, re.MULTILINE):
        broken = _BROKEN.search(stdout)
        return f"it breaks the code: {broken[0][1:].strip()}" if broken else "killed"
    return f"its tests could not run: {stdout[-2_000:]}{stderr[-2_000:]}"


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


def chosen(names: Collection[str], groups: Collection[str]) -> list[Mutation]:
    """Return the mutations of some systems and groups; all of them if none is named.

    Raises:
        ValueError: a system or a group has no mutation.
    """
    known, group_of = load_mutations(), {system.name: system.group for system in load_systems()}
    unknown = {*names} - {one.system for one in known} | {*groups} - {group_of[one.system] for one in known}
    if unknown:
        raise ValueError(f"no mutation is known of {', '.join(sorted(unknown))}")
    everything = not names and not groups
    return [one for one in known if everything or one.system in names or group_of[one.system] in groups]


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the mutations of the table of systems.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="systems; none, and no group: all with a mutation")
    parser.add_argument("--group", action="append", default=[], metavar="X", help="all of a group, by its letter")
    given = parser.parse_args()
    tests = {system.name: system.tests for system in load_systems()}
    try:
        wanted = chosen(given.names, given.group)
    except ValueError as error:
        parser.error(str(error))
    not_killed = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_project(Path(folder))

        @cache
        def plain(ids: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
            return tried(ids, copy, limit_s=None)

        for mutation in wanted:
            ids = tests[mutation.system]
            if (done := plain(ids)).returncode:
                found = f"its tests fail without it, too:\n{done.stdout[-2_000:]}"
            else:
                found = outcome(mutation, ids, copy)
            print(f"{mutation.system}: {found}", flush=True)
            if found != "killed":
                not_killed[mutation.system] = found
    print(f"{len(wanted)} mutations, {len(not_killed)} of them not killed{':' if not_killed else ''}")
    for name, why in not_killed.items():
        print(f"  {name}: {why.splitlines()[0]}")
    return int(bool(not_killed))


if __name__ == "__main__":
    sys.exit(main())
