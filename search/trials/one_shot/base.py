"""A trial that trains shared weights for many networks at once, and keeps the best network."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.data.source import open_split
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.task import OF_THE_LOSS, training_batch_of
from orchestray.search.methods.base import rng_of
from orchestray.search.methods.one_shot.obeyed import refused
from orchestray.search.spaces.searched_task import SearchedTask
from orchestray.search.trials.metric_names import metric_names
from orchestray.search.trials.one_shot.data import Batches, two_parts
from orchestray.search.trials.program import MODEL, Progress, TrialState, part
from orchestray.trainers import tasks
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.task_calls import refuse
from orchestray.trainers.core.weights import load_model_tensors, model_tensors
from orchestray.trainers.driver.runlog.result import result_of
from orchestray.trainers.driver.runlog.run_log import RunProgress
from orchestray.trainers.optim.clipping import clip
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.grouped_optimizer import check_matches
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.schedules import lr_at
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.trained_model import write_model
from orchestray.trainers.tasks.params import TaskConfig

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.task import Batch
    from orchestray.search.spaces.architectures.base import Genome
    from orchestray.trainers.config.schema import TrainConfig

_RECALIBRATED_BY = 20
"""Number of batches for a child's batch-norm statistics: those of the shared weights mix all children."""
_RANKED_BY = 4
"""Number of batches on which the networks drawn at the end are compared."""
_DTYPES = {"float64": torch.float64}


def standing(scores: Iterable[float]) -> tuple[int, float]:
    """Return the key by which networks compare, larger for better ones, from the score of one on each batch.

    A score that is not finite says that the network has diverged there, or that a metric is not defined on that batch:
    a NaN among keys would leave any order as it is. Of equally many finite scores the sum decides.
    """
    finite = [score for score in scores if math.isfinite(score)]
    return len(finite), sum(finite)


class OneShotTrial(ABC):
    """A `TrialProgram` that trains shared weights for all networks of a space, then finds the best networks.

    The config is that of a trial of any network of the space. Its optimizer, schedule, batch size, clipping and seed
    apply to the shared weights.
    """

    def __init__(self, config: TrainConfig, *, seed: int, finalists: int, architecture_part: float) -> None:
        """
        Args:
            config: config of a run with one worker, whose task is a `SearchedTask`.
            seed: seed of the search's random draws.
            finalists: number of networks to find.
            architecture_part: fraction of the training data on which architectures are judged.

        Raises:
            OrchestrayError: the task cannot be built.
        """
        self._config = config
        self._settings = ReplicaSettings.from_config(config, storage="", model_directory="")
        self._settings.arithmetic.apply()
        self._device = device_of(self._settings)
        task = tasks.build(self._settings.task)
        if not isinstance(task, SearchedTask):
            raise ConfigError(
                f"search.architecture: weights are shared by the networks of a space, and {task!r} has none"
            )
        if problems := refused(config):
            raise ConfigError(problems)
        refuse(task, OF_THE_LOSS, "weights that networks share", "choose another method")
        self._task = task
        self.space = task.space
        self.seed, self._num_finalists = seed, finalists
        self._dtype = _DTYPES.get(self._settings.precision, torch.float32)
        trained, judged = two_parts(task, architecture_part)
        size, order = self._settings.batch_size, self._settings.seed
        self._validation = open_split(task, "validation")
        if not self._validation.num_rows:
            raise ConfigError(
                "search.architecture: networks that share weights are compared by validation, and the task has no "
                "validation data; have its dataset('validation') return some"
            )
        changed, cut = training_batch_of(task), self._settings.drop_last
        batches = partial(Batches, batch_size=size, seed=order, drop_last=cut)
        self._trained_on = batches(trained, task.to_batch, to_training_batch=changed)
        self._judged_by = batches(judged, task.to_batch)
        self._validated_by = Batches(self._validation, task.to_batch, batch_size=size, seed=order, shuffle=False)
        self.step = 0
        self.found: list[Genome] = []
        """Networks found at the end of training, the best first."""
        self._started_at, self._trained_s = time.time(), 0.0
        self._loss_sum = self._num_losses = 0.0
        """Sum and number of the losses since the last report."""
        self._stop = threading.Event()

    # -- what a method adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def _train_step(self, batch: Batch, step: int) -> float:
        """Train the weights by one step, with everything the method adds; return the loss. Steps count from 1."""

    @abstractmethod
    def _find(self) -> list[Genome]:
        """Return the best networks according to the current state, the best first."""

    @abstractmethod
    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        """Return the weights of one network."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """Return all learned tensors for `state`, without copying."""

    @abstractmethod
    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        """Restore the values that `_tensors` and `_position` returned."""

    def _position(self) -> dict[str, Any]:
        """Return further state to save, as JSON values."""
        return {}

    # -- the program -------------------------------------------------------------------------------------------------

    def advance(self, step: int) -> Progress:
        """Train until `step` is completed; then find the best networks and validate the best.

        Raises:
            TrainingError: the loss is not finite.
        """
        began_s = time.perf_counter()
        with self._trained_on, self._judged_by:
            while self.step < step and not self._stop.is_set():
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(self._settings.seed * 1_000_003 + self.step)
                    loss = self._train_step(self._cast(self._trained_on.at(self.step)), self.step + 1)
                if not loss < float("inf"):
                    raise TrainingError(f"The loss of the shared weights is {loss} at step {self.step + 1}.")
                self.step += 1
                self._loss_sum, self._num_losses = self._loss_sum + loss, self._num_losses + 1
            self._stop.clear()  # it has been obeyed, or came too late
            if self.step < step:
                self._trained_s += time.perf_counter() - began_s
                return Progress(self.step, {}, is_interrupted=True)
            self.found = list(self._find())[: self._num_finalists]
        metrics = self.validate(self.child(self.found[0]))
        self._trained_s += time.perf_counter() - began_s
        metrics["train_loss"] = self._loss_sum / max(1.0, self._num_losses)
        self._loss_sum = self._num_losses = 0.0
        return Progress(self.step, metrics, (metrics,), told={"genomes": self.found, **self._told()})

    def request_stop(self) -> None:
        """Have an `advance` in another thread end after the current step."""
        self._stop.set()

    def _told(self) -> dict[str, Any]:
        """Return additional values for the method."""
        return {}

    def metric_names(self, wanted: Collection[str]) -> Collection[str] | None:
        """Return the names of the task's own metrics, found with a network of the space."""
        with torch.random.fork_rng(devices=[]):
            network = self._build(self.space.sample(rng_of(self.seed)))
        return metric_names(self._task, network, self._validated_by.stream, self._cast, wanted)

    def state(self) -> TrialState:
        """Return a copy of the state. `model/` is the best network found, so that a finalist can inherit it."""
        tensors = {f"shared/{name}": tensor.detach().clone() for name, tensor in self._tensors().items()}
        if self.found:
            tensors |= {MODEL + name: tensor for name, tensor in self.child_state(self.found[0]).items()}
        losses = [self._loss_sum, self._num_losses]
        return TrialState(tensors, {"step": self.step, "found": self.found, "losses": losses, **self._position()})

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Restore a state. With `partly`, do nothing: this is the first trial, which has no other to inherit from."""
        if partly:
            return
        shared = {k.removeprefix("shared/"): v for k, v in state.tensors.items() if k.startswith("shared/")}
        self.step, self.found = int(state.position["step"]), list(state.position["found"])
        self._loss_sum, self._num_losses = state.position["losses"]
        self._load_tensors(shared, state.position)

    def leave_run(self, directory: Path) -> None:
        """Write the best network found, with its shared weights, as a run."""
        best = self.found[0]
        child = self.child(best)
        metrics = self.validate(child)
        task = TaskConfig(**{**self._config.task.model_dump(mode="json"), "genome": best})
        config = self._config.model_copy(update={"task": task})
        settings = ReplicaSettings.from_config(config, storage="", model_directory="")
        outcome = Outcome(
            ended="finished",
            step=self.step,
            epochs=round(self.step / self._trained_on.steps_per_epoch, 6),
            final={"train": None, "validation": metrics},
            bytes_sent=0,
            bytes_dense=0,
            samples=self.step * self._settings.batch_size,
            training_s=self._trained_s,
        )
        with RunDirectory.create(directory.parent, directory.name) as run:
            run.write_config(dump_yaml(config))
            run.metrics_log().close()
            trained = tasks.build(settings.task)
            write_model(run.paths.model, ModelState(model_tensors(child)), describe_model(settings, trained), trained)
            run_progress = RunProgress(self._started_at, last_step=self.step)
            run.write_result({**result_of(outcome, run_progress), "seconds": round(self._trained_s, 3)})

    # -- networks ----------------------------------------------------------------------------------------------------

    def child(self, genome: Genome) -> nn.Module:
        """Return one network with its weights and with batch-norm statistics of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            network = self._build(genome)
        load_model_tensors(network, {**model_tensors(network), **self.child_state(genome)})
        self._recalibrate(network)
        return network.eval()

    def _build(self, genome: Genome) -> nn.Module:
        """Return the network that the space builds, on the device of the shared weights."""
        return self.space.build(genome, *self._task.shapes()).to(self._device, self._dtype)

    def _recalibrate(self, network: nn.Module) -> None:
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over the batches
        network.train()
        with torch.no_grad():
            for batch, _ in islice(self._trained_on, _RECALIBRATED_BY):
                network(self._cast(batch)["inputs"])
        for norm in norms:
            norm.momentum = 0.1

    @torch.no_grad()
    def validate(self, network: nn.Module) -> dict[str, float]:
        """Return the means of loss and task metrics over the validation data."""
        sums: dict[str, float] = {}
        total = 0
        for plain, count in self._validated_by:
            batch = self._cast(plain)
            outputs = network(batch["inputs"])
            values = {"loss": self._task.loss(outputs, batch), **self._task.metrics(outputs, batch)}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value) * count
            total += count
        return {name: value / total for name, value in sums.items()}

    def _ranked(self, genomes: Iterable[Genome], judge: Callable[[Genome, Batch], float], first: int) -> list[Genome]:
        """Return networks ranked on a few batches of the architecture data, the best first."""
        batches = self._ranking_batches(first)
        return sorted(genomes, key=lambda genome: standing(judge(genome, batch) for batch in batches), reverse=True)

    def _ranking_batches(self, first: int) -> list[Batch]:
        """Return a few batches of the architecture data."""
        return [self._cast(self._judged_by.at(first + number)) for number in range(_RANKED_BY)]

    def _reward(self, outputs: Tensor, batch: Batch, metric: str | None) -> float:
        """Return the score of a network on one batch: a metric, or minus the loss."""
        if metric is None:
            return -float(self._task.loss(outputs, batch))
        values = self._task.metrics(outputs, batch)
        if metric not in values:
            raise ConfigError(f"search.method.metric: the task has no metric {metric!r}; it has {', '.join(values)}")
        return float(values[metric])

    def _cast(self, batch: Batch) -> Batch:
        return {name: map_tensors(self._placed, value) for name, value in batch.items()}

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    # -- updates of weights ------------------------------------------------------------------------------------------

    def _make_optimizer(self, named: Sequence[tuple[str, Tensor]]) -> Optimizer:
        """Return the config's optimizer for these parameters."""
        optimizer = make_optimizer(**self._settings.optimizer)
        optimizer.init(named)
        return optimizer

    def _lr(self, step: int) -> float:
        return lr_at(self._settings.lr_schedule, self._settings.optimizer["lr"], step, self._settings.steps)

    def _update(self, optimizer: Optimizer, params: Sequence[Tensor], loss: Tensor, step: int) -> None:
        """Update the parameters by one step; those that the loss does not depend on stay unchanged."""
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        if self._settings.grad_clip is not None:
            clip(grads, self._settings.grad_clip)
        optimizer.step(params, grads, self._lr(step))


class SharedTrial(OneShotTrial):
    """A one-shot trial whose weights are those of a supernet."""

    def __init__(self, config: TrainConfig, **common: Any) -> None:
        """Take the arguments of `OneShotTrial`."""
        super().__init__(config, **common)
        space: Any = self.space
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            self.supernet = space.supernet(*self._task.shapes()).to(self._device, self._dtype).train()
        self._named = [(name, p) for name, p in self.supernet.named_parameters() if p.requires_grad]
        self._params = [parameter for _, parameter in self._named]
        check_matches(self._settings.optimizer.get("groups", ()), self.supernet.named_parameters())
        self._optimizer = self._make_optimizer(self._named)

    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.supernet.child_state(genome)
        return state

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"net/{name}": tensor for name, tensor in self.supernet.state_dict().items()}
        return tensors | {f"optimizer/{name}": t for name, t in self._optimizer.state_tensors().items()}

    def _load_tensors(self, tensors: Mapping[str, Tensor], position: Mapping[str, Any]) -> None:
        self.supernet.load_state_dict(part(tensors, "net/"))
        self._optimizer.load_state_tensors(part(tensors, "optimizer/"))
