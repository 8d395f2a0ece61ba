"""The process of a trial as Ray Tune's controller calls it.

It has the methods that the controller calls and is no `tune.Trainable`: importing Tune takes a process a second, and
all it would do here is write a folder and fill in a dictionary. The number of torch's threads is settled before torch
is imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from orchestray.search.engine.orders import Order, Rules, Told

if TYPE_CHECKING:
    from orchestray.search.engine.host import TrialHost

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostedTrial:
    """Hosts one trial after the other; each `train` carries out the last order.

    It may be started before anybody knows what it is to do: what takes long is done while it waits for its first order.
    """

    def __init__(self, num_threads: int, warm: tuple[str, ...] = ()) -> None:
        """
        Args:
            num_threads: of torch.
            warm: modules that its first order is expected to need.
        """
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        from orchestray.platform import collecting
        from orchestray.platform.gang.member import keep_freed_memory
        from orchestray.platform.working_directory import import_torch

        keep_freed_memory()
        import_torch()
        import torch

        torch.set_num_threads(num_threads)
        with collecting.pause():
            for module in ("orchestray.search.engine.host", *warm):
                __import__(module)
        self._host: TrialHost | None = None
        self._order: Order | None = None
        self._rules: Rules | None = None

    def begin(self, rules: Rules, order: Order) -> None:
        """Say what holds for all trials, and what the first `train` does."""
        from orchestray.search.engine.host import TrialHost

        self._rules, self._order = rules, order
        self._host = TrialHost(rules, address=ray.util.get_node_ip_address())

    def reset(self, order: Order) -> bool:
        """Another trial in the same process."""
        self._order = order
        return True

    def order(self, order: Order) -> None:
        """What the next `train` does."""
        self._order = order

    def train(self) -> dict[str, Any]:
        """Carry the last order out. Tune counts the calls.

        Raises:
            PlaceLostError: Tune takes it for the death of this process, and ends it with what is left of its places.
        """
        from orchestray.platform import torch_threads

        torch_threads.take_up()  # Ray calls this in a thread of its own
        return {"told": self._hosting.work(self._given), "done": False}

    def get_auto_filled_metrics(self, *, debug_metrics_only: bool) -> dict[str, Any]:
        """What Tune takes for the result of a trial that has none yet."""
        return {}

    @ray.method(concurrency_group="control")
    def halt(self) -> None:
        """End what is under way after the current step, with the state written to its file."""
        if self._host is not None:
            self._host.halt()

    def leave_run(self, order: Order, directory: str) -> Told:
        """Write a trial's run directory."""
        return self._hosting.leave_run(order, directory)

    def stop(self) -> None:
        """Hand nothing out any more."""
        if self._host is not None:
            self._host.close()

    @property
    def _hosting(self) -> TrialHost:
        assert self._host is not None, "begin() was not called"
        return self._host

    @property
    def _given(self) -> Order:
        assert self._order is not None, "begin() was not called"
        return self._order
