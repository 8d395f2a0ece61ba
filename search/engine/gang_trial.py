"""A trial that is a whole gang: any strategy, its workers in the places that the trial was given."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.config.dump import dump_yaml
from orchestray.platform.errors import TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, load_checkpoint
from orchestray.platform.run.directory import RunDirectory, RunPaths
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.progress import Progress as RunProgress
from orchestray.platform.run.writer import RunWriter
from orchestray.search.engine.state_files import gang_prefix
from orchestray.search.trials.program import Progress, TrialState
from orchestray.search.trials.shelf import SEARCHED_TASK
from orchestray.search.trials.training import TrainingTrial, numbers
from orchestray.trainers.driver.actors import run_in_actors
from orchestray.trainers.driver.result import result_of
from orchestray.trainers.driver.story import Book, Story
from orchestray.trainers.replica.settings import ReplicaSettings

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestray.platform.config.schema import TrainConfig
    from orchestray.trainers.replica.outcome import Outcome

_MODEL, _OPTIMIZER = "model/", "optimizer/"


class Room:
    """The places of the trials of one process, with the workers that sit there: warm from one trial to the next."""

    def __init__(self) -> None:
        """
        Raises:
            TrainingError: this process was given no further places.
        """
        group = ray.util.get_current_placement_group()
        if group is None:
            raise TrainingError("A trial of several workers runs in a placement group of its own, and there is none.")
        self.cluster = Cluster(owned=False, address=ray.get_runtime_context().gcs_address, room=group)

    def close(self) -> None:
        """End the workers."""
        for gang in self.cluster.parked:
            gang.close()
        self.cluster.parked.clear()


class GangTrial:
    """A run of several workers that trains up to a step, pauses there, and goes on: a `TrialProgram`.

    The workers sit in the placement group of the trial's own process, and stay warm between two reports and two trials.
    They are gone with the group: nothing of a trial is left when Tune has ended it, however it ended.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        room: Room,
        directory: str,
        trial: int = 0,
        cpus_per_worker: float | None = None,
        is_measured: bool = False,
    ) -> None:
        """
        Args:
            config: of a run, with any strategy.
            room: where its workers sit.
            directory: under which the trial keeps its checkpoints; every node has to reach it.
            trial: its number, by which a later process finds them.
            cpus_per_worker: that are set aside for each worker; default: what the config says.
            is_measured: whether its network is measured although it is the task's own.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._named = gang_prefix(trial)
        self._folder = Path(tempfile.mkdtemp(prefix=self._named, dir=directory))
        self._config, self._is_measured = config, is_measured
        self._measures: dict[str, float] | None = None
        resources = config.resources
        own = {"cpus_per_worker": cpus_per_worker or resources.cpus_per_worker}
        self._placed = config.model_copy(update={"resources": resources.model_copy(update=own)})
        """The config with what the trial's places hold."""
        self._run = RunDirectory.create(self._folder, "run")
        storage = str(self._run.paths.checkpoints)
        self._settings = ReplicaSettings.from_config(
            config, storage=storage, model_directory=str(self._run.paths.model)
        )
        self._cluster = room.cluster
        self._story = Story(time.time())
        self._stop = threading.Event()
        self._outcome: Outcome | None = None

    def advance(self, step: int) -> Progress:
        """Train until `step` is completed, and validate.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """
        paths = self._run.paths
        before = len(read_lines(paths.metrics)) if paths.metrics.exists() else 0
        found, _ = latest_good(str(paths.checkpoints))
        settings = self._settings_until(step)
        progress = RunProgress(name=self._config.name, directory=self._run.path, quiet=True)
        with RunWriter(self._run, clock=self._story.now_s) as writer, progress:
            book = Book(self._story, writer, progress)
            outcome: Outcome = run_in_actors(self._placed, settings, self._cluster, book, found, self._stop)
            writer.flush()
        self._outcome = outcome
        self._stop.clear()  # it has been heeded, or came too late
        lines = read_lines(paths.metrics)[before:]
        evaluations = tuple(numbers(line) for line in lines if line.get("split") == "validation")
        metrics = numbers(outcome.final.get("validation") or {})
        if (trained := (outcome.final.get("train") or {}).get("loss")) is not None:
            metrics["train_loss"] = float(trained)
        is_interrupted = outcome.ended == "interrupted" and outcome.step < step
        return Progress(
            outcome.step, metrics, evaluations, is_over=outcome.ended == "until", is_interrupted=is_interrupted
        )

    def _settings_until(self, step: int) -> ReplicaSettings:
        """Those of a run that pauses at a step."""
        whole = self._settings
        if whole.exchange.get("type") != "parameter_server" or whole.steps is None:
            return replace(whole, pause_at=step)
        # Servers know no pause: for them the run is over there, at the learning rates of the whole one.
        schedule = dict(whole.lr_schedule)
        if schedule.get("type") in ("cosine", "linear"):
            schedule["total_steps"] = schedule.get("total_steps") or whole.steps
        return replace(whole, steps=min(step, whole.steps), lr_schedule=schedule)

    def measures(self) -> dict[str, float]:
        """As of a trial of one process: of the plain model, by this process."""
        if self._measures is None:
            is_wanted = self._is_measured or self._config.task.type == SEARCHED_TASK
            self._measures = self._alone().measures() if is_wanted else {}
        return self._measures

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None:
        """As of a trial of one process, unless the model may be too large for one."""
        network = self._config.strategy.network
        return self._alone().metric_names(wanted) if network.tensor * network.pipeline == 1 else None

    def request_stop(self) -> None:
        """Have `advance`, which is under way in another thread, end after the current step."""
        self._stop.set()

    def state(self) -> TrialState:
        """What the last checkpoint holds."""
        found, _ = latest_good(str(self._run.paths.checkpoints))
        if found is None:  # nothing was trained yet
            return self._alone().state()
        return _read(found)

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Have the workers go on from that state; with `partly` from the tensors of the model that fit."""
        if partly:
            self.inherit(state)
            return
        shutil.rmtree(self._run.paths.checkpoints, ignore_errors=True)
        tensors: dict[str, dict[str, Any]] = {_MODEL: {}, _OPTIMIZER: {}}
        for name, tensor in state.tensors.items():
            kind = _MODEL if name.startswith(_MODEL) else _OPTIMIZER
            tensors[kind][name.removeprefix(kind)] = tensor
        position = dict(state.position)
        with CheckpointWriter(str(self._run.paths.checkpoints), keep=self._settings.checkpoint_keep) as writer:
            told = {"position": position, "num_replicas": 1}
            writer.save_async(int(position.get("step", 0)), tensors[_MODEL], tensors[_OPTIMIZER], told)
            writer.wait()
        self._story.go_back_to(int(position.get("step", 0)))

    def take_over(self) -> None:
        """Go on from the newest checkpoint that earlier processes of the trial have left, where that is further."""
        own, _ = latest_good(str(self._run.paths.checkpoints))
        step = 0 if own is None else int(own.step)
        for left in sorted(self._folder.parent.glob(f"{self._named}*")):
            if left == self._folder:
                continue
            found, _ = latest_good(str(RunPaths(left / self._run.path.name).checkpoints))
            if found is not None and int(found.step) > step:
                self.load(_read(found))
                step = int(found.step)
            shutil.rmtree(left, ignore_errors=True)

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None:
        """Begin with the weights of another network, as far as they fit."""
        alone = self._alone()
        alone.inherit(state, overlap=overlap)
        self.load(alone.state())

    def leave_run(self, directory: Path) -> None:
        """Write what `serve` takes: `model/`, `config.yaml`, `metrics.jsonl`, `result.json`."""
        found, _ = latest_good(str(self._run.paths.checkpoints))
        self.advance(0 if found is None else int(found.step))
        assert self._outcome is not None
        with RunDirectory.create(directory.parent, directory.name) as run:
            run.write_config(dump_yaml(self._config))
            shutil.copytree(self._run.paths.model, run.paths.model)
            shutil.copyfile(self._run.paths.metrics, run.paths.metrics)
            run.write_result(result_of(self._outcome, self._story))

    def close(self) -> None:
        """Remove what was kept."""
        self._run.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _alone(self) -> TrainingTrial:
        """The plain model in this process."""
        from orchestray.platform.config.schema import Strategy

        config = self._config.model_copy(update={"strategy": Strategy()})
        return TrainingTrial(config, is_measured=self._is_measured)


def _read(checkpoint: Any) -> TrialState:
    model, optimizer, state = load_checkpoint(checkpoint)
    tensors = {_MODEL + name: tensor for name, tensor in model.items()}
    tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
    return TrialState(tensors, dict(state["position"]))
