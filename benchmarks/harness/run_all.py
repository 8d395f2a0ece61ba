"""Run every benchmark, one after the other, and write results/summary.md: `python benchmarks run_all`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import benchmark, machine

BENCHMARKS = (
    "cli",
    "startup",
    "shutdown",
    "step_time",
    "optimizers",
    "second_order",
    "batch_sizes",
    "recording",
    "users_data",
    "small_data",
    "bring_your_own",
    "recovery",
    "storm",
    "checkpoint_pause",
    "pipeline",
    "naive_split",
    "sharding",
    "tensor_parallel",
    "planner",
    "planning_speed",
    "operators",
    "recompute",
    "split",
    "few_bits",
    "deep_compression",
    "layouts",
    "cost_models",
    "local_sgd",
    "simulated_cluster",
    "parameter_server",
    "replication_flood",
    "hogwild",
    "straggler",
    "worker_killed",
    "compression",
    "exchanges",
    "proposal_cost",
    "trivial_trials",
    "population_toy",
    "packed_population",
    "copy_weights",
    "asha",
    "nested_trials",
    "bayesian",
    "tabular",
    "architecture_search",
    "batching_poisson",
    "batching_sweep",
    "batching_steps",
    "overload",
    "serve_peers",
    "serve_rates",
    "serve_noop",
    "serve_ready",
    "serve_replicas",
    "serve_past_the_lock",
    "serve_kill",
    "serve_scaling",
    "continuous_batching",
    "pipeline_serving",
    "hops",
)
_TIMEOUT_S = 4 * 3600.0
"""The longest, of nested trials, takes about two hours on a quiet machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of each; writes no results")
    parser.add_argument(
        "--only", nargs="*", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help="no name: the summary alone"
    )
    parser.add_argument("--results-dir", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orchestray-benchmark-") as aside:
        results = arguments.results_dir or (Path(aside) if arguments.quick else benchmark.RESULTS)
        statuses = {name: run(name, results, quick=arguments.quick) for name in arguments.only}
        text = summary(results, statuses)
        print(text)
        if results != Path(aside):
            (results / "summary.md").write_text(text, encoding="utf-8")
    worst = (benchmark.STATUS_BROKEN, benchmark.STATUS_GOAL_MISSED)
    sys.exit(next((status for status in worst if status in statuses.values()), benchmark.STATUS_DONE))


def run(name: str, results: Path, *, quick: bool) -> int:
    """Run one benchmark in a process of its own; a failure does not stop the next ones."""
    command = [sys.executable, str(benchmark.FOLDER), name, "--results-dir", str(results)]
    if quick:
        command.append("--quick")
    lives = results / "startup.json"
    if name == "shutdown" and lives.exists() and time.time() - lives.stat().st_mtime < 600:
        command += ["--lives", str(lives)]
    benchmark.say(f"--- {name}")
    began_s = time.monotonic()
    try:
        status = subprocess.run(command, timeout=_TIMEOUT_S, check=False, stdout=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired:
        status = benchmark.STATUS_BROKEN
    benchmark.say(f"--- {name}: status {status}, {time.monotonic() - began_s:.0f} s")
    return status if status in (benchmark.STATUS_DONE, benchmark.STATUS_GOAL_MISSED) else benchmark.STATUS_BROKEN


def summary(results: Path, statuses: dict[str, int]) -> str:
    """Return one table of every goal, as the results have them: those measured now, and those that were there."""
    rows = []
    for name in BENCHMARKS:
        if statuses.get(name) == benchmark.STATUS_BROKEN:
            rows.append([name, "could not be measured", "", "", ""])
            continue
        if not (results / f"{name}.json").exists():
            continue
        result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        for goal in result["goals"]:
            unit = f" {goal['unit']}" if goal["unit"] else ""
            rows.append(
                [
                    name,
                    goal["name"],
                    f"{goal['value']:.3g}{unit}",
                    f"{goal['limit']:.3g}{unit}",
                    benchmark.verdict(goal["met"]),
                ]
            )
    here = machine.description()
    lines = ["# Every goal", ""]
    lines += benchmark.table(["benchmark", "goal", "median", "at most", ""], rows)
    lines += [f"{here['processor']}, {here['cores']} cores, {here['memory_gb']} GB, {here['system']}. "]
    lines += ["How each was measured is in the file of its name, with every raw number."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
