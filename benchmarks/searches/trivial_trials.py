"""32 trivial trials on two cores: what a search costs beside its trials, against a plain `tune.Tuner`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness import benchmark

_TIMEOUT_S = 300.0
_TRIALS = 32


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    trials = 8 if options.quick else _TRIALS
    spec = {"trials": trials, "parallel": 2, "cpus": 1.0, "reuse": False}
    fractional = {**spec, "cpus": 0.5, "parallel": 4}
    found: dict[str, list[dict[str, float]]] = {}
    made = 0

    def run(script: str, side: str, asked: dict[str, Any]) -> None:
        nonlocal made
        made += 1
        place = options.workspace / f"search-{made}"
        place.mkdir()
        (place / "spec.json").write_text(json.dumps(asked), encoding="utf-8")
        out = place / "out.json"
        command = [sys.executable, str(benchmark.FOLDER / script), str(place / "spec.json"), str(out)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S, cwd=place)
        found.setdefault(side, []).append(json.loads(out.read_text(encoding="utf-8")))

    ours, peer = "searches/ours/trivial_search.py", "harness/peers/tune_trivial.py"
    sides = {
        "orchestray.search": lambda: run(ours, "ours", spec),
        "orchestray.search, half a CPU a trial, four at once": lambda: run(ours, "fractional", fractional),
        "tune.Tuner": lambda: run(peer, "tune", spec),
        "tune.Tuner, reuse_actors": lambda: run(peer, "tune_reuse", {**spec, "reuse": True}),
    }
    rounds, more = options.rounds(3), options.rounds(6)
    benchmark.alternate(sides, rounds, benchmark.say)
    # Our two sides start as many processes and are as good as equal: it takes more rounds to tell them apart.
    benchmark.alternate(dict(list(sides.items())[:2]), more, benchmark.say)
    report.settings = {**spec, "rounds": rounds, "more_rounds_of_ours": more}
    names = {
        "ours": "orchestray.search",
        "fractional": "orchestray.search, half a CPU a trial, four at once",
        "tune": "tune.Tuner",
        "tune_reuse": "tune.Tuner, reuse_actors",
    }
    calls, whole = {}, {}
    for side, name in names.items():
        calls[side] = [one["call_s"] for one in found[side]]
        whole[side] = [one["call_s"] + one["start_s"] for one in found[side]]
        report.add(f"{name}: the call, Ray being there", "s", calls[side])
        report.add(f"{name}: with the start of Ray", "s", whole[side])
    ratio = report.compare("call / tune.Tuner", calls["ours"][:rounds], calls["tune"])
    report.compare("with the start of Ray / tune.Tuner", whole["ours"][:rounds], whole["tune"])
    report.compare("call / tune.Tuner, reuse_actors", calls["ours"][:rounds], calls["tune_reuse"])
    report.compare(
        "with the start of Ray / tune.Tuner, reuse_actors, with it", whole["ours"][:rounds], whole["tune_reuse"]
    )
    halves = report.compare("halves of CPUs / whole ones", calls["fractional"], calls["ours"])
    report.goal("call / tune.Tuner", ratio, 0.2)
    report.goal("halves of CPUs / whole ones", halves, 1.0)
    report.notes.append(
        "Each of our trials builds a model, takes a step and validates, and leaves a line, a learning curve and "
        "TensorBoard files; each of Tune's computes one number."
    )


if __name__ == "__main__":
    benchmark.run("trivial_trials", "32 trivial trials on two cores, against a plain tune.Tuner.", measure)
