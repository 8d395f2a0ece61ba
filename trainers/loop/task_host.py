"""The base of the processes that train: the task, its data and the checkpoint writer, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.data.mark import warn_of_shared_rows
from orchestray.platform.data.retries import READS
from orchestray.platform.data.source import Source, open_split
from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.trainers import tasks
from orchestray.trainers.core.device import device_of
from orchestray.trainers.distill.distillation import with_distillation
from orchestray.trainers.loop.task_stream import task_stream
from orchestray.trainers.saved.initial_weights import with_initial_weights

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task, TaskSource
    from orchestray.trainers.config.settings import ReplicaSettings


class TaskHost:
    """A host of what trains, in a process that outlives it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        READS.begin(self._warn)
        self._settings = settings
        settings.arithmetic.apply()
        self._device = device_of(settings)
        self._task = self._build(settings.task)
        self._sources: dict[tuple[str, int], Source] = {}
        """Sources by split and by the id of their task."""
        self._checkpoints: CheckpointWriter | None = None

    def _warn(self, text: str) -> None:
        """Tell the user something about the data, from any thread; a host without a recorder tells nobody."""

    def _build(self, source: TaskSource) -> Task:
        """Build a task, whose loss follows the run's teacher if there is one."""
        settings = self._settings
        double = settings.precision == "float64"
        task = with_initial_weights(tasks.build(source), settings.initial)
        return with_distillation(task, settings.distill, double=double, device=self._device)

    def _source(self, split: str, task: Task | None = None) -> Source:
        """Return the samples of a split of a task, by default the run's."""
        task = task or self._task
        key = split, id(task)
        if key not in self._sources:
            self._sources[key] = open_split(task, split, num_endless=self._settings.num_endless)
            opened = [found for each in ("train", "validation") if (found := self._sources.get((each, id(task))))]
            if len(opened) == 2:
                warn_of_shared_rows(*opened)
        return self._sources[key]

    def _stream(
        self, split: str, part: int, num_parts: int, *, task: Task | None = None, seed: int | None = None
    ) -> SampleStream:
        """Return the samples of a split as part `part` of `num_parts` sees them.

        Args:
            split: name of the split.
            part: index of the part.
            num_parts: number of parts.
            task: task; default: the run's.
            seed: seed of the order; default: the run's.
        """
        task = task or self._task
        source = self._source(split, task)
        return task_stream(
            task, source, split, self._settings, part=part, num_parts=num_parts, seed=seed, device=self._device
        )

    def _prepare_checkpoints(self) -> CheckpointWriter | None:
        """Return the writer of the run's checkpoints; None: it has none."""
        storage = self._settings.checkpoint_storage
        if storage is not None and self._checkpoints is None:
            self._checkpoints = CheckpointWriter(storage, keep=self._settings.checkpoint_keep)
        return self._checkpoints

    def _close_checkpoints(self) -> None:
        """End the writer, and free its buffers."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
