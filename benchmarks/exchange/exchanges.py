"""One training under every exchange: accuracy over several seeds, bytes, staleness, time, and what each survives."""

from __future__ import annotations

import io
import math
import statistics
import time
from pathlib import Path
from typing import Any

from exchange.exchange_cases import EXCHANGES, num_workers, strategy
from harness import benchmark, recorded

_SINGLE = "one process"
_SEEDS = 5
_PICTURE = benchmark.REPOSITORY / "docs" / "pictures" / "exchanges.svg"
_DARK = (
    "@media (prefers-color-scheme: dark) {"
    '[style*="fill: #ffffff"] { fill: #0d1117 !important } [id^="text_"] { fill: #e6edf3 }'
    '[style*="stroke: #000000"] { stroke: #8d96a0 !important }'
    '[style*="stroke: #b0b0b0"] { stroke: #484f58 !important }'
    "}"
)
"""Colours of the picture for readers whose screen is dark."""
_TOGETHER = (0.05, 0.08)
"""Points of the picture that are so near have one label: in powers of ten of bytes, and in percent."""

_CONFIG: dict[str, Any] = {
    "name": "exchange",
    "task": {"type": "digits", "hidden": [128, 128]},
    "train": {"batch_size": 64, "epochs": 20, "optimizer": {"type": "sgd", "lr": 0.1}},
    "checkpoint": {"every_steps": 100000},
}

_QUICK = ("all-reduce", "all-reduce, 1 bit", "servers, asynchronous", "local SGD, every 16")


_AS_GOOD = ("all-reduce, 1 bit", "all-reduce, TernGrad", "all-reduce, QSGD 4 bits", "all-reduce, DGC 0.1 %")
_LOST_POINTS = 0.5
_RATES = (0.1, 0.3)
"""A coarse code changes which learning rate suits, so what it loses is said at the better of two: of its own, and of
the dense run's."""


def add_options(parser: Any) -> None:
    parser.add_argument("--only", nargs="+", choices=tuple(EXCHANGES), default=None, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what is recorded of the other exchanges, if on this kind of machine; without --only, measure those "
        "that are not recorded",
    )
    parser.add_argument("--no-picture", action="store_true", help="leave docs/pictures/exchanges.svg as it is")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seeds = options.arguments.seeds or (1 if options.quick else _SEEDS)
    kept = _kept(options, seeds)
    names = [name for name in (_SINGLE, *EXCHANGES) if name in kept.details or name in _wanted(options, kept)]
    strategies = {name: _strategy(name) for name in names}
    report.settings = {**_settings(seeds), "strategies": strategies, "kept": kept.origins}
    found: dict[str, list[dict[str, Any]]] = {name: list(kept.details.get(name, [])) for name in names}
    for name in (name for name in names if name not in kept.details):
        for seed in range(seeds):  # the processes of one stay warm for its other seeds
            benchmark.say(f"{name}, seed {seed}")
            found[name].append(_train(name, seed, options.workspace))
    dense = statistics.mean(run["sent"] for run in found["all-reduce"]) if "all-reduce" in found else None
    for name, runs in found.items():
        report.add(f"{name}, accuracy", "%", [100 * run["accuracy"] for run in runs])
        report.add(f"{name}, sent", "MB", [run["sent"] / 1e6 for run in runs])
        report.add(f"{name}, time", "s", [run["seconds"] for run in runs])
    report.table(
        ["exchange", "workers", "accuracy", "sent", "of all-reduce", "staleness", "time", "what may die"],
        [_row(name, runs, dense) for name, runs in found.items()],
    )
    if codes := [name for name in _AS_GOOD if name in found and "all-reduce" in found]:
        best = {
            name: _at_best_rate(report, name, found[name], kept, options.workspace) for name in ("all-reduce", *codes)
        }
        for name in codes:
            report.goal(f"{name}: accuracy lost, points", best["all-reduce"] - best[name], _LOST_POINTS)
    report.details = found
    report.notes += kept.notes()
    epochs = _CONFIG["train"]["epochs"]
    report.notes += [
        (
            f"Mean and standard deviation over {seeds} seeds of the validation accuracy after {epochs} epochs of "
            "`digits`, a small network (26,000 parameters): differences below a percent are within the noise."
        ),
        (
            "`sent` is all that went through channels and collectives of all processes in one run, agreements "
            "included; `staleness` the largest and the mean number of updates between read and write."
        ),
        (
            "`time` is that of the training loop of a run whose processes were there before, on two cores that its "
            "workers (and servers) share: it orders nothing but the cost of talking."
        ),
    ]
    if not options.quick and not options.arguments.no_picture:
        draw(found)


def _settings(seeds: int) -> dict[str, Any]:
    return {"seeds": seeds, **_CONFIG}


def _kept(options: benchmark.Options, seeds: int) -> recorded.Record:
    """Return what is recorded and need not be measured again."""
    if not options.arguments.keep:
        return recorded.Record()
    path = (options.arguments.results_dir or benchmark.RESULTS) / "exchanges.json"
    cases = {name: _strategy(name) for name in (_SINGLE, *EXCHANGES)}
    return recorded.load(path, _settings(seeds), cases).without(options.arguments.only or [])


def _wanted(options: benchmark.Options, kept: recorded.Record) -> list[str]:
    """Return the names to measure, with `_SINGLE`, which all are compared with."""
    usual = _QUICK if options.quick and not options.arguments.keep else tuple(EXCHANGES)
    return [name for name in (_SINGLE, *(options.arguments.only or usual)) if name not in kept.details]


def _strategy(name: str) -> dict[str, Any]:
    return {} if name == _SINGLE else strategy(name)


def _at_best_rate(
    report: benchmark.Report, name: str, runs: list[dict[str, Any]], kept: recorded.Record, place: Path
) -> float:
    """Return the mean accuracy in percent at the better of `_RATES`; `runs` are those of the first."""
    means = [statistics.mean(100 * run["accuracy"] for run in runs)]
    for lr in _RATES[1:]:
        told = f"{name}, accuracy at a rate of {lr}"
        accuracies = kept.values.get(told, []) if name in kept.details else []
        if not accuracies:
            benchmark.say(f"{name}, learning rate {lr}")
            accuracies = [100 * _train(name, seed, place, lr)["accuracy"] for seed in range(len(runs))]
        report.add(told, "%", accuracies)
        means.append(statistics.mean(accuracies))
    return max(means)


def _train(name: str, seed: int, place: Path, lr: float = _RATES[0]) -> dict[str, Any]:
    import orchestray

    train = {**_CONFIG["train"], "seed": seed, "optimizer": {"type": "sgd", "lr": lr}}
    config = {**_CONFIG, "train": train, "strategy": _strategy(name)}
    slug = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-{lr}")
    began_s = time.perf_counter()
    run = orchestray.train(config, runs_dir=place, name=f"{slug}-{seed}")
    lines = [line for line in run.metrics().to_pylist() if line.get("split") is None]
    staleness = run.result["staleness"]
    return {
        "accuracy": run.result["final"]["validation"]["accuracy"],
        "sent": run.result["bytes"]["sent"],
        "dense": run.result["bytes"]["dense"],
        "staleness": None if staleness is None else [staleness["max"], staleness["mean"]],
        "workers": 1 if name == _SINGLE else num_workers(name),
        "seconds": lines[-1]["time_s"] - lines[0]["time_s"],
        "whole_s": time.perf_counter() - began_s,
    }


def _row(name: str, runs: list[dict[str, Any]], dense: float | None) -> list[str]:
    accuracies = [100 * run["accuracy"] for run in runs]
    spread = f" ± {statistics.stdev(accuracies):.1f}" if len(runs) > 1 else ""
    sent = statistics.mean(run["sent"] for run in runs)
    stale = [run["staleness"] for run in runs if run["staleness"] is not None]
    return [
        name,
        str(runs[0]["workers"]),
        f"{statistics.mean(accuracies):.1f}{spread} %",
        f"{sent / 1e6:.2f} MB" if sent else "-",
        _part(sent, dense),
        f"{max(most for most, _ in stale)}, {statistics.mean(mean for _, mean in stale):.1f}" if stale else "-",
        f"{statistics.median(run['seconds'] for run in runs):.1f} s",
        "-" if name == _SINGLE else EXCHANGES[name][1],
    ]


def _part(sent: float, dense: float | None) -> str:
    if not sent or not dense:
        return "-"
    return f"{sent / dense:.2f}" if sent > 0.1 * dense else f"1/{dense / sent:.0f}"


def draw(found: dict[str, list[dict[str, Any]]]) -> None:
    """Draw accuracy against bytes, as a picture for the docs: points by number, with the names beside."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5.5), dpi=110)
    places: list[tuple[float, float, list[int]]] = []
    sent = {name: statistics.mean(run["sent"] for run in runs) / 1e6 for name, runs in found.items()}
    names = sorted((name for name in found if sent[name]), key=lambda name: sent[name])
    for number, name in enumerate(names, 1):
        accuracies = [100 * run["accuracy"] for run in found[name]]
        mean = statistics.mean(accuracies)
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0
        axes.errorbar(
            sent[name], mean, yerr=spread, fmt="o", capsize=2, elinewidth=0.7, alpha=0.75, label=f"{number:2}  {name}"
        )
        for at, height, numbers in places:  # those that lie together are named together
            if abs(math.log10(at / sent[name])) < _TOGETHER[0] and abs(height - mean) < _TOGETHER[1]:
                numbers.append(number)
                break
        else:
            places.append((sent[name], mean, [number]))
    axes.set_xscale("log")
    axes.set_xlabel("sent in a run, MB")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5, frameon=False, markerscale=0.6)
    figure.tight_layout()
    _label(axes, places)
    _PICTURE.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    _PICTURE.write_text(drawn.getvalue().replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")


def _label(axes: Any, places: list[tuple[float, float, list[int]]]) -> None:
    """Write each point's numbers beside it, or as near as there is room, with a line to it."""
    points = axes.transData.transform([(at, height) for at, height, _ in places])
    scale = axes.figure.dpi / 72
    taken = [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in points]
    around = [math.radians(angle) for angle in (40, -40, 140, -140, 90, -90, 15, 165)]
    for (at, height, numbers), (x, y) in zip(places, points, strict=True):
        text = f"{numbers[0]}\u2013{numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))
        wide, high = 5.2 * len(text) * scale, 9 * scale
        for far in range(8, 90, 4):
            boxes = [_box(x, y, far * scale, angle, wide, high) for angle in around]
            if free := [box for box in boxes if not any(_overlap(box, other) for other in taken)]:
                break
        left, low, right, top = free[0] if free else boxes[0]
        taken.append((left, low, right, top))
        axes.annotate(
            text,
            (at, height),
            xytext=(((left + right) / 2 - x) / scale, ((low + top) / 2 - y) / scale),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "0.5"} if far > 12 else None,
        )


def _box(x: float, y: float, far: float, angle: float, wide: float, high: float) -> tuple[float, float, float, float]:
    """Return the box of a text whose nearest edge is `far` away in this direction."""
    middle = x + math.cos(angle) * (far + wide / 2), y + math.sin(angle) * (far + high / 2)
    return middle[0] - wide / 2, middle[1] - high / 2, middle[0] + wide / 2, middle[1] + high / 2


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


if __name__ == "__main__":
    benchmark.run(
        "exchanges",
        "One training under every exchange, on one machine: what each costs, and what it keeps.",
        measure,
        add_options,
    )
