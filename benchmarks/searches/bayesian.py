"""Bayesian optimisation beside Optuna's samplers and BoTorch: one objective, a bound, two objectives; 1 and 8 at once.

Losses do not depend on the machine's load. So a cell (a function, a sampler, trials at once, a seed) is measured once
and kept in the folder of `--kept`: the benchmark may be stopped and go on, and several processes may fill one folder.
Cells of ours are measured again when the methods' source changes, those of peers when their versions do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from harness import environments
from harness.benchmark import FOLDER, BenchmarkError, Options, Report, run, say
from orchestray.search.methods.base import Finished
from orchestray.search.methods.base import Report as TrialReport
from orchestray.search.registry.methods import make_method
from searches.bayesian_cases import CASES, Case, Outcome, Values, drive

WORKERS = (1, 8)
OURS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gaussian_process": ("bayesian", {}),
    "tpe": ("bayesian", {"model": "tpe"}),
    "random": ("random", {}),
}
PEERS: Mapping[str, Sequence[str]] = {
    "GPSampler": list(CASES),
    "TPESampler": list(CASES),
    "NSGAIISampler": [name for name, case in CASES.items() if case.num_objectives > 1],
    "BoTorch": [name for name, case in CASES.items() if case.num_objectives == 1 and not case.has_bound],
}
"""Functions that each peer searches."""
PACKAGES = ("optuna==5.0.0", "botorch==0.18.1")
_PROMISED = {"Branin": 0.01, "Hartmann-6": 0.1}
_LEAST = 1e-12

Cell = tuple[str, str, int, int]
"""Function, sampler, trials at once, seed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kept", type=Path, default=None, help="folder of the cells; default: in the workspace")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="FUNCTION")
    samplers = [*OURS, *PEERS]
    parser.add_argument("--samplers", nargs="*", choices=samplers, default=samplers, metavar="NAME")
    parser.add_argument("--peers-seeds", type=int, default=None, help="fewer seeds of the peers; default: all")
    environments.add_options(parser)


# -- cells -------------------------------------------------------------------------------------------------------------


class Kept:
    """The cells that are measured, a JSON list a line."""

    def __init__(self, folder: Path, versions: Mapping[str, str]) -> None:
        """
        Args:
            folder: where they are kept.
            versions: version of each sampler; cells of another version are not used.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._versions = folder / "cells.jsonl", versions

    def losses(self) -> dict[Cell, float]:
        """Return the loss of each cell."""
        if not self._path.exists():
            return {}
        rows = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return {
            (name, sampler, workers, seed): loss
            for name, sampler, workers, seed, loss, _, version in rows
            if self._versions[sampler] == version
        }

    def add(self, cell: Cell, loss: float, seconds: float) -> None:
        line = json.dumps([*cell, loss, round(seconds, 2), self._versions[cell[1]]])
        with self._path.open("a", encoding="utf-8") as file:  # one write of one line: several processes may do so
            file.write(line + "\n")


def source_version(sampler: str) -> str:
    """Return a digest of the code that one of our samplers is made of."""
    digest = hashlib.sha256()
    rooms = FOLDER.parent / "search"
    paths = [*(rooms / "methods" / "hyper").glob("*.py"), *(rooms / "methods").glob("*.py"), *rooms.glob("spaces/*.py")]
    for path in sorted(paths):
        if path.stem not in _OF_OTHERS[sampler]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_OF_OTHERS = {
    "gaussian_process": ("tpe",),
    "tpe": ("gaussian_process", "acquisition", "improvement"),
    "random": ("tpe", "gaussian_process", "acquisition", "improvement"),
}
"""Modules of the methods that a sampler does not use."""


def wanted(options: Options, seeds: int) -> Iterator[Cell]:
    """Yield the cells, seed by seed, so that a benchmark that is stopped has as many of each."""
    given = options.arguments
    for seed in range(seeds):
        for name in given.only:
            for sampler in given.samplers:
                few = sampler in PEERS and given.peers_seeds is not None and seed >= given.peers_seeds
                if not few and (sampler in OURS or name in PEERS[sampler]):
                    yield from ((name, sampler, workers, seed) for workers in WORKERS)


# -- ours and theirs ---------------------------------------------------------------------------------------------------


def ours(cell: Cell) -> float:
    """Return the loss of one of our methods."""
    name, sampler, workers, seed = cell
    case = CASES[name]
    kind, parameters = OURS[sampler]
    method = make_method(kind, space=case.space, trials=case.trials, seed=seed, **parameters)

    def ask() -> tuple[int, Values] | None:
        proposal = method.ask()
        return None if proposal is None else (proposal.trial, proposal.changes)

    def tell(trial: int, outcome: Outcome) -> None:
        scores = outcome.scores if len(outcome.scores) > 1 else ()
        violations = () if outcome.violation is None else (outcome.violation,)
        method.report(TrialReport(trial, 1, outcome.scores[0], scores, violations=violations))
        method.tell(Finished(trial, "succeeded", 1, outcome.scores[0], scores, violations=violations))

    return drive(case, ask, tell, workers)


def theirs(python: Path, cells: Sequence[Cell], kept: Kept) -> None:
    """Measure cells of the peers, in one process of their environment with one thread."""
    script = FOLDER / "harness" / "peers" / "samplers.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for cell in cells:
                process.stdin.write(json.dumps(cell) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    raise BenchmarkError(f"the process of the peers ended at {cell}")
                *_, loss, seconds = json.loads(answer)
                kept.add(cell, loss, seconds)
                say(f"{cell}: {loss:.4g}, {seconds} s")
        finally:
            process.stdin.close()


def measure(report: Report, options: Options) -> None:
    seeds = options.rounds(20, quick=1)
    given = options.arguments
    versions = {sampler: source_version(sampler) for sampler in OURS}
    versions |= {sampler: PACKAGES[sampler == "BoTorch"] for sampler in PEERS}
    kept = Kept(given.kept or options.workspace / "kept", versions)
    known = kept.losses()
    missing = [cell for cell in wanted(options, seeds) if cell not in known]
    of_peers = [cell for cell in missing if cell[1] in PEERS]
    python = environments.peers_python(options, PACKAGES, built_on_torch=True)
    report.settings = {"seeds": seeds, "trials": {name: case.trials for name, case in CASES.items()}}
    report.settings |= environments.versions(python, ("optuna", "botorch", "gpytorch", "torch", "scipy"))
    for cell in missing:
        if cell[1] in OURS:
            began_s = time.perf_counter()
            loss = ours(cell)
            kept.add(cell, loss, time.perf_counter() - began_s)
            say(f"{cell}: {loss:.4g}")
    if of_peers:
        theirs(python, of_peers, kept)
    show(report, kept.losses(), range(seeds), given.only)


# -- the result --------------------------------------------------------------------------------------------------------


def show(report: Report, losses: Mapping[Cell, float], seeds: Sequence[int], names: Sequence[str]) -> None:
    """Write the losses, and how ours compare seed by seed."""
    rows = []
    for name in names:
        case = CASES[name]
        for workers in WORKERS:
            row = f"{name}, {case.trials} trials, {workers} at once"
            of: dict[str, dict[int, float]] = {}
            for sampler in (*OURS, *PEERS):
                of[sampler] = {
                    s: losses[name, sampler, workers, s] for s in seeds if (name, sampler, workers, s) in losses
                }
                if of[sampler]:
                    report.add(f"{row}: {_loss(case)} of {sampler}", "", list(of[sampler].values()))
            promised = _PROMISED.get(name)
            if promised is not None and workers == 1 and of["gaussian_process"]:
                median = statistics.median(of["gaussian_process"].values())
                report.goal(f"{name}: regret after {case.trials}, Gaussian process", median, promised)
            pairs = [("gaussian_process", peer) for peer in PEERS] + [("tpe", "TPESampler")]
            found = [one for mine, peer in pairs if (one := Compared.of(row, mine, peer, of[mine], of[peer]))]
            for mine in ("gaussian_process", "tpe"):
                worst = max((one for one in found if one.mine == mine), key=lambda one: one.ratio, default=None)
                if worst is not None:
                    what = f"{row}: {mine} / {worst.peer}, seeds: {len(worst.ours)}"
                    report.goal(what, worst.ratio, 1.0)
            rows += [one.cells() for one in found]
    report.table(["", "ours", "peer", "seeds", "our median", "theirs", "better, worse", "p of worse"], rows)
    report.notes += NOTES
    fewest = min((int(row[3]) for row in rows), default=0)
    if fewest < len(seeds):
        report.notes.append(
            f"Not the whole comparison: rows have as few as {fewest} of {len(seeds)} seeds, and one or two say little. "
            "Where a peer has no row, it was not measured."
        )


def _loss(case: Case) -> str:
    return "regret" if case.num_objectives == 1 else "part of the area not dominated"


@dataclass(frozen=True)
class Compared:
    """Losses of one of our methods and of a peer, over the same seeds."""

    row: str
    mine: str
    peer: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @classmethod
    def of(
        cls, row: str, mine: str, peer: str, ours: Mapping[int, float], theirs: Mapping[int, float]
    ) -> Compared | None:
        """Compare losses by seed; None if there is no seed that both have."""
        shared = sorted(ours.keys() & theirs.keys())
        return cls(row, mine, peer, [ours[s] for s in shared], [theirs[s] for s in shared]) if shared else None

    @property
    def ratio(self) -> float:
        """Our median over the peer's."""
        return max(statistics.median(self.ours), _LEAST) / max(statistics.median(self.theirs), _LEAST)

    def cells(self) -> list[str]:
        """Return the row of the table."""
        pairs = list(zip(self.ours, self.theirs, strict=True))
        better, worse = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        chance = binomtest(worse, better + worse, alternative="greater").pvalue if better + worse else 1.0
        shown = [_spread(self.ours), _spread(self.theirs), f"{better}, {worse}", f"{chance:.2g}"]
        return [self.row, self.mine, self.peer, str(len(pairs)), *shown]


def _spread(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{statistics.median(values):.3g} ({low:.2g} to {high:.2g})"


NOTES = [
    (
        "The table has medians with quartiles, over the seeds that both sides have. `p of worse` is that of the sign "
        "test: how probable so many worse seeds are if neither side is better."
    ),
    "Trials last equally long; with 8 at once, 7 are running while the next is proposed.",
    (
        "With one objective the loss is the regret of the best feasible trial. With two it is the part of the area "
        "between the best of each objective and a fixed corner that no trial dominates; it cannot be 0."
    ),
    (
        "Optuna: samplers with default options, `constant_liar=True` of `TPESampler` for 8 at once, bounds by "
        "`constraints_func`."
    ),
    (
        "BoTorch: `SingleTaskGP` with its default prior after twice the number of keys plus 2 Sobol points; "
        "`LogExpectedImprovement`, for 8 at once `qLogExpectedImprovement` with `X_pending`; `optimize_acqf` with 10 "
        "restarts of 512 draws. A choice is one-hot and an integer a real number; both are rounded."
    ),
]

if __name__ == "__main__":
    run("bayesian", "Loss of Bayesian optimisation beside Optuna and BoTorch, over seeds.", measure, add_options)
