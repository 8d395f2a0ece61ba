"""Our side of the recording benchmark: a gang of two actors records, the driver drains and writes the run directory.

Usage: record.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_LISTEN_S = 0.5
_DRAIN_TIMEOUT_S, _DRAIN_INTERVAL_S = 1.0, 0.1


def main() -> None:
    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.cluster.cluster import connect
    from orchestray.platform.run.directory import RunDirectory
    from orchestray.platform.run.writer import RunWriter
    from orchestray.platform.terminal.progress import Progress
    from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    cluster = connect()
    gang = Gang(cluster, Shape(role="worker", size=2))
    gang.host("train.ours.record_host:RecordingLoop")
    gang.meet()
    run_progress = RunProgress(time.time())
    found: dict[str, Any] = {}
    with RunDirectory.create(spec["runs_dir"], "recording") as directory:
        progress = Progress(name="recording", total_steps=None, quiet=True)
        with RunWriter(directory, clock=run_progress.now_s) as writer, progress:
            run_log = RunLog(run_progress, writer, progress)
            first_step = 1
            for part, per_second in (("paced", spec["per_second"]), ("flood", None)):
                num_lines = spec[f"{part}_lines"]
                found[part] = _record(gang, run_log, first_step, num_lines, per_second)
                first_step += num_lines
        lines = [json.loads(line) for line in directory.paths.metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    found["lost"] = len(set(range(1, first_step)) - set(steps))
    found["twice"] = len(steps) - len(set(steps))
    found["in_order"] = steps == sorted(steps)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    gang.close()
    cluster.close()


def _record(gang: Any, run_log: Any, first_step: int, num_lines: int, per_second: float | None) -> dict[str, Any]:
    """Listen to rank 0 while the members work, as the driver of a run does."""
    import ray

    started_at = run_log.run_progress.started_at
    working = [
        slot.actor.call.remote("record", first_step, num_lines, per_second, started_at, rank == 0)
        for rank, slot in enumerate(gang.slots)
    ]
    drain = gang.control("drain", _DRAIN_TIMEOUT_S, _DRAIN_INTERVAL_S)[0]
    left = list(working)
    while left:
        ready, _ = ray.wait([*left, drain], num_returns=1, timeout=_LISTEN_S)
        for reference in ready:
            if reference == drain:
                run_log.record(ray.get(drain))
                drain = gang.control("drain", _DRAIN_TIMEOUT_S, _DRAIN_INTERVAL_S)[0]
            else:
                left.remove(reference)
    run_log.record(ray.get(drain))
    while lines := ray.get(gang.control("drain", 0.0, 0.0)[0]):
        run_log.record(lines)
    taken_s, all_s = gang.gather(working)[0]
    return {"taken_s": taken_s, "per_second": num_lines / all_s}


if __name__ == "__main__":
    main()
