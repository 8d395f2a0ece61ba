"""Two replicas beside one, of a model that computes in Python and so holds the interpreter's lock."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness import benchmark
from serve import serving_sides as sides

_LOOPS, _MAX_BATCH_SIZE, _CLIENTS = 400_000, 4, 24
_SECONDS, _SECONDS_QUICK = 8.0, 1.0
_NUM_REPLICAS = (1, 2)
_GOAL = 1 / 1.5


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    from orchestray.loadtest import ClosedLoop

    seconds, rounds = _SECONDS_QUICK if options.quick else _SECONDS, options.rounds(3)
    report.settings = {"loops": _LOOPS, "max_batch_size": _MAX_BATCH_SIZE, "clients": _CLIENTS}
    report.settings |= {"seconds": seconds, "rounds": rounds}
    answered: dict[int, list[Any]] = {count: [] for count in _NUM_REPLICAS}

    def saturate(count: int) -> None:
        start = sides.ours(options, 0.0, 0.0, loops=_LOOPS, replicas=count, batching__max_batch_size=_MAX_BATCH_SIZE)
        with start() as endpoint:
            answered[count].append(endpoint.load(ClosedLoop(_CLIENTS), seconds, warm_up_s=2.0))

    benchmark.alternate({f"replicas: {count}": partial(saturate, count) for count in answered}, rounds, benchmark.say)
    per_s = {count: [run.summary()["answered_per_s"] for run in runs] for count, runs in answered.items()}
    for count, values in per_s.items():
        report.add(f"replicas: {count}: answered", "/s", values)
    report.compare("answered by 2 replicas / by 1", per_s[2], per_s[1])
    title = "answered by 1 replica / by 2"
    report.goal(title, report.compare(title, per_s[1], per_s[2]), _GOAL)
    sides.note_limits(report, {f"replicas: {count}": runs for count, runs in answered.items()})
    report.notes.append(
        "The model counts in a loop of Python for each sample. Two threads of one process would take turns in it; "
        "replicas are processes. The load generator, and with two replicas the front, share the two cores with them."
    )
    report.details = {str(count): [one.summary() for one in runs] for count, runs in answered.items()}


if __name__ == "__main__":
    benchmark.run("serve_past_the_lock", "Requests/s of two replicas beside one, of a model in Python.", measure)
