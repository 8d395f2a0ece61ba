"""The peer of recovery and of the storm: a `TorchTrainer` that may fail often. It trains for ever, with checkpoints.

Usage: ray_train_recovery.py SPEC.json. Each worker appends a line a step to `<storage>/steps-<rank>.jsonl`.
"""

from __future__ import annotations

import json
import logging
import os
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
    rank, size = context.get_world_rank(), context.get_world_size()
    plain = Plain(spec)
    model = ray.train.torch.prepare_model(plain.model)
    optimizer = plain.optimizer(model)
    first_step = 1
    if found := ray.train.get_checkpoint():
        with found.as_directory() as place:
            state = torch.load(Path(place) / "state.pt")
        plain.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"] + 1
    log = Path(spec["storage"]) / f"steps-{rank}.jsonl"
    with log.open("a", encoding="utf-8", buffering=1) as file:
        for step, loss in plain.steps(model, optimizer, rank, size, first_step):
            file.write(json.dumps({"step": step, "at": time.time(), "pid": os.getpid()}) + "\n")
            if step % spec["checkpoint_every_steps"] == 0:
                _report(rank, step, loss, plain.model, optimizer)


def _report(rank: int, step: int, loss: float, model: Any, optimizer: Any) -> None:
    import ray.train
    import torch

    if rank > 0:
        ray.train.report({"loss": loss})
        return
    with tempfile.TemporaryDirectory() as place:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(place) / "state.pt")
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(place))


def main() -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    workers = spec.get("workers", 2)
    ray.init("local", num_cpus=workers, include_dashboard=False, logging_level=logging.ERROR)
    TorchTrainer(
        train_loop,
        train_loop_config=spec,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="recovery",
            storage_path=spec["storage"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
