"""Runs with a trained model, made by the real loop without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.loop.task_host import TaskHost
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.run import Run, load_run
from orchestray.trainers.saved.trained_model import write_model
from support.layouts import train_laid_out


def train_here(
    source: Mapping[str, Any], *, runs_dir: str | Path, name: str | None = None, address: str | None = None
) -> Run:
    """Do what `train` does, in this process with replicas as threads; the run has a config, a model and a result."""
    config = load_train_config(dict(source), name=name)
    settings = ReplicaSettings.from_config(config, storage=None, model_directory="")
    host = TaskHost(settings)
    found = train_laid_out(lambda: TaskHost(settings)._task, settings)
    with RunDirectory.create(runs_dir, config.name) as directory:
        directory.write_config(dump_yaml(config))
        described = describe_model(settings, host._task, lambda member: tasks.build(settings.task_of(member)))
        write_model(directory.paths.model, ModelState(found.weights), described, host._task)
        validation = found.outcome.final.get("validation")
        directory.write_result(
            {
                "status": "succeeded",
                "steps": found.outcome.step,
                "error": None,
                "final": {"train": None, "validation": validation},
            }
        )
        return load_run(directory.path)
