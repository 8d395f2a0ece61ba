"""Private names of Ray are in one file, which says which of them a version of Ray does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestray.platform.cluster.ray_internals import NAMES, find, has_given_groups, staged_groups
from support.layers import FILES, ROOT

_PRIVATE = re.compile(
    r"ray\._private|ray\.experimental\.internal|ray\._raylet|_get_global_client|ray\.\w+\._(?:internal|private)|ray\.tune\.execution"
    r"|\._(?:acquired_pgs|request_to_staged_pgs|actor_task_failed|latest_checkpoint_result)\b"
)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_this_version_of_ray_has_every_private_name_that_is_used(name: str) -> None:
    import ray  # noqa: F401 - its modules are there only then

    assert find(name) is not None


def test_the_groups_of_a_manager_of_tune_can_be_seen() -> None:
    from ray.air.execution.resources.placement_group import PlacementGroupResourceManager

    manager = PlacementGroupResourceManager()
    assert (staged_groups(manager), has_given_groups(manager)) == ([], False)


def test_a_name_without_a_reason_is_not_looked_up() -> None:
    with pytest.raises(KeyError, match="not listed"):
        find("ray._private.node:Nothing")


def test_private_names_of_ray_are_written_in_the_one_file_or_looked_up_by_its_table() -> None:
    tests = {str(file.relative_to(ROOT)): file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)}
    found = {}
    for module, file in {**FILES, **tests}.items():
        if module == "platform.cluster.ray_internals":
            continue
        text = file.read_text(encoding="utf-8")
        for name in NAMES:
            text = text.replace(f'"{name}"', "").replace(f'"{name.partition(":")[0]}"', "")
        if lines := [line.strip() for line in text.splitlines() if _PRIVATE.search(line)]:
            found[module] = lines
    assert found == {}
