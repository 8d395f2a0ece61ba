"""The actor of a trial's process, as Ray Tune's controller calls it.

It has the methods that the controller calls but is not a `tune.Trainable`: importing Tune takes a second per process,
only to write a folder and fill in a dictionary. The number of torch's threads is set before torch is imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from orchestray.search.engine.messages import TrialLimits, TrialResult, TrialTask

if TYPE_CHECKING:
    from orchestray.search.engine.trial_output import TrialOutput
    from orchestray.search.engine.trial_worker import TrialHost

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostedTrial:
    """An actor that hosts one trial after the other; each `train` carries out the last task.

    It may be started before its tasks are known: slow initialisation happens while it waits for the first one.
    """

    _output: TrialOutput | None = None

    def __init__(self, num_threads: int, warm: tuple[str, ...] = ()) -> None:
        """
        Args:
            num_threads: number of torch threads.
            warm: modules that its first task is expected to need.
        """
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        from orchestray.platform.actors.member import keep_freed_memory
        from orchestray.platform.process import gc_control
        from orchestray.platform.process.working_directory import import_torch

        keep_freed_memory()
        import_torch()
        import torch

        torch.set_num_threads(num_threads)
        with gc_control.pause():
            for module in ("orchestray.search.engine.trial_worker", *warm):
                __import__(module)
        self._host: TrialHost | None = None
        self._order: TrialTask | None = None
        self._rules: TrialLimits | None = None

    def begin(self, rules: TrialLimits, order: TrialTask) -> None:
        """Set the limits for all trials, and the task of the first `train`."""
        from orchestray.search.engine.trial_output import TrialOutput
        from orchestray.search.engine.trial_worker import TrialHost

        self._rules, self._order = rules, order
        self._host = TrialHost(rules, address=ray.util.get_node_ip_address())
        self._output = TrialOutput(rules.logs)

    def reset(self, order: TrialTask) -> bool:
        """Set the task of another trial in the same process."""
        self._order = order
        return True

    def order(self, order: TrialTask) -> None:
        """Set the task of the next `train`."""
        self._order = order

    def train(self) -> dict[str, Any]:
        """Carry out the last task. Tune counts the calls.

        Raises:
            PlaceLostError: the process has lost its resources; Tune treats this as its death, and releases what is
                left.
        """
        from orchestray.platform.process import torch_threads

        torch_threads.take_up()  # Ray calls this in a thread of its own
        if self._output is not None:
            self._output.begin(self._given.trial)
        return {"told": self._hosting.work(self._given), "done": False}

    def get_auto_filled_metrics(self, *, debug_metrics_only: bool) -> dict[str, Any]:
        """Return the result that Tune assumes for a trial that has none yet."""
        return {}

    @ray.method(concurrency_group="control")
    def halt(self) -> None:
        """End the running task after the current step, and write the state to its file."""
        if self._host is not None:
            self._host.halt()

    def leave_run(self, order: TrialTask, directory: str) -> TrialResult:
        """Write a trial's run directory."""
        return self._hosting.leave_run(order, directory)

    def stop(self) -> None:
        """Stop serving states."""
        if self._host is not None:
            self._host.close()

    @property
    def _hosting(self) -> TrialHost:
        assert self._host is not None, "begin() was not called"
        return self._host

    @property
    def _given(self) -> TrialTask:
        assert self._order is not None, "begin() was not called"
        return self._order
