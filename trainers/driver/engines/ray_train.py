"""The engine `ray_train`: the same replicas inside `ray.train.torch.TorchTrainer`.

Ray Train starts the workers, sets up their process group, and restarts all of them after a failure; the loop, the data,
the checkpoints and the record are ours. Metrics do not go through `ray.train.report`, which waits for the controller's
next poll: the workers leave them in a mailbox actor from which the driver reads them.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from orchestray.platform.comm.backend import BackendKind, Given, choose_backend, nccl_settings
from orchestray.platform.errors import StorageError
from orchestray.platform.process.working_directory import import_torch
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.driver.control.evacuation import DrainWatch
from orchestray.trainers.driver.engines.heartbeats import Heartbeats
from orchestray.trainers.driver.engines.listener import Listener
from orchestray.trainers.driver.engines.mailbox import Mailbox
from orchestray.trainers.driver.engines.ray_train_worker import RestartError, train_loop
from orchestray.trainers.driver.runlog.hang_report import HangReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.driver.control.attempt import Attempt

_TAKE_S = 0.1
_MOST_MOVES = 100
"""Number of moves away from drained nodes in one command."""
_SETTLE_TIMEOUT_S = 120.0
"""Seconds that the other workers may compute before they notice that one has failed."""


def run_in_ray_train(config: TrainConfig, attempt: Attempt) -> Any:
    """Train in a `TorchTrainer`; return the replicas' `Outcome`.

    Raises:
        ClusterError: the workers cannot be placed.
        OrchestrayError: the run failed; its text says what the user can do.
    """
    settings, cluster, run_log = attempt.settings, attempt.cluster, attempt.run_log
    import_torch()  # here, once, and not in the first thread of Ray Train that needs it
    for gang in cluster.parked:
        gang.close()  # its resources are needed
    cluster.parked.clear()
    _find_place(config, cluster)
    mailbox = _start_mailbox(_num_workers(config), settings)
    storage = tempfile.mkdtemp(prefix="orchestray-ray-train-")
    try:
        loop_config = {
            "settings": settings,
            "beat_s": attempt.patience.ping_interval_s,
            "start": Start(run_log.run_progress.started_at, attempt.checkpoint),
            "mailbox": mailbox,
            "num_threads": config.resources.num_threads,
            "backend": _backend(config),
        }
        heartbeats = Heartbeats(_num_workers(config), attempt.patience)
        listener = Listener(
            run_log,
            heartbeats,
            DrainWatch(),
            batch_size=settings.batch_size,
            max_restarts=attempt.max_restarts,
            resuming=attempt.checkpoint is not None,
        )
        hang_report = HangReport(run_log, [heartbeats], config.report_hang_s)
        return _Fit(_trainer(config, loop_config, storage), mailbox, hang_report).run(listener, attempt.stop)
    finally:
        mailbox.end.remote()  # not killed: workers that are still computing have yet to learn of the end
        shutil.rmtree(storage, ignore_errors=True)
        with contextlib.suppress(StorageError):  # reported already
            run_log.writer.actors([])


def _num_workers(config: TrainConfig) -> int:
    network = config.strategy.network
    return network.data * network.tensor * network.pipeline


def _backend(config: TrainConfig) -> BackendKind:
    """Return the backend of the workers' process group, which is made before they know where they are."""
    return choose_backend([Given(config.resources.gpus_per_worker)] * _num_workers(config))


def _resources(config: TrainConfig) -> dict[str, float]:
    """Return the resources that each worker reserves."""
    wanted = {"CPU": config.resources.cpus_per_worker, "GPU": config.resources.gpus_per_worker}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def _find_place(config: TrainConfig, cluster: Cluster) -> None:
    """Refuse a run that the cluster cannot place, or not soon: Ray Train would try for minutes without a message."""
    from orchestray.platform.actors.placement import Shape, check_place

    resources = config.resources
    shape = Shape("worker", _num_workers(config), resources.cpus_per_worker, resources.gpus_per_worker)
    check_place(cluster, shape, ", or use engine: actors, which lets workers share the cores of this machine")


def _start_mailbox(num_workers: int, settings: ReplicaSettings) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(Mailbox)
    return actor_class.options(num_cpus=0, scheduling_strategy=here).remote(num_workers, settings.faults)


def _trainer(config: TrainConfig, loop_config: dict[str, Any], storage: str) -> Any:
    from orchestray.platform.actors.placement import PLACEMENT_TIMEOUT_S

    # Read by Ray Train in its controller: the seconds between two polls of its workers, by default 2.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it would lead prints past the file of the output
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", f"{PLACEMENT_TIMEOUT_S:g}")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from orchestray.platform.comm.process_groups import NAMES_FOR_TORCH

    # Typed as those of an older Ray Train.
    failures: Any = FailureConfig
    run_config: Any = RunConfig
    return TorchTrainer(
        train_loop_per_worker=train_loop,
        train_loop_config=loop_config,
        # Ray Train's own choice on GPUs is NCCL alone, which has no operation for tensors on CPUs.
        torch_config=TorchConfig(backend=NAMES_FOR_TORCH[loop_config["backend"]]),
        scaling_config=ScalingConfig(
            num_workers=_num_workers(config),
            use_gpu=config.resources.gpus_per_worker > 0,
            resources_per_worker=_resources(config),
        ),
        run_config=run_config(
            name=config.name,
            storage_path=storage,
            # A group that cannot be started counts apart from one that is lost, and without a limit of its own.
            # Losses are counted here; moves away from drained nodes, which are failures to Ray Train, are not.
            failure_config=failures(
                max_failures=config.max_restarts + _MOST_MOVES, controller_failure_limit=config.max_restarts
            ),
            callbacks=[_reporter(loop_config["mailbox"])],
            worker_runtime_env={"env_vars": nccl_settings(os.environ)} if loop_config["backend"] == "nccl" else None,
        ),
    )


def _reporter(mailbox: Any) -> Any:
    """Return the callback that Ray Train's controller calls when workers failed, before it restarts them."""
    from ray.train import UserCallback

    from orchestray.platform.actors.death_cause import cause_of

    class Reporter(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            dead = {
                rank: cause_of(error)
                for rank, error in worker_exceptions.items()
                if not isinstance(error, RestartError)
            }
            mailbox.lost.remote(dead)

    return Reporter()


class _Fit:
    """A thread that runs `TorchTrainer.fit`, and the mailbox its workers write to."""

    def __init__(self, trainer: Any, mailbox: Any, hang_report: HangReport) -> None:
        self._mailbox, self._hang_report = mailbox, hang_report
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(trainer,), name="ray-train", daemon=True)

    def _work(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - judged in the main thread
            self._error = error

    def run(self, listener: Listener, stop: threading.Event) -> Any:
        """Handle messages until all have come; return the `Outcome`.

        Ray Train itself may take seconds more to end (on a cluster without a dashboard, 12), which is not waited for.
        """
        self._thread.start()
        stop_sent, give_up_at_s = False, math.inf
        while self._thread.is_alive() and not listener.is_complete and time.monotonic() < give_up_at_s:
            self._thread.join(_TAKE_S)
            self._take(listener)
            self._hang_report.look()
            if stop.is_set() and not stop_sent:
                stop_sent = True
                self._mailbox.stop.remote()
            if listener.failure is not None:
                give_up_at_s = min(give_up_at_s, time.monotonic() + _SETTLE_TIMEOUT_S)
        self._take(listener)
        return listener.judge(self._error)

    def _take(self, listener: Listener) -> None:
        import ray

        messages, beats = ray.get([self._mailbox.take.remote(listener.written_step), self._mailbox.heartbeats.remote()])
        listener.hear(messages)
        listener.take_output()
        for message in listener.look_at(beats):
            getattr(self._mailbox, message).remote()
