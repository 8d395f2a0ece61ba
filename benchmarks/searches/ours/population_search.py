"""A search of a population, as a user runs it, timed from inside: Ray's start, and the call with Ray there.

Usage: population_search.py SPEC.json OUT.json, where the spec has `config`, a path, and `overrides`.
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
    found = orchestray.search(spec["config"], overrides=spec["overrides"], runs_dir=Path(sys.argv[2]).parent / "runs")
    ended_s = time.perf_counter()
    lines = found.lines()
    told = {
        "start_s": started_s - began_s,
        "call_s": ended_s - started_s,
        "trials": len(lines),
        "steps": sum(line["steps"] for line in lines),
        "best": found.result["best"]["objective"],
    }
    Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
