"""Runs read back: `orchestray.load_run`, and the list of runs. torch is imported only when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestray.platform.errors import CheckpointError, OrchestrayError, RunNameError
from orchestray.platform.report.run_reader import Recorded, status_from
from orchestray.platform.run.checkpoint_files import Found, list_checkpoints
from orchestray.platform.run.directory import RunPaths, is_live, read_config_text, read_result
from orchestray.platform.run.files import load_json
from orchestray.platform.run.metrics import read_lines, read_metrics, read_tail
from orchestray.platform.terminal.format import metrics_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from torch import nn

    from orchestray.platform.task import Task, TaskSource
    from orchestray.trainers.config.schema import TaskConfig, TrainConfig


class Run(Recorded):
    """A run directory, read: of a run that is finished, in progress or interrupted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._paths = RunPaths(path)

    @cached_property
    def config(self) -> TrainConfig:
        """Resolved config of the run."""
        from orchestray.trainers.config.load import load_train_config

        read_config_text(self._paths)  # raises an error that explains a run without a config
        return load_train_config(self._paths.config, look_at_task=False)  # its files may have moved since

    def metrics(self) -> pa.Table:
        """Return `metrics.jsonl` as a table: a row per line, a column per key, null for missing keys."""
        return read_metrics(self._paths.metrics)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of `events.jsonl`, in order."""
        return read_lines(self._paths.events)

    def checkpoints(self) -> list[Found]:
        """Return the checkpoints that look complete, oldest first."""
        return list_checkpoints(self._paths.checkpoint_location(self.config.checkpoint.storage))

    def load_task(self) -> Task:
        """Build the task again from the run's copy of it.

        Raises:
            TaskError: the task can no longer be imported, or refuses its arguments.
        """
        task: Task = import_module("orchestray.trainers.tasks").build(self.task_source())
        return task

    def load_model(self, checkpoint: int | Literal["best"] | None = None) -> nn.Module:
        """Load the trained model, on the CPU, in evaluation mode.

        If the run trained an ensemble, the model returns the mean of its members' outputs.

        Args:
            checkpoint: step of a checkpoint, or "best"; the run need not have finished. None: the model that the run
                ended with.

        Raises:
            CheckpointError: the run has not finished, has no such checkpoint, the model is damaged, or does not fit the
                one that the task builds now.
            TaskError: the task cannot be built.
        """
        from orchestray.platform.run.model_files import load_model_json

        saved = import_module("orchestray.trainers.saved.trained_model")
        if checkpoint is None:
            state, described = saved.read_model(self._paths.model), load_model_json(self._paths.model)
            model, precision = self.build_as(described.get("ensemble")), described.get("precision")
        else:
            found = self._checkpoint(checkpoint)
            state = import_module("orchestray.trainers.saved.checkpoint_model").load_model(found)
            model, precision = self.build_model(int(found.state.get("members", 0))), self.config.train.precision
        trained: nn.Module = saved.fill(model, state, precision).eval()
        return trained

    def _checkpoint(self, which: int | Literal["best"]) -> Found:
        """Return one of the checkpoints, by its step or as the best."""
        every = self.checkpoints()
        step = which if which != "best" else every[-1].best_step if every else None
        for found in every:
            if found.step == step:
                return found
        there_are = ", ".join(str(found.step) for found in every) or "none"
        wanted = "best checkpoint; set checkpoint.best" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"The run {self.name} has no {wanted} (it has those of the steps: {there_are}).")

    def build_model(self, num_members: int) -> nn.Module:
        """Build the model of the run's checkpoints, without their weights; the run need not have finished.

        Args:
            num_members: members of the ensemble in a checkpoint; 0: no ensemble.

        Raises:
            TaskError: the task cannot be built.
        """
        if not num_members:
            return self.build_as(None)
        exchange: Any = self.config.strategy.exchange
        is_ensemble = exchange.type == "independent"
        ensemble: dict[str, Any] = {"members": num_members, "average": exchange.average if is_ensemble else "outputs"}
        if is_ensemble and len(exchange.members) == num_members:
            from orchestray.trainers.config.members import member_config

            usual, config = self.task_source().arguments, self.config
            own = [_own(member_config(config, index).task, config.task) for index in range(num_members)]
            ensemble["arguments"] = [{**usual, **each} for each in own]
        return self.build_as(ensemble)

    def build_as(self, ensemble: Mapping[str, Any] | None) -> nn.Module:
        """Build the model without its weights. `ensemble` is that entry of `model.json`."""
        task = self.load_task()
        if ensemble is None:
            return task.build_model()
        own = ensemble.get("arguments")
        count = int(ensemble["members"])
        members = [task.build_model() for _ in range(count)] if own is None else self._build_members(own)
        built: nn.Module = import_module("orchestray.trainers.ensemble.ensemble").Ensemble(members, ensemble["average"])
        return built

    def _build_members(self, arguments: Sequence[Mapping[str, Any]]) -> list[nn.Module]:
        """Build a model for each member's arguments of the task."""
        source, build = self.task_source(), import_module("orchestray.trainers.tasks").build
        return [build(replace(source, arguments=dict(own))).build_model() for own in arguments]

    def task_source(self) -> TaskSource:
        """Return the task stored with the trained model, including the texts of its files.

        An unfinished run has the task that it was begun with.
        """
        from orchestray.platform.run.model_files import load_model_json
        from orchestray.platform.task import TaskSource

        if (self._paths.model / "model.json").exists():
            return TaskSource.from_json(load_model_json(self._paths.model)["task"])
        if self._paths.code.exists():
            return TaskSource.from_json(load_json(self._paths.code)["task"])
        return TaskSource.from_config(self.config.task, self.config.train)


def _own(task: TaskConfig, of_run: TaskConfig) -> dict[str, Any]:
    """Return the arguments that only this member of an ensemble has."""
    usual = of_run.arguments
    return {name: value for name, value in task.arguments.items() if name not in usual or usual[name] != value}


@dataclass(frozen=True)
class RunSummary:
    """The entry of a run in a list of runs."""

    name: str
    status: str
    steps: int | None
    loss: float | None
    """Training loss of the last step."""
    metrics: Mapping[str, float | None]
    """Metrics of the last validation, its loss included."""
    seconds: float | None
    started_at: float | None
    """Unix time of the start."""


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in the directory `path`.

    Raises:
        RunNameError: the directory has no run.
    """
    paths = RunPaths(Path(path).absolute())
    if _is_search(paths.path):
        raise RunNameError(f"{path} is a search; the best run it has found is {Path(path) / 'best'}")
    if not paths.config.is_file():
        raise RunNameError(
            f"there is no run in {path}: wanted a directory with a config.yaml; `orchestray runs list` shows the runs"
        )
    return Run(paths.path)


def list_runs(runs_dir: str | os.PathLike[str]) -> list[RunSummary]:
    """Return the runs in a directory, the newest last. Reads only the ends of long logs."""
    try:
        folders = [entry for entry in Path(runs_dir).iterdir() if _is_run(entry)]
    except OSError:
        return []
    return sorted(map(summarize, folders), key=lambda summary: (summary.started_at or 0.0, summary.name))


def list_searches(runs_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of the searches in a directory, in alphabetical order."""
    try:
        return sorted(entry.name for entry in Path(runs_dir).iterdir() if _is_search(entry))
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and not _is_search(path)


def _is_search(path: Path) -> bool:
    """Return True if the directory is that of a search, whose runs are its trials."""
    return (path / "trials.jsonl").is_file()


def summarize(path: Path) -> RunSummary:
    """Return a run's entry of the list; values that cannot be read are None."""
    paths, live = RunPaths(path), is_live(path)  # before the result, same as in `run_reader.read_status`
    try:
        result = read_result(paths) or None
        status = status_from(result, live=live)
    except OrchestrayError:
        result, status = None, "damaged"
    tail = read_tail(paths.metrics)
    last: dict[str, Any] = next((line for line in reversed(tail) if "split" not in line), {})
    validated: dict[str, Any] = next((line for line in reversed(tail) if "split" in line), {})
    if result is None:
        result = {"steps": last.get("step"), "seconds": tail[-1].get("time_s") if tail else None}
    final = result.get("final") or {}
    return RunSummary(
        name=path.name,
        status=status,
        steps=result.get("steps"),
        loss=(final.get("train") or last).get("loss"),
        metrics=metrics_of(final.get("validation") or validated),
        seconds=result.get("seconds"),
        started_at=_started_at(paths),
    )


def _started_at(paths: RunPaths) -> float | None:
    """Return the time of the run's creation: that of its lock file, which is never written later."""
    try:
        return paths.lock.stat().st_mtime
    except OSError:
        return None
