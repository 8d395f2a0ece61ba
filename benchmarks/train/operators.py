"""The survey's operators on this machine: each convolution's algorithm against torch's own, and what `orchestray lab`
compares beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from harness import benchmark
from orchestray.trainers.survey.lab import convolving, deadline, moving, multiplying, settings
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import threads

_THREADS = {1: "one thread", 2: "two threads"}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(7)
    shapes = convolving.SMALL if options.quick else convolving.SHAPES
    report.settings = {"rounds": rounds, "type": "float32", "torch": torch.__version__}
    for count in _THREADS:
        with threads(count):
            _convolutions(report, shapes, rounds, count)
    sides = multiplying.SIDES[:6] if options.quick else multiplying.SIDES
    with threads(1):
        for exhibit in (
            convolving.winograd_error(),
            convolving.layouts(rounds, shapes[:4]),
            multiplying.gemm(rounds, sides),
            multiplying.fully_connected(rounds),
            settings.onednn(rounds),
            moving.persistent(rounds),
            deadline.deadline(20 if options.quick else 200),
        ):
            _show(report, exhibit)
    _show(report, settings.thread_sweep(rounds, tuple(_THREADS)))
    report.notes += [
        "Products and convolutions are those of float32, with values that are normal random numbers.",
        "Ways are timed in turns; a number of a table is the median of the rounds.",
    ]


def _convolutions(report: benchmark.Report, shapes: Sequence[convolving.Shape], rounds: int, count: int) -> None:
    medians, rows = {}, []
    for shape in shapes:
        benchmark.say(f"{shape.name}, {_THREADS[count]}")
        taken = convolving.timed(shape, rounds)
        times = medians[shape] = {name: median(each) for name, each in taken.items()}
        fastest = min(times, key=times.__getitem__)
        rows.append(
            [shape.name, *(f"{times[name] * 1e3:.3g}" if name in times else "-" for name in convolving.ALL), fastest]
        )
        others = {name: each for name, each in taken.items() if name != "torch"}
        best = min(others, key=lambda name: times[name])
        report.compare(f"{shape.name}, {_THREADS[count]}: {best} / torch", taken[best], taken["torch"])
    report.table([f"{_THREADS[count]}", *(f"{name}, ms" for name in convolving.ALL), "fastest"], rows)
    report.notes += [f"Convolutions on {_THREADS[count]}: {finding}" for finding in convolving.findings(medians)]


def _show(report: benchmark.Report, exhibit: Exhibit) -> None:
    report.table(exhibit.columns, exhibit.texts())
    report.notes += [f"{exhibit.title}: {finding}" for finding in exhibit.findings]


if __name__ == "__main__":
    benchmark.run(
        "operators",
        "The survey's algorithms for convolutions, products of matrices and recurrent layers, against torch's own.",
        measure,
    )
