"""The systems of the field that work here, by group."""

from __future__ import annotations

from builder.reference.markdown import page, table
from orchestray.cli.systems_table import GROUPS, State, load_systems


def systems_page() -> str:
    """Return the page of all systems that work."""
    systems = [each for each in load_systems() if each.state is State.WORKS]
    lines: list[str] = []
    for letter, title in GROUPS.items():
        rows = [[each.name, each.what, f"`{each.runs_with}`"] for each in systems if each.group == letter]
        if rows:
            lines += [f"## {title}", "", *table(["system", "what it is", "runs with"], rows)]
    introduction = (
        f"The {len(systems)} systems, methods and libraries of the field that work here, and the command of each. "
        "`orchestray systems NAME` shows the tests that show it; [Systems](systems.md) says how."
    )
    return page("Table of systems", introduction, lines)
