"""A replica with its task, data and checkpoints, built from plain settings and hosted by a member of a gang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.core.out_of_memory import told_if_out_of_memory
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.loop.checkpoint_source import Loaded, exported, newest
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.loop.task_host import TaskHost
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.trained_model import write_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings, Start
    from orchestray.trainers.core.outcome import Outcome


class ReplicaHost(TaskHost):
    """Builds task, data, model and loop once, and trains in every generation of the gang."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._recorder = Recorder()
        super().__init__(settings)
        self._tasks: dict[int, Task] = {}
        """Tasks of the members of an ensemble that have their own arguments, by replica."""
        self._source("train")
        self._streams: dict[tuple[str, int], SampleStream] = {}
        self._loaded_lines: list[dict[str, Any]] = []
        """Metric lines of the loaded checkpoint."""
        self._collective: Collective | None = None
        with told_if_out_of_memory(self._device):
            self._replica = Replica(
                self._task,
                settings,
                self._share_stream,
                recorder=self._recorder,
                device=self._device,
                task_of=self._task_of,
            )

    # -- in the working thread -----------------------------------------------------------------------------

    def train(self, start: Start) -> Outcome | str:
        """Train with the rank of this process in its process group; rank 0 also writes checkpoints and the model.

        Returns:
            The outcome, or `PEER_LOST`.
        """
        collective = self._join()
        try:
            with told_if_out_of_memory(self._device):
                return self._train(collective, start)
        except PeerLostError:
            return PEER_LOST
        except BaseException:
            collective.abort()  # the other replicas wait for this one and must notice at once that it is gone
            raise
        finally:
            self._recorder.wake()

    def _train(self, collective: Collective, start: Start) -> Outcome:
        step = self._replica.connect(collective, lambda: self._load(start), attempt=start.attempt)
        if collective.rank == 0:
            self._recorder.record({"event": "agreed", "step": step, "lines": self._loaded_lines})
        if collective.rank == 0 and (writer := self._prepare_checkpoints()) is not None:
            self._replica.write_checkpoints_with(writer)
        outcome = self._replica.run(start.started_at)
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._report_saved()
        if self._settings.model_directory and outcome.ended != "interrupted":
            trained = self._replica.trained_model()
            if collective.rank == 0:
                described = describe_model(self._settings, self._task, self._task_of)
                trained = exported(self._settings, trained)
                row = self._source("train").first_row
                write_model(self._settings.model_directory, trained, described, self._task, row)
        return outcome

    def _load(self, start: Start) -> Loaded | None:
        """Return the newest checkpoint, which may be newer than the one that the driver found."""
        if self._checkpoints is not None:
            self._checkpoints.wait()  # a checkpoint in progress removes older ones when it is complete
        loaded = newest(self._settings.checkpoint_storage, start.checkpoint)
        if loaded is None:
            return None
        self._loaded_lines = list(loaded.state.get("lines", []))
        return loaded

    def _join(self) -> Collective:
        if self._collective is not None:
            self._collective.abort()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._collective = Collective.of_this_process()
        else:
            self._collective = SoloCollective()
        return self._collective

    def _share_stream(self, split: str, rank: int) -> SampleStream:
        """Return the samples of a split as the replica `rank` sees them."""
        if (split, rank) not in self._streams:
            settings = self._settings
            self._streams[split, rank] = self._stream(
                split,
                settings.share_of(rank),
                settings.num_replicas,
                task=self._task_of(rank),
                seed=settings.seed_of(rank),
            )
        return self._streams[split, rank]

    def _task_of(self, replica: int) -> Task:
        """Return the task of a replica: the run's task, or that of a member of an ensemble with its own arguments."""
        source = self._settings.task_of(replica)
        if source == self._settings.task:
            return self._task
        if replica not in self._tasks:
            self._tasks[replica] = self._build(source)
        return self._tasks[replica]

    def _warn(self, text: str) -> None:
        step = self._replica.position.step if hasattr(self, "_replica") else 0
        self._recorder.record({"event": "warning", "step": step, "text": text})

    # -- called by the driver meanwhile --------------------------------------------------------------------------------

    def describe(self) -> dict[str, int]:
        """Return sizes for the display: samples, parameters, and steps of the whole run."""
        stream = self._share_stream("train", 0)
        return {
            "samples": stream.num_samples,
            "parameters": sum(parameter.numel() for parameter in self._replica.model.parameters()),
            "total_steps": self._replica.total_steps(stream),
            "steps_per_epoch": stream.steps_per_epoch,
        }

    def drain(self, timeout_s: float, min_interval_s: float, written_step: int) -> list[dict[str, Any]]:
        """Return metric lines and events since the last call; wait until there is one.

        Args:
            timeout_s: seconds to wait at most.
            min_interval_s: least number of seconds between two results.
            written_step: last step whose metric lines are on disk.
        """
        self._replica.written_step = written_step
        lines = self._recorder.drain(timeout_s, min_interval_s)
        self._report_saved()
        return lines

    def lines_since(self, step: int) -> list[dict[str, Any]]:
        """Return this replica's copy of the metric lines after `step`.

        Used after rank 0 died with lines that the driver had not fetched.
        """
        return [line for line in self._recorder.since(step) if "event" not in line]

    def request_stop(self) -> None:
        """Ask all replicas to stop after a common step, with a checkpoint."""
        self._replica.stop_requested = True

    def abort(self) -> None:
        """Abort every operation in which this replica waits for other replicas."""
        if self._collective is not None:
            self._collective.abort()
        self._replica.abort()

    def close(self) -> None:
        """Leave the other replicas, which have finished too, and release the checkpoint's buffers.

        No operation may be in progress. Without this call, a process that hosts several replicas in turn would keep the
        connections of all of them.
        """
        self._replica.close()
        self.abort()
        self._close_checkpoints()

    def _report_saved(self) -> None:
        saved: Sequence[int] = self._checkpoints.saved() if self._checkpoints is not None else ()
        for step in saved:
            self._recorder.record({"event": "checkpoint_saved", "step": step})
