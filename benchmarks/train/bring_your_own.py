"""A user's own BERT and ResNet-18 on two workers: a step and lines of code, beside Lightning and Accelerate."""

from __future__ import annotations

import ast
import io
import json
import os
import statistics
import tokenize
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import benchmark, commands, environments

_PACKAGES = ("lightning==2.6.6", "accelerate==1.15.0")
_TIMEOUT_S = 300.0
_WORKERS = 2
_STEPS, _STEPS_OF_AN_EPOCH = 96, 32
_WARM_UP_STEPS = 10
_STEP, _LINES = 1.03, 1.0
_LOSS_APART = 0.15
"""Difference of the losses of the last epoch that two sides may have, as a part of the loss at the beginning."""

_FILES = benchmark.FOLDER / "train" / "ours"
_MODELS = {"bert": "byo_bert", "resnet18": "byo_resnet18"}
_OURS, _LIGHTNING, _ACCELERATE = "ours", "Lightning", "Accelerate"
_SYNCHRONIZED = "ours, batch_norm: synchronized"
_PEERS = (_LIGHTNING, _ACCELERATE)
_MEASURING = "# measuring"

Run = dict[str, list[float]]


def add_options(parser: Any) -> None:
    names = tuple(_MODELS)
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=names, default=names, metavar="NAME")
    environments.add_options(parser)


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    python = environments.peers_python(options, _PACKAGES, built_on_torch=True)
    rounds = options.rounds(6)
    report.settings = {"rounds": rounds, "workers": _WORKERS, "threads_a_worker": 1, "steps": _STEPS}
    report.settings["warm_up_steps_left_out"] = _WARM_UP_STEPS
    report.settings |= environments.versions(python, ("lightning", "accelerate", "transformers", "torch"))
    rows: list[list[str]] = []
    loads: list[float] = []
    for model in options.arguments.models:
        rows += _measure_model(report, options, python, model, rounds, loads)
    report.settings["load_before_a_run"] = {
        "median": round(statistics.median(loads), 1),
        "min": round(min(loads), 1),
        "max": round(max(loads), 1),
    }
    report.table(["model", "side", "lines", "a step", "loss, first 5 steps", "loss, last epoch"], rows)
    report.notes += [
        (
            "All sides: two processes with one thread each, gloo, the same model, data, batch of 32 and optimizer "
            "(Adam with its default options), 96 steps in three epochs; no validation, no checkpoint in between. Ours "
            "records every step; the peers record nothing."
        ),
        (
            "A run's step time is the median of the differences between the ends of its steps. The goal is held "
            "against the peer whose median is lower. The peers' loaders have no workers, which is their default."
        ),
        (
            "Weights begin with the same seed, but each side has its own order of samples. So losses of single steps "
            "cannot be compared; the mean losses of the last epoch are, and may differ by "
            f"{_LOSS_APART:.0%} of that of the first 5 steps."
        ),
        (
            "Lines are those that are neither blank, comment nor docstring: our task file and config, the peer's "
            "script. Ours has `metrics`, which a task must have, and returns none there. The peers' lines for times "
            "and seeds are not counted. The peers' models compute their loss themselves from `labels`, as those of "
            "transformers do; Accelerate is told the number of workers on its command line, not in a line."
        ),
    ]
    if "resnet18" in options.arguments.models:
        report.notes.append(
            "`torch.nn.SyncBatchNorm`, which Lightning's `sync_batchnorm` and Accelerate's users convert to, refuses "
            "tensors on the CPU. So batch normalisation of resnet18 is local on all three sides (`batch_norm: local`). "
            "Ours over the samples of both workers, which is its default, stands beside, without a goal."
        )


def _measure_model(
    report: benchmark.Report,
    options: benchmark.Options,
    python: Path,
    model: str,
    rounds: int,
    loads: list[float],
) -> list[list[str]]:
    """Measure all sides of a model, and return their rows of the table."""
    sides = {
        _OURS: partial(_ours, model),
        _LIGHTNING: partial(_peer, [str(python)], f"{_MODELS[model]}_lightning"),
        _ACCELERATE: partial(_peer, _torchrun(python), f"{_MODELS[model]}_accelerate"),
    }
    if model == "resnet18":
        sides[_SYNCHRONIZED] = partial(_ours, model, "train.batch_norm=synchronized")
    found: dict[str, list[Run]] = {name: [] for name in sides}

    def call(name: str) -> None:
        place = options.workspace / f"{model}-{list(sides).index(name)}-{len(found[name])}"
        place.mkdir()
        loads.append(os.getloadavg()[0])
        run = sides[name](place)
        if len(run["times"]) != _STEPS:
            raise benchmark.BenchmarkError(f"{model}, {name}: {len(run['times'])} steps instead of {_STEPS}")
        found[name].append(run)
        benchmark.say(f"  load {loads[-1]:.1f}, a step {statistics.median(_steps_ms(run)):.2f} ms")

    benchmark.alternate(
        {name: partial(call, name) for name in sides}, rounds, lambda text: benchmark.say(f"{model}, {text}")
    )
    _check_losses(model, found)
    medians = {}
    for name, runs in found.items():
        steps = [_steps_ms(run) for run in runs]
        medians[name] = report.add(f"{model}: {name}, median step", "ms", [statistics.median(run) for run in steps])
        report.add(f"{model}: {name}, mean step", "ms", [statistics.fmean(run) for run in steps])
        report.add(f"{model}: {name}, fastest tenth of the steps", "ms", [_fastest(run) for run in steps])
        report.details[f"{model}: {name}, every step in ms"] = [[round(step, 3) for step in run] for run in steps]
        report.details[f"{model}: {name}, every loss"] = [[round(loss, 5) for loss in run["losses"]] for run in runs]
    ratios = {
        name: report.compare(f"{model}: step, ours / {name}", medians[_OURS].values, medians[name].values)
        for name in _PEERS
    }
    faster = min(_PEERS, key=lambda name: medians[name].median)
    report.goal(f"{model}: step time / {faster}, the faster peer", ratios[faster], _STEP)
    lines = _lines(model)
    shorter = min(_PEERS, key=lambda name: lines[name])
    report.goal(f"{model}: lines / {shorter}, the shorter peer", lines[_OURS] / lines[shorter], _LINES)
    for name, number in lines.items():
        report.add(f"{model}: {name}, lines", "lines", [number])
    return [
        [
            model,
            name,
            str(lines.get(name, lines[_OURS])),
            f"{medians[name].median:.1f} ms",
            *(f"{statistics.fmean(each(run) for run in runs):.3f}" for each in (_first_loss, _last_loss)),
        ]
        for name, runs in found.items()
    ]


# -- the sides ---------------------------------------------------------------------------------------------------------


def _ours(model: str, *arguments: Any) -> Run:
    """Train through the command line; times and losses of the steps as the run directory has them."""
    *overrides, place = arguments
    config = _FILES / f"{_MODELS[model]}.yaml"
    command = [commands.script("orchestray"), "train", str(config), "--runs-dir", str(place), "--quiet", *overrides]
    commands.run_command(command, _TIMEOUT_S)
    lines = commands.step_lines(place / _MODELS[model])
    return {"times": [line["time_s"] for line in lines], "losses": [line["loss"] for line in lines]}


def _torchrun(python: Path) -> list[str]:
    return [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_WORKERS)]


def _peer(launcher: list[str], name: str, place: Path) -> Run:
    """Run a peer's script; times are those of the first worker, losses the mean of both workers'."""
    commands.run_command([*launcher, commands.peer(name), str(place)], _TIMEOUT_S, {"OMP_NUM_THREADS": "1"})
    ranks = [json.loads((place / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(_WORKERS)]
    if any(rank["threads"] != 1 for rank in ranks):
        raise benchmark.BenchmarkError(f"{name} computes with {[rank['threads'] for rank in ranks]} threads")
    losses = [statistics.fmean(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {"times": ranks[0]["times"], "losses": losses}


# -- what a run says ---------------------------------------------------------------------------------------------------


def _steps_ms(run: Run) -> list[float]:
    return [1e3 * (b - a) for a, b in pairwise(run["times"][_WARM_UP_STEPS - 1 :])]


def _fastest(steps_ms: list[float]) -> float:
    """Return the mean of the fastest tenth, which other processes on the machine disturb least."""
    return statistics.fmean(sorted(steps_ms)[: max(1, len(steps_ms) // 10)])


def _first_loss(run: Run) -> float:
    return statistics.fmean(run["losses"][:5])


def _last_loss(run: Run) -> float:
    return statistics.fmean(run["losses"][-_STEPS_OF_AN_EPOCH:])


def _check_losses(model: str, found: dict[str, list[Run]]) -> None:
    """Check roughly that all sides train the same: each has an order of samples of its own."""
    last = {name: statistics.fmean(map(_last_loss, runs)) for name, runs in found.items()}
    first = statistics.fmean(map(_first_loss, found[_OURS]))
    if max(last.values()) - min(last.values()) > _LOSS_APART * first:
        raise benchmark.BenchmarkError(f"{model}: the sides do not train the same; losses of the last epoch: {last}")


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(model: str) -> dict[str, int]:
    """Return how many lines a user of each side writes."""
    name = _MODELS[model]
    config = (_FILES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    peers = {side: Path(commands.peer(f"{name}_{side.lower()}")).read_text(encoding="utf-8") for side in _PEERS}
    task = code_lines((_FILES / f"{name}.py").read_text(encoding="utf-8"))
    ours = task + sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in config)
    return {_OURS: ours, **{side: code_lines(text) for side, text in peers.items()}}


def code_lines(text: str) -> int:
    """Return the number of lines of a Python file that are neither blank, comment, docstring nor for measuring."""
    skipped = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith(_MEASURING)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - skipped)


if __name__ == "__main__":
    benchmark.run(
        "bring_your_own",
        "A user's own BERT and ResNet-18 on two workers: a step and lines of code, beside Lightning and Accelerate.",
        measure,
        add_options,
    )
