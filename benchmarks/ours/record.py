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
    from orchestray.platform.cluster.cluster import connect
    from orchestray.platform.gang.gang import Gang
    from orchestray.platform.gang.placement import Shape
    from orchestray.platform.run.directory import RunDirectory
    from orchestray.platform.run.progress import Progress
    from orchestray.platform.run.writer import RunWriter
    from orchestray.trainers.driver.story import Book, Story

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    cluster = connect()
    gang = Gang(cluster, Shape(role="worker", size=2))
    gang.host("ours.record_host:RecordingLoop")
    gang.meet()
    story = Story(time.time())
    found: dict[str, Any] = {}
    with RunDirectory.create(spec["runs_dir"], "recording") as directory:
        progress = Progress(name="recording", total_steps=None, quiet=True)
        with RunWriter(directory, clock=story.now_s) as writer, progress:
            book = Book(story, writer, progress)
            first_step = 1
            for part, per_second in (("paced", spec["per_second"]), ("flood", None)):
                num_lines = spec[f"{part}_lines"]
                found[part] = _record(gang, book, first_step, num_lines, per_second)
                first_step += num_lines
        lines = [json.loads(line) for line in directory.paths.metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    found["lost"] = len(set(range(1, first_step)) - set(steps))
    found["twice"] = len(steps) - len(set(steps))
    found["in_order"] = steps == sorted(steps)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    gang.close()
    cluster.close()


def _record(gang: Any, book: Any, first_step: int, num_lines: int, per_second: float | None) -> dict[str, Any]:
    """The driver's part of a run: listens to rank 0 while the members work, as `trainers/driver/driver.py` does."""
    import ray

    started_at = book.story.started_at
    working = [
        seat.actor.call.remote("record", first_step, num_lines, per_second, started_at, rank == 0)
        for rank, seat in enumerate(gang.seats)
    ]
    drain = gang.control("drain", _DRAIN_TIMEOUT_S, _DRAIN_INTERVAL_S)[0]
    left = list(working)
    while left:
        ready, _ = ray.wait([*left, drain], num_returns=1, timeout=_LISTEN_S)
        for reference in ready:
            if reference == drain:
                book.record(ray.get(drain))
                drain = gang.control("drain", _DRAIN_TIMEOUT_S, _DRAIN_INTERVAL_S)[0]
            else:
                left.remove(reference)
    book.record(ray.get(drain))
    while lines := ray.get(gang.control("drain", 0.0, 0.0)[0]):
        book.record(lines)
    taken_s, all_s = gang.gather(working)[0]
    return {"taken_s": taken_s, "per_second": num_lines / all_s}


if __name__ == "__main__":
    main()
