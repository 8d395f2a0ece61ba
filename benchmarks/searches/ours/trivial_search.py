"""A search of trivial trials, timed from inside: Ray's start, and the call with Ray there.

Usage: trivial_search.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began_s = time.perf_counter()
    import orchestray
    from orchestray.platform.cluster.cluster import connect

    connect()
    started_s = time.perf_counter()
    config = {
        "name": "trivial",
        "base": {
            "name": "trial",
            "task": {"type": f"{Path(__file__).with_name('trivial_task.py')}:Trivial"},
            "train": {"batch_size": 2, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
            "resources": {"cpus_per_worker": spec["cpus"]},
        },
        "search": {
            "method": {"type": "random"},
            "objective": {"metric": "score", "mode": "max"},
            "space": {"task.x": {"type": "uniform", "low": -5.0, "high": 5.0}},
            "budget": {"trials": spec["trials"], "steps_per_trial": 1},
            "parallel": spec["parallel"],
        },
    }
    found = orchestray.search(config, runs_dir=Path(sys.argv[2]).parent / "runs")
    ended_s = time.perf_counter()
    assert found.result["trials"] == spec["trials"]
    Path(sys.argv[2]).write_text(json.dumps({"start_s": started_s - began_s, "call_s": ended_s - started_s}))


if __name__ == "__main__":
    main()
