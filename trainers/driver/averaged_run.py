"""A run directory whose model is made from the last checkpoints of a run; written by `orchestray runs average`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.source import open_split
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.model_files import load_model_json
from orchestray.platform.usercode.beside import use_texts
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.buffer_kinds import differences, kinds_of
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.members import with_members
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.core.rng import RngKey
from orchestray.trainers.driver.runlog.result import failed
from orchestray.trainers.driver.runlog.run_log import RunProgress
from orchestray.trainers.ensemble.ensemble import Ensemble
from orchestray.trainers.loop.evaluation import evaluate
from orchestray.trainers.parallel.whole_model import WholeNetwork
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.saved.interface import INTERFACE, read_interface
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.saved.snapshots import average_snapshots, snapshot_ensemble
from orchestray.trainers.saved.trained_model import write_model
from orchestray.trainers.sync.allreduce.allreduce import AllReduce

if TYPE_CHECKING:
    import os

    from orchestray.platform.task import Task
    from orchestray.trainers.saved.run import Run


def write_average(
    run: Run,
    *,
    name: str,
    runs_dir: str | os.PathLike[str],
    last: int | None = None,
    as_ensemble: bool = False,
) -> Run:
    """Make one model from the last checkpoints of a run, validate it, and write it as a run of its own.

    Args:
        run: run, finished or not.
        name: name of the new run.
        runs_dir: directory in which the new run's directory is created.
        last: number of checkpoints; None: all of them.
        as_ensemble: True for a model that answers with the mean of the checkpoints' probabilities; False for the mean
            of their weights, see `average_snapshots`.

    Raises:
        CheckpointError: there are too few checkpoints, they are damaged, or do not fit each other.
        RunNameError: the name is in use.
        TaskError: the task cannot be built any more.
    """
    run_progress = RunProgress(time.time())
    steps = [int(found.step) for found in run.checkpoints()]
    if not steps:
        raise CheckpointError(f"The run {run.name} has no checkpoints of which a mean could be taken.")
    count = len(steps) if last is None else last
    model = snapshot_ensemble(run, count) if as_ensemble else average_snapshots(run, count)
    task = run.load_task()
    config = run.config.model_copy(update={"name": name})
    described = _described(run, task, model, copies=count if as_ensemble else 1)
    train = config.train
    validation = validate(task, model, batch_size=train.batch_size, precision=train.precision, step=steps[-1])
    with RunDirectory.create_whole(runs_dir, name) as directory:
        directory.write_config(dump_yaml(config))
        state = StateKeeper(model).state()
        buffers = differences(kinds_of(model), kinds_of(run.build_as(described.get("ensemble"))))
        model_directory = run.path / "model"
        interface = read_interface(model_directory) if (model_directory / "model.json").is_file() else None
        write_model(directory.paths.model, replace(state, buffers=buffers), described, task, interface)
        directory.write_result(
            {
                **failed(run_progress, "succeeded", None),
                "steps": steps[-1],
                "final": {"train": None, "validation": validation},
                "averaged": {
                    "run": run.name,
                    "steps": steps[-count:],
                    "what": "probabilities" if as_ensemble else "weights",
                },
            }
        )
    return load_run(Path(runs_dir) / name)


def validate(task: Task, model: nn.Module, *, batch_size: int, precision: str, step: int) -> dict[str, Any] | None:
    """Return the means of the task's metrics and its loss over the validation samples; None if there are none.

    Args:
        task: task of the model.
        model: model, which is put into evaluation mode.
        batch_size: samples per forward pass.
        precision: precision of the forward pass.
        step: number of the last step, for a loss that takes it.
    """
    forward = Forward(task, _Answering(model), precision, torch.device("cpu"))
    source = open_split(task, "validation")
    if not source.num_rows:
        return None
    weigh = getattr(task, "weight", None)
    stream = SampleStream(source, task.to_batch, batch_size=batch_size, shuffle=False, weigh=weigh)
    network = WholeNetwork(forward, RngKey(step=step), lambda: stream)
    with torch.no_grad():
        return with_members(evaluate(network, AllReduce(), stream, SoloCollective(), 0, task))


class _Answering(nn.Module):
    """A model in the form that its task evaluates: an ensemble of probabilities returns their logarithms."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model.logits(*inputs, **named) if isinstance(self.model, Ensemble) else self.model(*inputs, **named)


def _described(run: Run, task: Task, model: nn.Module, copies: int) -> dict[str, Any]:
    """Return the contents of `model.json`: the run's own; an ensemble has its members `copies` times over."""
    try:
        described = load_model_json(run.path / "model")
        described = {key: value for key, value in described.items() if key not in ("files", BUFFERS, INTERFACE)}
    except CheckpointError:  # the run has not finished
        with use_texts(run.task_source().texts):
            settings = ReplicaSettings.from_config(run.config, storage="", model_directory="")
        described = describe_model(settings, task, lambda member: tasks.build(settings.task_of(member)))
    ensemble = described.pop("ensemble", None) or {}
    if isinstance(model, Ensemble):
        own = {"arguments": ensemble["arguments"] * copies} if "arguments" in ensemble else {}
        described["ensemble"] = {"members": len(model.members), "average": model.average, **own}
    return described
