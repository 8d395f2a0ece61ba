"""The peer of the recording benchmark: `ray.train.report` once a step, from two workers of a `TorchTrainer`.

Usage: ray_report.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any


def train_loop(spec: dict[str, Any]) -> None:
    import ray.train

    taken_s = []
    for step in range(1, spec["reports"] + 1):
        line = {"step": step, "epoch": 1, "loss": 0.6931471805599453, "lr": 0.1, "samples_per_s": 64 / 0.0123}
        before_s = time.perf_counter()
        ray.train.report(line)
        taken_s.append(time.perf_counter() - before_s)
    if ray.train.get_context().get_world_rank() == 0:
        Path(spec["out"]).write_text(json.dumps({"taken_s": taken_s}), encoding="utf-8")


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spec["out"] = sys.argv[2]
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    TorchTrainer(
        train_loop,
        train_loop_config=spec,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="report", storage_path=spec["storage"]),
    ).fit()


if __name__ == "__main__":
    main()
