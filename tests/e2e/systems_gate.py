"""Each command of the table of systems, run as a user types it, leaves what only its systems leave.

`make test-systems` runs it: twenty minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.cluster.cluster import Cluster
from support.left_behind import MARKERS, desk, run

PLAIN = "orchestray train configs/train/digits-single.yaml"
"""A training without any scheme, which must leave no other command's markers."""


@pytest.fixture(autouse=True)
def _own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a profile of this machine, where a command makes one, for that command alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", MARKERS)
def test_a_command_leaves_what_only_its_systems_leave(command: str, tmp_path: Path, cluster: Cluster) -> None:
    of = MARKERS[command]
    folder = desk(tmp_path / "desk")
    for before in of.get("first", ()):
        run(before, folder, cluster)
    left = run(command, folder, cluster, of.get("with", ()), of.get("meanwhile"))
    assert {name: left.lacks(marker) for name, marker in of["systems"].items() if left.lacks(marker)} == {}


def test_a_plain_training_leaves_none_of_the_markers_of_other_trainings(tmp_path: Path, cluster: Cluster) -> None:
    left = run(PLAIN, desk(tmp_path / "desk"), cluster, ["train.epochs=null", "train.steps=6"])
    marked = {name: marker for of in MARKERS.values() for name, marker in of["systems"].items()}
    assert {name for name, marker in marked.items() if not left.lacks(marker) and not marker.get("plain")} == set()
