"""A trial that is a whole gang: any strategy, its workers in the places that the trial was given."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.config.dump import dump_yaml
from orchestray.platform.errors import TrainingError
from orchestray.platform.gang.pool import make_room
from orchestray.platform.run.checkpoint import CheckpointWriter, Found, list_checkpoints, load_tensors
from orchestray.platform.run.checkpoint_files import EXCHANGE_FILE, MODEL_FILE, OPTIMIZER_FILE
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.files import remove_tree
from orchestray.platform.run.memory_store import HeldFolders, HolderLostError, MemoryStoreError
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.progress import Progress as RunProgress
from orchestray.platform.run.writer import RunWriter
from orchestray.search.trials.program import EXCHANGE, MODEL, OF_REPLICAS, OPTIMIZER, Progress, TrialState, part
from orchestray.search.trials.shelf import SEARCHED_TASK
from orchestray.search.trials.training import TrainingTrial, numbers
from orchestray.trainers.driver.actors import run_in_actors
from orchestray.trainers.driver.kills import still_to_happen
from orchestray.trainers.driver.result import result_of
from orchestray.trainers.driver.story import Book, Story
from orchestray.trainers.replica.settings import ReplicaSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from orchestray.platform.config.schema import TrainConfig
    from orchestray.trainers.replica.outcome import Outcome

_PREFIXES = {MODEL_FILE: MODEL, OPTIMIZER_FILE: OPTIMIZER, EXCHANGE_FILE: EXCHANGE}
_OF_RUN = ("position", "lines", "seconds")
"""What a checkpoint's state tells beside how its replicas were arranged."""
_SHORTAGE = (
    "Its process, which holds it in memory, may be short of that or of open files (`ulimit -n`): run fewer trials at "
    "once (search.parallel)."
)


class Room:
    """The places of the trials of one process, with the workers that sit there: warm from one trial to the next."""

    def __init__(self, address: str) -> None:
        """
        Args:
            address: at which the workers reach this machine.

        Raises:
            TrainingError: this process was given no further places.
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
        """End the workers."""
        make_room(self.cluster)


class GangTrial:
    """A run of several workers that trains up to a step, pauses there, and goes on: a `TrialProgram`.

    The workers sit in the placement group of the trial's own process, and stay warm between two reports and two trials.
    They are gone with the group: nothing of a trial is left when Tune has ended it, however it ended. Their checkpoints
    lie in the memory of the trial's process: the weights go from there to other trials and from others to there, and
    see no disk, unless servers are to log what they do (`exchange.persist`).
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        room: Room,
        directory: str,
        cpus_per_worker: float | None = None,
        is_measured: bool = False,
    ) -> None:
        """
        Args:
            config: of a run, with any strategy.
            room: where its workers sit.
            directory: under which the trial keeps its log, and leaves its model; every node has to reach it.
            cpus_per_worker: that are set aside for each worker; default: what the config says.
            is_measured: whether its network is measured although it is the task's own.
        """
        self._config, self._is_measured = config, is_measured
        self._measures: dict[str, float] | None = None
        resources = config.resources
        own = {"cpus_per_worker": cpus_per_worker or resources.cpus_per_worker}
        self._placed = config.model_copy(update={"resources": resources.model_copy(update=own)})
        """The config with what the trial's places hold."""
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
            """What is removed when the trial is closed."""
        # Nothing damages what lies in memory, so that an older one need not be kept for it.
        self._settings = replace(settings, checkpoint_keep=1)
        self._cluster = room.cluster
        self._story = Story(time.time())
        self._stop = threading.Event()
        self._outcome: Outcome | None = None
        self._has_begun = False
        """Whether there is a state that is more than the task's first."""
        self.pause_cost_s = 0.0
        """What the last `advance` of warm workers that lost none took beside training: nearly all that to end and to go
        on costs."""

    def advance(self, step: int) -> Progress:
        """Train until `step` is completed, and validate.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """
        return self._advance(self._settings_until(step), step)

    def _advance(self, settings: ReplicaSettings, step: int) -> Progress:
        paths, began_s = self._run.paths, time.monotonic()
        before = len(read_lines(paths.metrics)) if paths.metrics.exists() else 0
        events = read_lines(paths.events) if paths.events.exists() else []
        found = self._newest()
        parked, restarts = list(self._cluster.parked), self._story.restarts
        reached = 0 if found is None else found.step
        settings = replace(settings, faults=still_to_happen(settings.faults, events, reached))
        progress = RunProgress(name=self._config.name, directory=self._run.path, quiet=True)
        with RunWriter(self._run, clock=self._story.now_s) as writer, progress:
            book = Book(self._story, writer, progress)
            outcome = self._trained(settings, book, found)
            writer.flush()
        self._outcome = outcome
        self._has_begun = self._has_begun or outcome.step > 0
        was_warm = bool(self._cluster.parked) and all(gang in parked for gang in self._cluster.parked)
        if was_warm and self._story.restarts == restarts:
            self.pause_cost_s = max(0.0, time.monotonic() - began_s - outcome.training_s)
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

    def _trained(self, settings: ReplicaSettings, book: Book, found: Found | None) -> Outcome:
        with _memory_errors():
            outcome: Outcome = run_in_actors(self._placed, settings, self._cluster, book, found, self._stop)
        return outcome

    def _settings_until(self, step: int) -> ReplicaSettings:
        """Those of a run that pauses at a step."""
        whole = self._settings
        if not whole.exchange.get("persist"):  # servers that log what they do log it beside the model
            whole = replace(whole, model_directory=None)
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
        """What the last checkpoint holds.

        Raises:
            TrainingError: there is none any more.
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
        told = {key: value for key, value in found.state.items() if key not in _OF_RUN}
        return TrialState(tensors, {**found.state["position"], OF_REPLICAS: told})

    def _newest(self) -> Found | None:
        """The checkpoint to go on from; None: nothing was trained yet.

        Raises:
            TrainingError: there is none any more.
        """
        with _memory_errors():
            found = max(list_checkpoints(self._checkpoints.location), key=lambda found: found.step, default=None)
        if found is None and self._has_begun:
            raise TrainingError(
                f"The trial's checkpoint is not whole, and it cannot go on from what it had come to. {_SHORTAGE}"
            )
        return found

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Have the workers go on from that state; with `partly` from the tensors of the model that fit.

        Raises:
            TrainingError: it cannot be kept for them.
            StorageError: what the log tells of later steps cannot be removed.
        """
        if partly:
            self.inherit(state)
            return
        self._has_begun = False
        self._checkpoints.clear()
        model, optimizer, exchange = (part(state.tensors, prefix) for prefix in _PREFIXES.values())
        position = dict(state.position)
        told = {"num_replicas": 1, **position.pop(OF_REPLICAS, {}), "position": position}
        step = int(position.get("step", 0))
        with _memory_errors(), CheckpointWriter(self._checkpoints.location, keep=1) as checkpoints:
            checkpoints.save_async(step, model, optimizer, told, exchange=exchange or None)
            checkpoints.wait()
        self._has_begun = True
        if self._story.go_back_to(step):
            with RunWriter(self._run, clock=self._story.now_s) as writer:
                writer.truncate_after(step)  # what follows is told by the lines that are added

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None:
        """Begin with the weights of another network, as far as they fit."""
        alone = self._alone()
        alone.inherit(state, overlap=overlap)
        self.load(alone.state())

    def leave_run(self, directory: Path) -> None:
        """Write what `serve` takes: `model/`, `config.yaml`, `metrics.jsonl`, `result.json`."""
        found = self._newest()
        step = 0 if found is None else found.step
        self._advance(replace(self._settings_until(step), model_directory=self._settings.model_directory), step)
        assert self._outcome is not None
        with RunDirectory.create(directory.parent, directory.name) as run:
            run.write_config(dump_yaml(self._config))
            shutil.copytree(self._run.paths.model, run.paths.model)
            shutil.copyfile(self._run.paths.metrics, run.paths.metrics)
            run.write_result(result_of(self._outcome, self._story))

    def close(self) -> None:
        """Remove what was kept; closing twice is no error."""
        self._kept.close()

    def _alone(self) -> TrainingTrial:
        """The plain model in this process."""
        from orchestray.platform.config.schema import Strategy

        config = self._config.model_copy(update={"strategy": Strategy()})
        return TrainingTrial(config, is_measured=self._is_measured)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Have what goes wrong with a checkpoint in memory fail its trial: a StorageError, as of a disk, ends the search.

    Raises:
        TrainingError: in the place of a MemoryStoreError of the body.
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
