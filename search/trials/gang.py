"""A trial with several workers: any strategy, with the workers placed in the trial's placement group."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.errors import TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, Found, list_checkpoints, load_tensors
from orchestray.platform.run.checkpoint_files import EXCHANGE_FILE, MODEL_FILE, OPTIMIZER_FILE, RESUME_FILE
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.files import remove_tree
from orchestray.platform.run.memory_store import HeldFolders, HolderLostError, MemoryStoreError
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress as ProgressDisplay
from orchestray.search.trials.clock import Clock, steps_per_epoch
from orchestray.search.trials.program import (
    EXCHANGE,
    MODEL,
    OF_REPLICAS,
    OPTIMIZER,
    RESUME,
    Progress,
    TrialState,
    part,
)
from orchestray.search.trials.task_cache import SEARCHED_TASK, TaskCache
from orchestray.search.trials.training import TrainingTrial, numbers
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.control.attempt import Attempt
from orchestray.trainers.driver.engines.actors import run_in_actors
from orchestray.trainers.driver.runlog.kill_schedule import still_to_happen
from orchestray.trainers.driver.runlog.output_log import OutputLog
from orchestray.trainers.driver.runlog.result import result_of
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress
from orchestray.trainers.optim.factory import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.core.outcome import Outcome

_PREFIXES = {MODEL_FILE: MODEL, OPTIMIZER_FILE: OPTIMIZER, EXCHANGE_FILE: EXCHANGE, RESUME_FILE: RESUME}
_MOMENTUM = "momentum_buffer"
"""The slot that SGD and RMSprop have with a momentum above 0 alone."""
_OF_RUN = ("position", "lines", "seconds")
"""Keys of a checkpoint's state that do not describe the arrangement of its replicas."""
_SHORTAGE = (
    "Its process, which holds it in memory, may be short of that or of open files (`ulimit -n`): run fewer trials at "
    "once (search.parallel)."
)


class WorkerPool:
    """The placement group of a process's trials, with workers that stay warm from one trial to the next."""

    def __init__(self, address: str) -> None:
        """
        Args:
            address: address at which the workers reach this machine.

        Raises:
            TrainingError: this process has no placement group.
        """
        self.address = address
        group = ray.util.get_current_placement_group()
        if group is None:
            raise TrainingError(
                "A trial of several workers runs in a placement group of its own, and this process has none: run the "
                "trial by `orchestray search` or orchestray.search(), which make one."
            )
        self.cluster = Cluster(owned=False, address=ray.get_runtime_context().gcs_address, room=group)

    def close(self) -> None:
        """Stop the workers."""
        make_room(self.cluster)


class GangTrial:
    """A run of several workers that trains up to a step, pauses there, and continues: a `TrialProgram`.

    The workers run in the placement group of the trial's own process, and stay warm between two reports and two trials.
    They end with the group: nothing of a trial is left once Tune has ended it in any way. Their checkpoints are kept in
    the memory of the trial's process, from which and to which weights are exchanged with other trials. They do not
    touch the disk, unless servers have to log their work (`exchange.persist`).
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        room: WorkerPool,
        directory: str,
        cpus_per_worker: float | None = None,
        is_measured: bool = False,
        unit: str = "steps",
    ) -> None:
        """
        Args:
            config: config of a run, with any strategy.
            room: pool in which its workers run.
            directory: directory for the trial's log and model; every node must reach it.
            cpus_per_worker: CPUs reserved for each worker; default: the value of the config.
            is_measured: True to measure the network even if it is the task's own.
            unit: unit in which `advance` counts: `steps`, `epochs` or `samples`.
        """
        self._unit = unit
        self._config, self._is_measured = config, is_measured
        self._measures: dict[str, float] | None = None
        resources = config.resources
        own = {"cpus_per_worker": cpus_per_worker or resources.cpus_per_worker}
        self._placed = config.model_copy(update={"resources": resources.model_copy(update=own)})
        """Config with the resources of the trial's placement group."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="gang-", dir=directory))
            stack.callback(remove_tree, folder)
            self._run = stack.enter_context(RunDirectory.create(folder, "run"))
            self._checkpoints = stack.enter_context(HeldFolders(room.address))
            settings = ReplicaSettings.from_config(
                config, storage=self._checkpoints.location, model_directory=str(self._run.paths.model)
            )
            self._kept = stack.pop_all()
            """Resources to remove when the trial is closed."""
        # Data in memory is not damaged by failures, so that one checkpoint is enough; a trial is judged by its last.
        self._settings = replace(settings, checkpoint_keep=1, best=None)
        self._cluster = room.cluster
        self._run_progress = RunProgress(time.time())
        self._stop = threading.Event()
        self._outcome: Outcome | None = None
        self._has_begun = False
        """True if there is a state beyond the task's initial one."""
        self.pause_cost_s = 0.0
        """Seconds that the last `advance` spent outside training, if it ran on warm workers and lost none: nearly all
        of it is the cost of pausing and resuming.
        """

    @property
    def step(self) -> int:
        """Number of completed steps.

        Raises:
            TrainingError: the checkpoint is lost.
        """
        found = self._newest()
        return 0 if found is None else found.step

    @cached_property
    def total_steps(self) -> int:
        """Number of steps of the whole budget."""
        return self._settings.steps or self._alone().total_steps

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return self._alone().steps_per_epoch

    def advance(self, step: int) -> Progress:
        """Train until `step` units are completed, and validate; up to step 0 in this process, without workers.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """
        if step == 0 and self.step == 0:
            return self._alone().advance(0)
        until = self._clock.steps(step)
        progress = self._advance(self._settings_until(until), until)
        return replace(progress, step=self._clock.reached(progress.step, step))

    @cached_property
    def _clock(self) -> Clock:
        return Clock.of(self._unit, self._config.train.batch_size, lambda: self._steps_per_epoch)

    @cached_property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self._plain_config(), TaskCache())

    def _advance(self, settings: ReplicaSettings, step: int) -> Progress:
        paths, began_s = self._run.paths, time.monotonic()
        before = len(read_lines(paths.metrics)) if paths.metrics.exists() else 0
        events = read_lines(paths.events) if paths.events.exists() else []
        found = self._newest()
        parked, restarts = list(self._cluster.parked), self._run_progress.restarts
        reached = 0 if found is None else found.step
        settings = replace(settings, faults=still_to_happen(settings.faults, events, reached))
        progress = ProgressDisplay(name=self._config.name, directory=self._run.path, quiet=True)
        with RunWriter(self._run, clock=self._run_progress.now_s) as writer, progress:
            run_log = RunLog(self._run_progress, writer, progress)
            run_log.output = OutputLog(writer, _print, shows_all=True)
            with contextlib.closing(run_log.output):
                outcome = self._trained(settings, run_log, found)
            writer.flush()
        self._outcome = outcome
        self._has_begun = self._has_begun or outcome.step > 0
        was_warm = bool(self._cluster.parked) and all(gang in parked for gang in self._cluster.parked)
        if was_warm and self._run_progress.restarts == restarts:
            self.pause_cost_s = max(0.0, time.monotonic() - began_s - outcome.training_s)
        self._stop.clear()  # it has been obeyed, or came too late
        lines = read_lines(paths.metrics)[before:]
        evaluations = tuple(numbers(line) for line in lines if line.get("split") == "validation")
        metrics = numbers(outcome.final.get("validation") or {})
        if (trained := (outcome.final.get("train") or {}).get("loss")) is not None:
            metrics["train_loss"] = float(trained)
        is_interrupted = outcome.ended == "interrupted" and outcome.step < step
        return Progress(
            outcome.step,
            metrics,
            evaluations,
            is_over=outcome.stopped_by is not None,
            is_interrupted=is_interrupted,
        )

    def _trained(self, settings: ReplicaSettings, run_log: RunLog, found: Found | None) -> Outcome:
        with _memory_errors():
            attempt = Attempt.of(self._placed, settings, self._cluster, run_log, found, self._stop)
            outcome: Outcome = run_in_actors(self._placed, attempt)
        return outcome

    def _settings_until(self, step: int) -> ReplicaSettings:
        """Return the settings of a run that pauses at a step."""
        whole = self._settings
        if not whole.exchange.get("persist"):  # servers with a log write it beside the model
            whole = replace(whole, model_directory=None)
        if whole.exchange.get("type") != "parameter_server":
            return replace(whole, pause_at=step)
        total = whole.steps or int(whole.epochs or 0) * self._steps_per_epoch
        # Servers cannot pause: for them the run ends there, with the learning rates of the whole run.
        schedule = dict(whole.lr_schedule)
        if schedule.get("type") in ("cosine", "linear"):
            schedule["total_steps"] = schedule.get("total_steps") or total
        return replace(whole, epochs=None, steps=min(step, total), lr_schedule=schedule)

    def measures(self) -> dict[str, float]:
        """Return the measures of the plain model, taken in this process."""
        if self._measures is None:
            is_wanted = self._is_measured or self._config.task.type == SEARCHED_TASK
            self._measures = self._alone().measures() if is_wanted else {}
        return self._measures

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None:
        """Return the metric names of the task; None if the model may be too large for one process."""
        network = self._config.strategy.network
        return self._alone().metric_names(wanted) if network.tensor * network.pipeline == 1 else None

    def has_validation(self) -> bool:
        """Return True if the task has validation data, or may have: the model may be too large for one process."""
        network = self._config.strategy.network
        return network.tensor * network.pipeline > 1 or self._alone().has_validation()

    def request_stop(self) -> None:
        """Have an `advance` in another thread end after the current step."""
        self._stop.set()

    def state(self) -> TrialState:
        """Return the state in the last checkpoint.

        Raises:
            TrainingError: the checkpoint is lost.
        """
        found = self._newest()
        if found is None:
            return self._alone().state()
        with _memory_errors():
            tensors = {
                prefix + name: tensor
                for file, prefix in _PREFIXES.items()
                if file in found.files
                for name, tensor in load_tensors(found, file).items()
            }
        layout = {key: value for key, value in found.state.items() if key not in _OF_RUN}
        return TrialState(tensors, {**found.state["position"], OF_REPLICAS: layout})

    def _newest(self) -> Found | None:
        """Return the checkpoint to resume from; None if nothing has been trained yet.

        Raises:
            TrainingError: the checkpoint is lost.
        """
        with _memory_errors():
            found = max(list_checkpoints(self._checkpoints.location), key=lambda found: found.step, default=None)
        if found is None and self._has_begun:
            raise TrainingError(
                f"The trial's checkpoint is not whole, and it cannot go on from what it had come to. {_SHORTAGE}"
            )
        return found

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Resume the workers from a state; with `partly`, take over the tensors of the model that fit.

        The momentum of a trial that had some is ignored where this one has none.

        Raises:
            TrainingError: the state cannot be stored for them.
            StorageError: the log of later steps cannot be removed.
        """
        if partly:
            self.inherit(state)
            return
        self._has_begun = False
        self._checkpoints.clear()
        model, optimizer, exchange, resume = (part(state.tensors, prefix) for prefix in _PREFIXES.values())
        if self._settings.optimizer and _MOMENTUM not in make_optimizer(**self._settings.optimizer).slots:
            optimizer = {name: tensor for name, tensor in optimizer.items() if name.rpartition(".")[2] != _MOMENTUM}
        position = dict(state.position)
        layout = {"num_replicas": 1, **position.pop(OF_REPLICAS, {}), "position": position}
        step = int(position.get("step", 0))
        with _memory_errors(), CheckpointWriter(self._checkpoints.location, keep=1) as checkpoints:
            checkpoints.save_async(step, model, optimizer, layout, exchange=exchange or None, resume=resume)
            checkpoints.wait()
        self._has_begun = True
        if self._run_progress.go_back_to(step):
            with RunWriter(self._run, clock=self._run_progress.now_s) as writer:
                writer.truncate_after(step)  # lines that are written from here on replace the removed ones

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None:
        """Start with the weights of another network, as far as they fit."""
        alone = self._alone()
        alone.inherit(state, overlap=overlap)
        self.load(alone.state())

    def leave_run(self, directory: Path) -> None:
        """Write the files that `serve` needs: `model/`, `config.yaml`, `metrics.jsonl`, `result.json`."""
        step = self.step
        self._advance(replace(self._settings_until(step), model_directory=self._settings.model_directory), step)
        assert self._outcome is not None
        with RunDirectory.create(directory.parent, directory.name) as run:
            run.write_config(dump_yaml(self._config))
            shutil.copytree(self._run.paths.model, run.paths.model)
            shutil.copyfile(self._run.paths.metrics, run.paths.metrics)
            run.write_result(result_of(self._outcome, self._run_progress))

    def close(self) -> None:
        """Remove temporary files and checkpoints; closing twice does nothing."""
        self._kept.close()

    def _alone(self) -> TrainingTrial:
        """Return a trial of the plain model in this process."""
        return TrainingTrial(self._plain_config(), is_measured=self._is_measured)

    def _plain_config(self) -> TrainConfig:
        """Return the config of the plain model in this process, which has none of the workers' GPUs."""
        from orchestray.trainers.config.schema import Strategy

        resources = self._config.resources.model_copy(update={"gpus_per_worker": 0.0})
        return self._config.model_copy(update={"strategy": Strategy(), "resources": resources})


def _print(who: str, lines: list[str]) -> None:
    """Print what a worker has printed as this process's own output, which goes into the log of its trial."""
    for line in lines:
        print(f"{who}: {line}", flush=True)  # noqa: T201 - it is the user's


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn errors of checkpoints in memory into trial failures: a StorageError, as of a disk, would end the search.

    Raises:
        TrainingError: instead of a MemoryStoreError of the body.
    """
    try:
        yield
    except HolderLostError as error:
        raise TrainingError(
            f"The workers do not reach the process of their trial, which holds its checkpoints: {error}. Nodes have to "
            "reach each other on any port: open the ports between them."
        ) from error
    except MemoryStoreError as error:
        raise TrainingError(f"The trial's checkpoint is lost: {error}. {_SHORTAGE}") from error
