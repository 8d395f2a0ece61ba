"""Each command of the table of systems, run as a user types it, leaves what only its systems leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestray.cli.systems_table import load_systems
from orchestray.platform.cluster.cluster import Cluster
from support.left_behind import desk, run

MARKERS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "systems_markers.yaml").read_text(encoding="utf-8")
)
"""By command: `first`, commands that are run before; `with`, words that shorten it; `systems`, by name the marker."""
PLAIN = "orchestray train configs/train/digits-single.yaml"
"""A training without any scheme, which must leave no other command's markers."""


def commands_of_the_table() -> dict[str, list[str]]:
    """Return the names of the systems that run with each command."""
    found: dict[str, list[str]] = {}
    for system in load_systems():
        if system.runs_with:
            found.setdefault(system.runs_with, []).append(system.name)
    return found


def test_every_system_that_works_has_a_marker_under_its_command() -> None:
    assert {command: sorted(of["systems"]) for command, of in MARKERS.items()} == {
        command: sorted(names) for command, names in commands_of_the_table().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", MARKERS)
def test_a_command_leaves_what_only_its_systems_leave(command: str, tmp_path: Path, cluster: Cluster) -> None:
    of = MARKERS[command]
    folder = desk(tmp_path)
    for before in of.get("first", ()):
        run(before, folder, cluster)
    left = run(command, folder, cluster, of.get("with", ()))
    assert {name: left.lacks(marker) for name, marker in of["systems"].items() if left.lacks(marker)} == {}


@pytest.mark.slow
def test_a_plain_training_leaves_none_of_the_markers_of_other_trainings(tmp_path: Path, cluster: Cluster) -> None:
    left = run(PLAIN, desk(tmp_path), cluster, ["train.epochs=null", "train.steps=6"])
    marked = {name: marker for command, of in MARKERS.items() for name, marker in of["systems"].items()}
    shared = {name for name, marker in marked.items() if not left.lacks(marker) and not marker.get("plain")}
    assert shared == set()
