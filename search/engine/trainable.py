"""The process of a trial as Ray Tune knows it. Imports no torch: the number of its threads is settled first."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from orchestray.search.engine.orders import Order, Rules, Told
from orchestray.search.engine.vault import StatePlace

if TYPE_CHECKING:
    from orchestray.search.engine.host import TrialHost

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class HostedTrial(tune.Trainable):
    """Hosts one trial after the other; each `step` carries out the last order.

    What a checkpoint holds is a pointer of a few bytes: the state itself lies in this process, and goes from here to
    whichever takes it.
    """

    def setup(self, config: dict[str, Any]) -> None:
        rules: Rules = config["rules"]
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(rules.num_threads)
        from orchestray.platform.member import keep_freed_memory
        from orchestray.platform.working_directory import import_torch

        keep_freed_memory()
        import_torch()
        import torch

        from orchestray.search.engine.host import TrialHost

        torch.set_num_threads(rules.num_threads)
        self._host: TrialHost = TrialHost(rules, address=ray.util.get_node_ip_address())
        self._order: Order = config["order"]
        self._told = Told(-1)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Another trial in the same process."""
        self._order = new_config["order"]
        return True

    def order(self, order: Order) -> None:
        """What the next `step` does."""
        self._order = order

    def step(self) -> dict[str, Any]:
        self._told = self._host.work(self._order)
        return {"told": self._told}

    @ray.method(concurrency_group="control")
    def halt(self) -> None:
        """End what is under way after the current step, with the state written to its file."""
        self._host.halt()

    def leave_run(self, order: Order, directory: str) -> Told:
        """Write a trial's run directory."""
        return self._host.leave_run(order, directory)

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        place = self._told.place
        return {"place": None if place is None else place.to_json()}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        if checkpoint is not None and checkpoint["place"] is not None:
            self._order = replace(self._order, begins=True, source=StatePlace.from_json(checkpoint["place"]))

    def cleanup(self) -> None:
        self._host.close()

    def _setup_logdir(self) -> None:
        """No folder a trial: what it leaves goes through its answers and its state."""
        self._logdir: Any = os.getcwd()  # noqa: PTH109 - a text is wanted
