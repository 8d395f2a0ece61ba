"""The reader of what processes print, where a node is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from orchestray.platform.actors import output_reader
from orchestray.platform.actors.output_reader import OutputReader


def test_files_of_a_node_that_is_gone_are_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    def nodes() -> list[dict[str, Any]]:
        looks.append(None)
        return [{"NodeManagerAddress": "10.9.9.9", "NodeID": "0" * 56, "Alive": False}]

    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(output_reader, "_start", lambda _node: pytest.fail("an actor that cannot be placed"))
    (tmp_path / "here").write_bytes(b"text")
    reader = OutputReader()
    reader.follow("10.9.9.9", "/nosuch/worker-1.out")
    reader.follow("10.9.9.9", str(tmp_path / "here"))
    assert [reader.read(), reader.read(), reader.read_last()] == [
        {("10.9.9.9", str(tmp_path / "here")): b"text"},
        {},
        {},
    ]
    assert len(looks) == 1
