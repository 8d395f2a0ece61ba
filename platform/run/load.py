"""Reading runs back: `orchestray.load_run`, and the list of runs. torch is imported when a model is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError, RunNameError
from orchestray.platform.run.checkpoint_files import Found, list_checkpoints
from orchestray.platform.run.directory import RunPaths, is_live, read_config_text, read_result
from orchestray.platform.run.format import metrics_of
from orchestray.platform.run.metrics import read_lines, read_metrics, read_tail
from orchestray.platform.run.recorded import Recorded, status_from

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from torch import nn

    from orchestray.platform.config.schema import TaskConfig, TrainConfig
    from orchestray.platform.task import Task, TaskSource


class Run(Recorded):
    """A run directory, read: finished, under way, or cut short."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._paths = RunPaths(path)

    @cached_property
    def config(self) -> TrainConfig:
        """The config as it was resolved."""
        from orchestray.platform.config.load import load_train_config

        read_config_text(self._paths)  # its errors say what a run without a config is
        return load_train_config(self._paths.config, look_at_task=False)  # its files may have moved since

    def metrics(self) -> pa.Table:
        """`metrics.jsonl`: a row a line, a column a key, null where a line has it not."""
        return read_metrics(self._paths.metrics)

    def events(self) -> list[dict[str, Any]]:
        """`events.jsonl`, in order."""
        return read_lines(self._paths.events)

    def checkpoints(self) -> list[Found]:
        """The checkpoints that look whole, oldest first."""
        return list_checkpoints(self._paths.checkpoint_location(self.config.checkpoint.storage))

    def load_task(self) -> Task:
        """The task, built again from what the run keeps of it.

        Raises:
            TaskError: it does not import any more, or refuses its arguments.
        """
        task: Task = import_module("orchestray.trainers.tasks").build(self._task_source())
        return task

    def load_model(self) -> nn.Module:
        """The trained model, on the CPU, in evaluation mode; of an ensemble one that answers with its members' mean.

        Raises:
            CheckpointError: the run has not finished, its model is damaged, or does not fit what the task builds now.
            TaskError: the task cannot be built.
        """
        from orchestray.platform.run.model_files import load_model_json, load_model_tensors

        tensors = load_model_tensors(self._paths.model)
        model = self._build_model(load_model_json(self._paths.model).get("ensemble"))
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
        if len(dtypes) == 1:  # a model trained in float64 stays one
            model.to(dtypes.pop())
        import_module("orchestray.trainers.weights").load_model_tensors(model, tensors)
        trained: nn.Module = model.eval()
        return trained

    def build_model(self, num_members: int) -> nn.Module:
        """The model of the run's checkpoints, without their weights; the run need not have finished.

        Args:
            num_members: of the ensemble that a checkpoint holds; 0: none.

        Raises:
            TaskError: the task cannot be built.
        """
        if not num_members:
            return self._build_model(None)
        exchange: Any = self.config.strategy.exchange
        is_ensemble = exchange.type == "independent"
        ensemble: dict[str, Any] = {"members": num_members, "average": exchange.average if is_ensemble else "outputs"}
        if is_ensemble and len(exchange.members) == num_members:
            from orchestray.platform.config.members import member_config

            usual, config = self._task_source().arguments, self.config
            own = [_own(member_config(config, index).task, config.task) for index in range(num_members)]
            ensemble["arguments"] = [{**usual, **each} for each in own]
        return self._build_model(ensemble)

    def _build_model(self, ensemble: Mapping[str, Any] | None) -> nn.Module:
        """Without its weights. `ensemble`: what `model.json` says of one."""
        task = self.load_task()
        if ensemble is None:
            return task.build_model()
        own = ensemble.get("arguments")
        count = int(ensemble["members"])
        members = [task.build_model() for _ in range(count)] if own is None else self._built_apart(own)
        built: nn.Module = import_module("orchestray.trainers.consolidation.ensemble").Ensemble(
            members, ensemble["average"]
        )
        return built

    def _built_apart(self, arguments: Sequence[Mapping[str, Any]]) -> list[nn.Module]:
        """A model for each member's arguments of the task."""
        source, build = self._task_source(), import_module("orchestray.trainers.tasks").build
        return [build(replace(source, arguments=dict(own))).build_model() for own in arguments]

    def _task_source(self) -> TaskSource:
        """The task as the trained model keeps it, with the text of its file; of an unfinished run, its config's."""
        from orchestray.platform.run.model_files import load_model_json
        from orchestray.platform.task import TaskSource

        if (self._paths.model / "model.json").exists():
            return TaskSource.from_json(load_model_json(self._paths.model)["task"])
        return TaskSource.from_config(self.config.task)


def _own(task: TaskConfig, of_run: TaskConfig) -> dict[str, Any]:
    """The arguments that a member of an ensemble has of its own."""
    usual = of_run.arguments
    return {name: value for name, value in task.arguments.items() if name not in usual or usual[name] != value}


@dataclass(frozen=True)
class RunSummary:
    """A run in a list."""

    name: str
    status: str
    steps: int | None
    loss: float | None
    """Of the training data, at the last step."""
    metrics: Mapping[str, float | None]
    """Of the last validation, its loss included."""
    seconds: float | None
    started_at: float | None
    """Unix time."""


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in the directory `path`.

    Raises:
        RunNameError: there is no run.
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
    """The runs in a directory, the newest last. Reads only the ends of long logs."""
    try:
        folders = [entry for entry in Path(runs_dir).iterdir() if _is_run(entry)]
    except OSError:
        return []
    return sorted(map(summarize, folders), key=lambda summary: (summary.started_at or 0.0, summary.name))


def list_searches(runs_dir: str | os.PathLike[str]) -> list[str]:
    """The names of the searches in a directory, in alphabetical order."""
    try:
        return sorted(entry.name for entry in Path(runs_dir).iterdir() if _is_search(entry))
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and not _is_search(path)


def _is_search(path: Path) -> bool:
    """Whether a directory is that of a search, whose runs are its trials."""
    return (path / "trials.jsonl").is_file()


def summarize(path: Path) -> RunSummary:
    """One run's line of the list; what cannot be read is None."""
    paths, live = RunPaths(path), is_live(path)  # before the result: see `recorded.read_status`
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
    """When the run was created: its lock file is made then, and never written."""
    try:
        return paths.lock.stat().st_mtime
    except OSError:
        return None
