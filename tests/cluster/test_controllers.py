"""Controllers of a search as processes: they search what they would in one process, also if a server is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.run.metrics import read_lines
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.controller_team import ControllerTeam
from orchestray.search.engine.run import run_search
from orchestray.search.engine.session import SearchError
from orchestray.search.results.writer import SearchRecords
from support.search_loop import base, loop_of

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

CONTROLLERS, SHARDS = 2, 2
MEASURED = ("seconds", "latency_ms")


def calls_of(path: Path) -> list[Any]:
    """Return the calls of a search's method, without what the clock has measured."""
    return [{key: line[key] for key in line if key not in MEASURED} for line in read_lines(path / "journal.jsonl")]


@pytest.mark.slow
def test_controllers_that_push_to_servers_search_what_one_process_does_though_a_server_is_killed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"type": "reinforce", "controllers": CONTROLLERS, "shards": SHARDS, "children": 2, "repeats": 20}
    rates = {"type": "choice", "values": [0.01 * number for number in range(1, 13)]}
    config = load_search_config(
        {
            "name": "controllers",
            "base": base(),
            "search": {
                "method": method,
                "objective": {"metric": "accuracy"},
                "space": {"train.optimizer.lr": rates},
                "budget": {"trials": 12, "steps_per_trial": 2},
            },
        }
    )
    with SearchRecords.create(tmp_path, "alone") as records:
        loop_of(config, records).run().close()
    learn, calls = ControllerTeam.learn, []

    def losing(team: ControllerTeam, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            team._servers.slots[1].kill()
        return learn(team, *arguments)

    monkeypatch.setattr(ControllerTeam, "learn", losing)
    with SearchRecords.create(tmp_path, "served") as records, pytest.raises(SearchError, match="Go on with --resume"):
        run_search(config, records)
    with SearchRecords.open_existing(tmp_path, "served") as records:
        outcome = run_search(config, records, resume=True)
    assert outcome.status == "succeeded"
    assert calls_of(tmp_path / "served") == calls_of(tmp_path / "alone")
    found = outcome.more["controllers"]
    processes = {*found["processes"], *found["servers"]}
    assert len(processes) == CONTROLLERS + SHARDS
    assert os.getpid() not in processes
    assert sum(found["updates"]) >= 5
    assert found["versions"] == [sum(found["updates"])] * SHARDS
    assert found["max_staleness"] == 1
    assert found["bytes"] > 0
    assert "trainers.ps.server.ShardServer" in outcome.parts
