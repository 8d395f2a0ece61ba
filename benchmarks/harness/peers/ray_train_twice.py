"""The peer of start-up and shutdown: the same training in `ray.train.torch.TorchTrainer`, twice in one process.

Usage: ray_train_twice.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_loop(spec: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    from harness.peers.plain import Plain

    context = ray.train.get_context()
    plain = Plain(spec)
    model = ray.train.torch.prepare_model(plain.model)
    optimizer = plain.optimizer(model)
    times = []
    for step, _loss in plain.steps(model, optimizer, context.get_world_rank(), context.get_world_size()):
        times.append(time.time())
        if step == spec["steps"]:
            break
    if context.get_world_rank() > 0:
        ray.train.report({"loss": _loss})
        return
    Path(spec["stamps"]).write_text(json.dumps(times), encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        torch.save(plain.model.state_dict(), Path(place) / "model.pt")
        ray.train.report({"loss": _loss}, checkpoint=ray.train.Checkpoint.from_directory(place))


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    runs: list[dict[str, Any]] = []
    for number in range(1, spec["runs"] + 1):
        called_at = time.time()
        stamps = Path(spec["storage"]) / f"stamps-{number}.json"
        TorchTrainer(
            train_loop,
            train_loop_config={**spec, "stamps": str(stamps)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=f"run-{number}", storage_path=spec["storage"]),
        ).fit()
        times = json.loads(stamps.read_text(encoding="utf-8"))
        runs.append({"called_at": called_at, "first_step_at": times[0], "last_step_at": times[-1]})
    Path(sys.argv[2]).write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
