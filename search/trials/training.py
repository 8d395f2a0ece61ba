"""An ordinary trial: any task, trained in this process like `orchestray train` with one worker."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.recorder import Recorder
from orchestray.search.spaces.architectures.inherit import inherited
from orchestray.search.trials.clock import Clock
from orchestray.search.trials.metric_names import metric_names
from orchestray.search.trials.program import MODEL, OF_REPLICAS, OPTIMIZER, RESUME, Progress, TrialState, part
from orchestray.search.trials.task_cache import SEARCHED_TASK, TaskCache
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.inputs import inputs_of
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.core.weight_norm import folded
from orchestray.trainers.driver.runlog.result import result_of
from orchestray.trainers.driver.runlog.run_log import RunProgress
from orchestray.trainers.loop.position import Position
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.loop.task_stream import task_stream
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.trained_model import write_model

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Batch
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.core.outcome import Outcome


class TrainingTrial:
    """A run of one process that trains up to a step, pauses there, and continues: a `TrialProgram`.

    Its state at a step is, bit for bit, that of `orchestray train` with the same config: learning rates follow the
    whole budget, wherever it pauses.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        task_cache: TaskCache | None = None,
        is_measured: bool = False,
        unit: str = "steps",
        **arguments: Any,
    ) -> None:
        """Build the model, without training.

        Args:
            config: config of a run with one worker.
            task_cache: cache of tasks and data that this process shares between trials; default: a new one.
            is_measured: True to measure the network even if it is the task's own.
            unit: unit in which `advance` counts: `steps`, `epochs` or `samples`.
            arguments: must be empty.

        Raises:
            OrchestrayError: the task or its model cannot be built.
        """
        if arguments:
            raise TypeError(f"an ordinary trial takes no arguments, got {', '.join(arguments)}")
        self._task_cache, self._is_measured = task_cache or TaskCache(), is_measured
        self._unit = unit
        self._lines: list[dict[str, Any]] = []
        self._started_at = time.time()
        self._trained_s = 0.0
        self._outcome: Outcome | None = None
        self._measures: dict[str, float] = {}
        self._build(config)

    def _build(self, config: TrainConfig) -> None:
        self._config = config
        self._settings = ReplicaSettings.from_config(config, storage="", model_directory="")
        self._settings.arithmetic.apply()
        self._device = device = device_of(self._settings)
        self._task = self._task_cache.task(self._settings, device)
        self._streams: dict[str, SampleStream] = {}
        self._recorder = Recorder()
        self._replica = Replica(self._task, self._settings, self._stream, recorder=self._recorder, device=device)
        self._replica.connect(SoloCollective())
        batch_size = config.train.batch_size
        self._clock = Clock.of(self._unit, batch_size, lambda: self._stream("train", 0).steps_per_epoch)

    def _stream(self, split: str, rank: int) -> SampleStream:
        if split not in self._streams:
            source = self._task_cache.source(self._settings, self._task, split)
            self._streams[split] = task_stream(self._task, source, split, self._settings, device=self._device)
        return self._streams[split]

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._replica.position.step

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole budget."""
        return self._replica.total_steps(self._stream("train", 0))

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return self._stream("train", 0).steps_per_epoch

    def close(self) -> None:
        """Release nothing: all is in this process."""

    def advance(self, step: int) -> Progress:
        """Train until `step` units are completed (at most the budget's), and validate.

        Raises:
            OrchestrayError: the training failed; the text says why.
        """
        replica, until = self._replica, self._clock.steps(step)
        replica.pause_at = until
        began_s = time.perf_counter()
        self._outcome = replica.run(self._started_at)
        replica.stop_requested = False  # it has been obeyed, or came too late
        is_interrupted = self._outcome.ended == "interrupted" and replica.position.step < until
        is_validated = replica.position.validation is not None
        if not is_interrupted and not (is_validated and replica.position.validated_step == replica.position.step):
            replica.validate()
        self._trained_s += time.perf_counter() - began_s
        lines = [line for line in self._recorder.drain(0.0) if "event" not in line]
        self._lines += lines
        validations = [numbers(line) for line in lines if line.get("split") == "validation"]
        metrics = numbers(replica.position.validation or {})
        if (trained := (self._outcome.final.get("train") or {}).get("loss")) is not None:
            metrics["train_loss"] = float(trained)
        return Progress(
            self._clock.reached(replica.position.step, step),
            metrics,
            tuple(validations),
            is_over=self._outcome.stopped_by is not None,
            is_interrupted=is_interrupted,
        )

    def measures(self) -> dict[str, float]:
        """Return `parameters`, `flops` and `latency_ms` of a searched network, or of any with `is_measured`.

        A number that would be too small is not given: `flops` is NaN if operations could not be counted.
        """
        is_searched = self._settings.task.type == SEARCHED_TASK
        if (is_searched or self._is_measured) and not self._measures:
            from orchestray.search.spaces.architectures.measure import measure

            found = measure(self._replica.model, inputs_of(self._stream("train", 0).one_sample()))
            if found.flops.uncounted:
                warnings.warn(
                    "The operations of a forward pass are not known: there is no formula for "
                    f"{', '.join(found.flops.uncounted)}. flops is left out.",
                    stacklevel=1,
                )
            self._measures = {
                "parameters": float(found.parameters),
                "flops": math.nan if found.flops.uncounted else float(found.flops.counted),
                "latency_ms": found.latency_ms,
            }
        return self._measures

    def has_validation(self) -> bool:
        """Return True if the task has validation data."""
        return self._stream("validation", 0).num_samples > 0

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None:
        """Return the names of the task's own metrics, found with the current model; None if that does not tell."""
        return metric_names(self._task, self._replica.model, self._stream("validation", 0), self._cast, wanted)

    def _cast(self, batch: Batch) -> Batch:
        return Forward(self._task, self._replica.model, self._settings.precision, self._device).place(batch)

    def request_stop(self) -> None:
        """Have an `advance` in another thread end after the current step."""
        self._replica.stop_requested = True

    def state(self) -> TrialState:
        """Return a copy of the state."""
        model, optimizer = self._replica.state(), self._replica.optimizer.state_tensors()
        parts = ((MODEL, model.tensors), (OPTIMIZER, optimizer), (RESUME, model.beside))
        tensors = {prefix + name: tensor.clone() for prefix, each in parts for name, tensor in each.items()}
        layout = {OF_REPLICAS: {BUFFERS: model.buffers}} if model.buffers else {}
        return TrialState(tensors, {**vars(self._replica.position), **layout})

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Restore a state; with `partly`, take only the model's tensors whose names and shapes match.

        The optimizer state of a different kind of optimizer is ignored: this trial's optimizer starts from scratch.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        if partly:
            self.inherit(state)
            return
        buffers = state.position.get(OF_REPLICAS, {}).get(BUFFERS, {})
        model = ModelState(part(state.tensors, MODEL), part(state.tensors, RESUME), buffers)
        own = self._replica.state().tensors
        optimizer = part(state.tensors, OPTIMIZER)
        position = {key: value for key, value in state.position.items() if key != OF_REPLICAS}
        try:
            self._replica.become(model, optimizer, position)
        except CheckpointError:
            _check_fits(model.tensors, own)
            self._replica.become(model, self._fresh_optimizer_state(), position)

    def inherit(self, state: TrialState, *, overlap: bool = False) -> None:
        """Start with the weights of another network, as far as they fit; see `spaces.architectures.inherit`."""
        own = self._replica.state()
        taken = inherited(part(state.tensors, MODEL), own.tensors, overlap=overlap)
        self._replica.become(
            replace(own, tensors={**own.tensors, **taken}), self._replica.optimizer.state_tensors(), vars(Position())
        )

    def become(self, config: TrainConfig) -> None:
        """Continue with the same weights under another config, which must leave the model's shapes unchanged.

        Raises:
            CheckpointError: the weights do not fit the model of that config.
        """
        state = self.state()
        self._measures = {}
        self._build(config)
        self.load(state)

    def leave_run(self, directory: Path) -> None:
        """Write the files that `serve` needs: `model/`, `config.yaml`, `metrics.jsonl`, `result.json`.

        Raises:
            StorageError: the directory is not writable.
        """
        if self._replica.position.validation is None:
            self._replica.validate()
        self._replica.pause_at = self.step
        outcome = self._outcome or self._replica.run(self._started_at)
        outcome.step, outcome.final["validation"] = self.step, self._replica.position.validation
        run_progress = RunProgress(self._started_at, last_step=self.step)
        with RunDirectory.create(directory.parent, directory.name) as run:
            run.write_config(dump_yaml(self._config))
            log = run.metrics_log()
            try:
                log.append_lines(self._lines)
            finally:
                log.close()
            described = describe_model(self._settings, self._task)
            trained = self._replica.trained_model()
            trained = folded(trained) if self._settings.initial.weight_norm else trained
            write_model(run.paths.model, trained, described, self._task)
            run.write_result({**result_of(outcome, run_progress), "seconds": round(self._trained_s, 3)})

    def _fresh_optimizer_state(self) -> dict[str, Tensor]:
        optimizer = self._replica.optimizer
        optimizer.init([(name, p) for name, p in self._replica.model.named_parameters() if p.requires_grad])
        return optimizer.state_tensors()


def _check_fits(model: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    wrong = [name for name in own if name not in model or model[name].shape != own[name].shape]
    wrong += [name for name in model if name not in own]
    if wrong:
        raise CheckpointError(
            f"The weights of another trial do not fit this one's model: {', '.join(sorted(wrong)[:5])}. A key that "
            "changes the model's shapes cannot be explored by a method that hands weights on."
        )


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a validation line, without its step, epoch, time and split."""
    beside = {"step", "epoch", "time_s", "split", "members"}
    return {name: float(v) for name, v in values.items() if name not in beside and isinstance(v, int | float)}
