"""Each system that works has a marker, by which `make test-systems` knows that its command ran it."""

from __future__ import annotations

from orchestray.cli.systems_table import load_systems
from support.left_behind import MARKERS


def test_every_system_that_works_has_a_marker_under_its_command() -> None:
    commands: dict[str, list[str]] = {}
    for system in load_systems():
        if system.runs_with:
            commands.setdefault(system.runs_with, []).append(system.name)
    marked = {command: sorted(of["systems"]) for command, of in MARKERS.items()}
    assert marked == {command: sorted(names) for command, names in commands.items()}
    assert all(marker for of in MARKERS.values() for marker in of["systems"].values())
