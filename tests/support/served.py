"""Models to serve and run directories that hold them, made in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.run.model_files import save_model
from orchestray.platform.task import TaskSource
from orchestray.serving.models.served import ServedModel
from orchestray.trainers.tasks import build

CONFIG = """name: {name}
task: {task}
train: {{batch_size: 8, steps: 1, optimizer: {{type: sgd, lr: 0.1}}}}
"""


def linear_model(num_inputs: int = 4, num_outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(num_inputs, num_outputs)


def served_linear(name: str = "linear", version: str = "1", seed: int = 0, **settings: Any) -> ServedModel:
    return ServedModel(linear_model(seed=seed), torch.zeros(4), name=name, version=version, **settings)


def written_run(
    runs_dir: Path,
    name: str = "digits",
    *,
    seed: int = 0,
    task: dict[str, Any] | None = None,
    model_json: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write a run directory as training leaves it, with the untrained model of a task."""
    task = {"type": "digits", "hidden": [8]} if task is None else task
    path = runs_dir / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(name=name, task=task))
    kind, arguments = task["type"], {key: value for key, value in task.items() if key != "type"}
    file, _, _ = kind.rpartition(":")
    is_file = Path(file).is_file()  # else the run keeps its name alone
    source = TaskSource.of_class(kind, arguments) if is_file else TaskSource(kind, arguments)
    if tensors is None:
        torch.manual_seed(seed)
        tensors = build(source).build_model().state_dict()
    save_model(
        path / "model", tensors, {"task": source.to_json(), "precision": "float32", "seed": seed, **(model_json or {})}
    )
    return path
