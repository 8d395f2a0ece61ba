"""`engine: ray_train`: the same replicas inside `ray.train.torch.TorchTrainer`.

Ray Train starts the workers, sets up their process group, and restarts all of them after a failure; the loop, the data,
the checkpoints and the record are ours. Metrics do not go through `ray.train.report`, which waits for the controller's
next poll: the workers leave them in a mailbox actor the driver listens to.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ClusterError, OrchestrayError, TrainingError
from orchestray.platform.member import Failure, as_data
from orchestray.trainers.settings import ReplicaSettings, Start

if TYPE_CHECKING:
    from orchestray.platform.cluster import Cluster
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.trainers.story import Book

_PUMP_S = 0.1
_JOIN_TIMEOUT_S = 30.0


class Mailbox:
    """Between the workers and the driver: lines and answers one way, the request to stop the other."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._answers: list[tuple[int, Any]] = []
        self._stop = False
        self._written_step = 0

    def put(self, lines: list[dict[str, Any]]) -> tuple[bool, int]:
        """Leave lines; returns whether a stop was asked for, and up to which step the lines are on disk."""
        self._lines += lines
        return self._stop, self._written_step

    def answer(self, rank: int, answer: Any) -> None:
        self._answers.append((rank, answer))

    def take(self, written_step: int) -> tuple[list[dict[str, Any]], list[tuple[int, Any]]]:
        """What came since the last call; lines up to `written_step` are on disk."""
        self._written_step = written_step
        lines, answers = self._lines, self._answers
        self._lines, self._answers = [], []
        return lines, answers

    def stop(self) -> None:
        self._stop = True


def run_in_ray_train(
    config: TrainConfig,
    settings: ReplicaSettings,
    cluster: Cluster,
    book: Book,
    checkpoint: Any,
    stop: threading.Event,
) -> Any:
    """Train in a `TorchTrainer`; returns the replicas' `Outcome`."""
    for gang in cluster.parked:
        gang.close()  # its place is needed
    cluster.parked.clear()
    _check_places(config, cluster)
    import ray

    actor_class: Any = ray.remote(num_cpus=0)(Mailbox)
    mailbox: Any = actor_class.remote()
    result: list[BaseException | None] = []
    trainer = _trainer(
        config, {"settings": settings, "start": Start(book.story.started_at, checkpoint), "mailbox": mailbox}
    )

    def fit() -> None:
        try:
            trainer.fit()
            result.append(None)
        except BaseException as error:  # noqa: BLE001 - judged below, in the main thread
            result.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    answers: dict[int, Any] = {}
    while thread.is_alive():
        thread.join(_PUMP_S)
        _take(mailbox, book, answers)
        book.writer.raise_if_failed()
        if stop.is_set():
            mailbox.stop.remote()
    _take(mailbox, book, answers)
    ray.kill(mailbox)
    return _judge(answers, result[0] if result else None)


def _check_places(config: TrainConfig, cluster: Any) -> None:
    resources = cluster.resources()
    workers = config.strategy.network.data
    for name, each in (("CPU", config.resources.cpus_per_worker), ("GPU", config.resources.gpus_per_worker)):
        if each * workers > resources.get(name, 0.0):
            raise ClusterError(
                f"The cluster cannot place {workers} worker(s) with {each:g} {name} each for Ray Train: it has "
                f"{cluster.describe()}. Ask for fewer workers or less for each, or use engine: actors, which lets "
                "workers share the cores of this machine."
            )


def _trainer(config: TrainConfig, told: dict[str, Any]) -> Any:
    # Set before Ray Train is imported: it polls its workers once in this many seconds, and 2 s is its default.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    resources = {"CPU": config.resources.cpus_per_worker}
    use_gpu = config.resources.gpus_per_worker > 0
    if use_gpu:
        resources["GPU"] = config.resources.gpus_per_worker
    return TorchTrainer(
        train_loop_per_worker=_train_loop,
        train_loop_config=told,
        scaling_config=ScalingConfig(
            num_workers=config.strategy.network.data, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=tempfile.mkdtemp(prefix="orchestray-ray-train-"),
            failure_config=FailureConfig(max_failures=config.max_restarts),
        ),
    )


def _train_loop(told: dict[str, Any]) -> None:
    """What Ray Train runs in each worker."""
    import ray
    import torch
    import torch.distributed as dist

    from orchestray.trainers.host import PEER_LOST, ReplicaHost

    settings: ReplicaSettings = told["settings"]
    start: Start = told["start"]
    mailbox = told["mailbox"]
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def train() -> Any:
        host = ReplicaHost(settings)
        with _pumping(host, mailbox) if rank == 0 else contextlib.nullcontext():
            return host.train(start)

    answer = as_data(train)
    if answer == PEER_LOST:
        raise RuntimeError("another worker was lost")  # Ray Train restarts the group
    ray.get(mailbox.answer.remote(rank, answer))


@contextlib.contextmanager
def _pumping(host: Any, mailbox: Any) -> Any:
    """Send lines to the mailbox in the background, and everything that is left at the end."""
    import ray

    done = threading.Event()

    def pump() -> None:
        ended, written_step = False, 0
        while not ended:
            ended = done.is_set()
            lines = host.drain(0.0 if ended else 1.0, _PUMP_S, written_step)
            stop, written_step = ray.get(mailbox.put.remote(lines))
            if stop:
                host.request_stop()

    thread = threading.Thread(target=pump, name="pump", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_JOIN_TIMEOUT_S)


def _take(mailbox: Any, book: Book, answers: dict[int, Any]) -> None:
    import ray

    lines, new = ray.get(mailbox.take.remote(book.story.written_step))
    book.record(lines)
    answers.update(new)


def _judge(answers: dict[int, Any], error: BaseException | None) -> Any:
    for _, answer in sorted(answers.items()):
        if isinstance(answer, Failure):
            raise answer.error
    if error is not None or 0 not in answers:
        if isinstance(error, OrchestrayError):
            raise error
        lines = [line for line in str(error or "the workers gave no answer").splitlines() if line.strip()]
        raise TrainingError(f"Ray Train ended the run: {lines[0].strip()}")
    return answers[0]
