"""The trainable of a search's trials: a class of Ray Tune that hosts one trial after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from orchestray.platform.cluster.draining import draining_nodes
from orchestray.platform.process import gc_control
from orchestray.search.engine.messages import TrialLimits, TrialResult, TrialTask
from orchestray.search.engine.trial_process import prepare_process

with gc_control.pause():
    from ray.tune import PlacementGroupFactory, Trainable

    from orchestray.search.checkpoints.trial_folder import write_state

if TYPE_CHECKING:
    from orchestray.search.engine.trial_output import TrialOutput
    from orchestray.search.engine.trial_worker import TrialHost

ANSWER = "orchestray"
"""Key of a result that has the whole `TrialResult`; taken out before Tune's loggers see it."""


class TrialFailedError(Exception):
    """The failure of a trial, by which Tune marks it as such."""

    def __init__(self, result: TrialResult) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return f"{self.result.error}\n{self.result.traceback}".strip()


class HostedTrial(Trainable):
    """A trial of a search; each `step` carries out the last task, up to the next report.

    The config of a Tune trial has the values of the space; what else a process must know comes with the tasks.
    """

    limits: ClassVar[TrialLimits]
    bundles: ClassVar[Sequence[Mapping[str, float]]]

    _host: TrialHost | None = None
    _output: TrialOutput | None = None
    _task: TrialTask | None = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:  # noqa: ARG003 - Tune's own
        """Return the resources of each trial, which are the same for all."""
        return PlacementGroupFactory([dict(bundle) for bundle in cls.bundles])

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare the process; the trial itself comes with the first task."""
        prepare_process(self.limits.num_threads)
        with gc_control.pause():
            from orchestray.search.engine.trial_output import TrialOutput
            from orchestray.search.engine.trial_worker import TrialHost

        self._host = TrialHost(self.limits, address=ray.util.get_node_ip_address(), is_leaving=_leaving())
        self._output = TrialOutput(self.limits.logs)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Accept another trial, whose task comes next."""
        prepare_process(self.limits.num_threads)
        return True

    def give(self, task: TrialTask, values: dict[str, Any]) -> None:
        """Set the task of the next `step`, and the values of the space that it is for."""
        self._task = task
        self.config = values

    def step(self) -> dict[str, Any]:
        """Carry out the last task.

        Raises:
            TrialFailedError: the trial has failed.
            PlaceLostError: the process has lost its resources; the trial goes on in another.
        """
        from orchestray.platform.process import torch_threads

        assert self._task is not None, "give() was not called"
        torch_threads.take_up()  # Ray may call this in another thread than `setup`
        if self._output is not None:
            self._output.begin(self._task.trial)
        result = self._hosting.work(self._task)
        if result.error is not None:
            raise TrialFailedError(result)
        return {**result.measures, **result.metrics, "step": result.step, ANSWER: result}

    def leave_run(self, task: TrialTask, directory: str) -> TrialResult:
        """Write the run directory of a trial, which need not be the one in this process."""
        return self._hosting.leave_run(task, directory)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the state of the trial, with its config."""
        config, state = self._hosting.checkpoint()
        write_state(Path(checkpoint_dir), config, state)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Do nothing: a task says which state it starts from."""

    def cleanup(self) -> None:
        """End what the trial holds; what Ray prints while it ends the process is not the trial's."""
        if self._output is not None:
            self._output.end()
        if self._host is not None:
            self._host.close()

    @property
    def _hosting(self) -> TrialHost:
        assert self._host is not None, "setup() was not called"
        return self._host


def _leaving() -> Callable[[], bool]:
    """Return a function that says if the machine of this process is announced to leave the cluster.

    It is always False where that was so before this process began: there was no other place for it.
    """
    node = ray.get_runtime_context().get_node_id()
    if node in draining_nodes():
        return lambda: False
    return lambda: node in draining_nodes()


def hosted_trial(name: str, limits: TrialLimits, bundles: Sequence[Mapping[str, float]]) -> type[HostedTrial]:
    """Return the trainable of a search.

    Args:
        name: name of the search, which Tune shows.
        limits: limits and settings of its trials.
        bundles: resources of a trial: of its process, or an empty bundle for that and one for each worker.
    """
    return type(name, (HostedTrial,), {"limits": limits, "bundles": bundles, "__module__": __name__})
