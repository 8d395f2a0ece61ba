"""One training under every exchange: accuracy over several seeds, bytes, staleness, time, and what each survives."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import harness

_SINGLE = "one process"
_SEEDS = 5
_PICTURE = harness.REPOSITORY / "docs" / "pictures" / "exchanges.svg"
_TOGETHER = (0.05, 0.08)
"""Points of the picture that are so near have one label: in powers of ten of bytes, and in percent."""

_CONFIG: dict[str, Any] = {
    "name": "exchange",
    "task": {"type": "digits", "hidden": [128, 128]},
    "train": {"batch_size": 64, "epochs": 20, "optimizer": {"type": "sgd", "lr": 0.1}},
    "checkpoint": {"every_steps": 100000},
}

_STEPS_AN_EPOCH = 23
_WARM_UP_EPOCHS = 4
"""Of deep gradient compression, as its authors have it (Lin et al. 2018, section 3.3)."""

_LOCK_STEP = "any worker: rolled into the step that was lost"
_LAST_CHECKPOINT = "any worker: from the last checkpoint"
_SERVERS = "workers: the others go on; servers: from the last checkpoint"


def _server(**keys: Any) -> dict[str, Any]:
    return {"exchange": {"type": "parameter_server", **keys}}


def _compressed(**keys: Any) -> dict[str, Any]:
    return {"compression": keys}


_EXCHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "all-reduce": ({}, _LOCK_STEP),
    "all-reduce, ring": ({"exchange": {"type": "allreduce", "algorithm": "ring"}}, _LOCK_STEP),
    "all-reduce, Rabenseifner": ({"exchange": {"type": "allreduce", "algorithm": "rabenseifner"}}, _LOCK_STEP),
    "all-reduce, float16": (_compressed(type="float16"), _LOCK_STEP),
    "all-reduce, QSGD 4 bits": (_compressed(type="qsgd"), _LOCK_STEP),
    "all-reduce, TernGrad": (_compressed(type="terngrad"), _LOCK_STEP),
    "all-reduce, 1 bit": (_compressed(type="onebit"), _LAST_CHECKPOINT),
    "all-reduce, 1 bit, sizes by row": (_compressed(type="onebit", scale="row"), _LAST_CHECKPOINT),
    "all-reduce, top 1 %": (_compressed(type="topk"), _LAST_CHECKPOINT),
    "all-reduce, DGC 0.1 %": (
        _compressed(type="dgc", momentum=0.0, warmup_steps=_WARM_UP_EPOCHS * _STEPS_AN_EPOCH),
        _LAST_CHECKPOINT,
    ),
    "all-reduce, PowerSGD rank 2": (_compressed(type="powersgd"), _LAST_CHECKPOINT),
    "median of gradients": ({"network": {"data": 3}, "aggregation": {"type": "median"}}, _LOCK_STEP),
    "servers, synchronous": (_server(), _SERVERS),
    "servers, stale by 4": (_server(consistency="stale", staleness=4), _SERVERS),
    "servers, asynchronous": (_server(consistency="asynchronous"), _SERVERS),
    "servers with copies": (_server(consistency="asynchronous", replicas=2), "any process: nothing is lost"),
    "Downpour, push and fetch 4": (_server(consistency="asynchronous", push_every=4, fetch_every=4), _SERVERS),
    "servers, 1 bit": ({**_server(consistency="asynchronous"), **_compressed(type="onebit")}, _SERVERS),
    "gossip, random pairs": ({"network": {"data": 4}, "exchange": {"type": "gossip"}}, _LAST_CHECKPOINT),
    "gossip on a ring, QSGD (CHOCO)": (
        {"network": {"data": 4}, "exchange": {"type": "gossip", "graph": "ring"}, **_compressed(type="qsgd")},
        _LAST_CHECKPOINT,
    ),
    "local SGD, every 16": ({"exchange": {"type": "averaging", "every": 16}}, _LAST_CHECKPOINT),
    "average at the end": ({"exchange": {"type": "averaging", "every": "end"}}, _LAST_CHECKPOINT),
    "DiLoCo, every 50": (
        {
            "exchange": {
                "type": "averaging",
                "every": 50,
                "outer_optimizer": {"type": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
            }
        },
        _LAST_CHECKPOINT,
    ),
    "elastic averaging, every 8": ({"exchange": {"type": "elastic_averaging", "every": 8}}, _LAST_CHECKPOINT),
    "ensemble of 2": ({"exchange": {"type": "independent"}}, _LAST_CHECKPOINT),
}
"""What each changes in `strategy`, and which losses it takes."""
_QUICK = ("all-reduce", "all-reduce, 1 bit", "servers, asynchronous", "local SGD, every 16")


_AS_GOOD = ("all-reduce, 1 bit", "all-reduce, TernGrad", "all-reduce, QSGD 4 bits", "all-reduce, DGC 0.1 %")
_LOST_POINTS = 0.5
_RATES = (0.1, 0.3)
"""A coarse code changes which learning rate suits, so what it loses is said at the better of two: of its own, and of
the dense run's."""


def add_options(parser: Any) -> None:
    parser.add_argument("--only", nargs="+", choices=tuple(_EXCHANGES), default=None, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--no-picture", action="store_true", help="leave docs/pictures/exchanges.svg as it is")


def measure(report: harness.Report, options: harness.Options) -> None:
    seeds = options.arguments.seeds or (1 if options.quick else _SEEDS)
    wanted = options.arguments.only or (_QUICK if options.quick else tuple(_EXCHANGES))
    names = [_SINGLE, *(name for name in _EXCHANGES if name in wanted)]
    report.settings = {"seeds": seeds, **_CONFIG, "strategies": {name: _strategy(name) for name in names}}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names:  # the processes of one stay warm for its other seeds
        for seed in range(seeds):
            harness.say(f"{name}, seed {seed}")
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
        best = {name: _at_best_rate(report, name, found[name], options.workspace) for name in ("all-reduce", *codes)}
        for name in codes:
            report.goal(f"{name}: accuracy lost, points", best["all-reduce"] - best[name], _LOST_POINTS)
    report.details = found
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
        _draw(found)


def _strategy(name: str) -> dict[str, Any]:
    if name == _SINGLE:
        return {}
    changes = _EXCHANGES[name][0]
    return {"network": {"data": 2}, **changes}


def _at_best_rate(report: harness.Report, name: str, runs: list[dict[str, Any]], place: Path) -> float:
    """Mean accuracy in percent at the better of `_RATES`; `runs` are those of the first."""
    means = [statistics.mean(100 * run["accuracy"] for run in runs)]
    for lr in _RATES[1:]:
        harness.say(f"{name}, learning rate {lr}")
        accuracies = [100 * _train(name, seed, place, lr)["accuracy"] for seed in range(len(runs))]
        report.add(f"{name}, accuracy at a rate of {lr}", "%", accuracies)
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
        "workers": _strategy(name).get("network", {"data": 1})["data"],
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
        "-" if name == _SINGLE else _EXCHANGES[name][1],
    ]


def _part(sent: float, dense: float | None) -> str:
    if not sent or not dense:
        return "-"
    return f"{sent / dense:.2f}" if sent > 0.1 * dense else f"1/{dense / sent:.0f}"


def _draw(found: dict[str, list[dict[str, Any]]]) -> None:
    """Accuracy against bytes, as a picture for the docs: points by number, with the names beside."""
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
    for at, height, numbers in places:
        text = f"{numbers[0]}\u2013{numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))
        axes.annotate(text, (at, height), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("sent in a run, MB")
    axes.set_ylabel("validation accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5, frameon=False, markerscale=0.6)
    figure.tight_layout()
    _PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(_PICTURE)


if __name__ == "__main__":
    harness.run(
        "exchanges",
        "One training under every exchange, on one machine: what each costs, and what it keeps.",
        measure,
        add_options,
    )
