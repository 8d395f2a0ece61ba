"""The peer of the benchmark of trivial trials: `tune.Tuner` as its documentation has it, with the same score.

Usage: tune_trivial.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any


def trial(config: dict[str, Any]) -> None:
    from ray import tune

    tune.report({"score": -((config["x"] - 1.0) ** 2)})


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began_s = time.perf_counter()
    import ray
    from ray import tune

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    started_s = time.perf_counter()
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": spec["cpus"]}),
        param_space={"x": tune.uniform(-5.0, 5.0)},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=spec["trials"],
            max_concurrent_trials=spec["parallel"],
            reuse_actors=spec["reuse"],
        ),
        run_config=tune.RunConfig(storage_path=str(Path(sys.argv[2]).parent), name="tune", verbose=0),
    )
    results = tuner.fit()
    ended_s = time.perf_counter()
    assert len(results) == spec["trials"]
    Path(sys.argv[2]).write_text(json.dumps({"start_s": started_s - began_s, "call_s": ended_s - started_s}))
    ray.shutdown()


if __name__ == "__main__":
    main()
