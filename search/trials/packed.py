"""A population as one trial: one batched program of all members, with exploit and explore inside."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from orchestray.platform.config.metric_names import mode_of_metric
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.usercode.listed_names import lower_names
from orchestray.search.methods.base import rng_of
from orchestray.search.methods.population import packing
from orchestray.search.methods.population.exploit import ExploitRule, choose_source
from orchestray.search.methods.population.explore import Explore, describe_changes, explored
from orchestray.search.trials.batched import Batched
from orchestray.search.trials.program import Progress, TrialState
from orchestray.search.trials.task_cache import TaskCache
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.device import device_of
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.modes import begin_training
from orchestray.trainers.core.rng import building
from orchestray.trainers.core.weights import convert
from orchestray.trainers.loop.position import Position
from orchestray.trainers.loop.task_stream import task_stream
from orchestray.trainers.optim.schedules import lr_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from orchestray.platform.data.stream import SampleStream, Share

_EXPLOIT, _EXPLORE = 2, 3
_LEAST_VALIDATED = 256
"""Minimum validation batch size, which does not affect the means."""


@dataclass
class _Member:
    """A member of the population."""

    changes: dict[str, Any]
    score: float = -math.inf
    """Score of the last validation."""
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[float] = field(default_factory=list)


class PackedPopulation:
    """A `TrialProgram` that trains a population of one architecture as one batched computation.

    Members start with the same weights and see the same batches, like trials with one seed. Up to floating-point
    rounding, each is therefore the same as a trial of its own under `synchronous: true`. The metrics are those of the
    best member, which is also the model it saves.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        space: Mapping[str, Mapping[str, Any]],
        initial: Sequence[Mapping[str, Any]],
        population: int,
        interval_steps: int,
        seed: int = 0,
        exploit: ExploitRule = "truncation",
        fraction: float = 0.2,
        p: float = 0.05,
        evaluations: int = 10,
        explore: Explore = "perturb",
        factors: Sequence[float] = (0.8, 1.2),
        resample_probability: float = 0.25,
        objective: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            config: config of a run with one worker, with the values that do not vary.
            space: dimension of each key that varies, as a config writes it.
            initial: initial values of each member.
            population: number of members.
            interval_steps: steps between two exploits.
            seed: seed of the search's random draws.
            exploit: see `PopulationBasedTraining`, like the following.
            fraction: see there.
            p: see there.
            evaluations: see there.
            explore: see there.
            factors: see there.
            resample_probability: see there.
            objective: `metric` and `mode` by which members are compared; default: the first of the task's metrics, with
                `min` if its name ends with "loss" or "error".

        Raises:
            ConfigError: the config cannot be batched; the text says what, and why.
        """
        packing.check_config(config, list(space))
        self._config, self._space = config, packing.read(space)
        self._seed, self._interval_steps, self._num_evaluations = seed, interval_steps, evaluations
        self._exploit, self._fraction, self._p = exploit, fraction, p
        self._explore, self._factors, self._resample_probability = explore, tuple(factors), resample_probability
        self._objective = dict(objective) if objective else None
        self._settings = ReplicaSettings.from_config(config, storage="", model_directory="")
        self._settings.arithmetic.apply()
        device = device_of(self._settings)
        self._task_cache = TaskCache()
        self._task = self._task_cache.task(self._settings, device)
        with building(self._settings.seed):
            model = self._task.build_model()
        if self._settings.precision == "float64":
            convert(model, torch.float64)
        model.to(device)
        forward = Forward(self._task, begin_training(model), self._settings.precision, device)
        self._batched = Batched(
            forward, population, self._settings.optimizer, seed=self._settings.seed, grad_clip=self._settings.grad_clip
        )
        self._streams = {split: self._stream(split) for split in ("train", "validation")}
        if not self._streams["validation"].num_samples:
            raise ConfigError(
                "search.method: the members of a population are compared by validation, and the task has no validation "
                "data; have its dataset('validation') return some"
            )
        self.members = [_Member(dict(values)) for values in initial]
        self.step = 0
        """Number of completed steps, the same for all members."""
        self._validated_step = self._explored_step = 0
        self._losses = np.zeros(population)
        self.lineage: list[dict[str, Any]] = []
        """Record of every copy: `member, parent, step, changes, change`."""
        self._num_reported = 0
        """Number of copies that have been reported already."""
        self._stop = threading.Event()

    def _stream(self, split: str) -> SampleStream:
        source = self._task_cache.source(self._settings, self._task, split)
        least_batch = 1 if split == "train" else _LEAST_VALIDATED
        return task_stream(self._task, source, split, self._settings, least_batch=least_batch)

    @property
    def _total_steps(self) -> int:
        settings = self._settings
        return settings.steps or int(settings.epochs or 0) * self._streams["train"].steps_per_epoch

    # -- a TrialProgram ------------------------------------------------------------------------------------------------

    def advance(self, step: int) -> Progress:
        """Train every member until `step` is completed (at most the budget's steps), and validate.

        Raises:
            TrainingError: all members have diverged, or the user's code failed.
        """
        until = min(step, self._total_steps)
        every = self._settings.validate_every_steps or self._streams["train"].steps_per_epoch
        validations: list[dict[str, float]] = []
        hyper = self._hyper()
        for share in self._shares(until):
            if self._stop.is_set():
                break
            if self.step % self._interval_steps == 0 and self.step > self._explored_step:
                self._next_generation()
                hyper = self._hyper()
            self.step += 1
            self._losses = self._batched.train(share, self._now(hyper), self.step).numpy()
            if self.step % every == 0 or self.step % self._interval_steps == 0 or self.step == until:
                self._validate()
                validations.append(dict(self.members[self.best].metrics))
        self._stop.clear()  # it has been obeyed, or came too late
        if self.step < until:
            return Progress(self.step, {}, tuple(validations), is_interrupted=True)
        if self._validated_step != self.step or not validations:
            self._validate()
            validations.append(dict(self.members[self.best].metrics))
        best = self.members[self.best]
        metrics = best.metrics | ({"train_loss": float(self._losses[self.best])} if self.step else {})
        return Progress(self.step, metrics, tuple(validations), told=self._told())

    def request_stop(self) -> None:
        """Have an `advance` in another thread end after the current step."""
        self._stop.set()

    def state(self) -> TrialState:
        """Return a copy of the state of all members."""
        tensors = {name: value.clone() for name, value in self._batched.tensors().items()}
        members = [{**vars(member), "score": _json(member.score)} for member in self.members]
        position = {
            "step": self.step,
            "validated_step": self._validated_step,
            "explored_step": self._explored_step,
            "members": [{**member, "evaluations": list(map(_json, member["evaluations"]))} for member in members],
            "losses": self._losses.tolist(),
            "lineage": [dict(line) for line in self.lineage],
            "num_told": self._num_reported,
        }
        return TrialState(tensors, position)

    def load(self, state: TrialState, *, partly: bool = False) -> None:
        """Restore a state of a packed population of the same size."""
        position = state.position
        self._batched.load(state.tensors)
        self.step = self._batched.updates = position["step"]
        self._validated_step, self._explored_step = position["validated_step"], position["explored_step"]
        self.members = [
            _Member(
                dict(member["changes"]),
                _number(member["score"]),
                dict(member["metrics"]),
                list(map(_number, member["evaluations"])),
            )
            for member in position["members"]
        ]
        self._losses = np.asarray(position["losses"])
        self.lineage = [dict(line) for line in position["lineage"]]
        self._num_reported = position["num_told"]

    def leave_run(self, directory: Path) -> None:
        """Write the best member as a run of its own: `model/`, `config.yaml`, `result.json`."""
        self.trial_of(self.best).leave_run(directory)

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def best(self) -> int:
        """Index of the member with the best last validation."""
        return max(range(len(self.members)), key=lambda member: (self.members[member].score, -member))

    def trial_of(self, member: int) -> TrainingTrial:
        """Return a member as an ordinary trial that continues from the member's state."""
        trial = TrainingTrial(self._config_of(member), task_cache=self._task_cache)
        trial.load(self.state_of(member))
        return trial

    def state_of(self, member: int) -> TrialState:
        """Return a copy of one member's state, in the format of an ordinary trial."""
        hyper = {name: float(values[member]) for name, values in self._hyper().items()}
        own, epoch = self.members[member], max(0, self.step - 1) // self._streams["train"].steps_per_epoch
        position = Position(step=self.step, validated_step=self._validated_step, validation=dict(own.metrics) or None)
        position.epoch, position.epoch_loss_sum, position.epoch_samples = epoch, float(self._losses[member]), 1
        return TrialState(self._batched.of_member(member, hyper), vars(position))

    def _config_of(self, member: int) -> TrainConfig:
        data = self._config.model_dump(mode="json")
        for key, value in self.members[member].changes.items():
            data["train"]["optimizer"][key.removeprefix(packing.PREFIX)] = value
        return TrainConfig.model_validate(data)

    def _hyper(self) -> dict[str, Tensor]:
        """Return the hyper-parameters that may vary, each `[members]`."""
        optimizer = self._settings.optimizer
        return {
            name: torch.tensor(
                [float(member.changes.get(packing.PREFIX + name, optimizer[name])) for member in self.members],
                dtype=torch.float64,
            )
            for name in packing.VARIED[optimizer["type"]]
        }

    def _now(self, hyper: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the hyper-parameters with the rates of the schedule in this step."""
        schedule, total = self._settings.lr_schedule, self._total_steps
        rates = [lr_at(schedule, lr, self.step, total) for lr in hyper["lr"].tolist()]
        return {**hyper, "lr": torch.tensor(rates, dtype=torch.float64)}

    def _shares(self, until: int) -> Iterator[Share]:
        """Yield the batches of the steps up to `until`."""
        stream = self._streams["train"]
        while self.step < until:
            epoch, index = divmod(self.step, stream.steps_per_epoch)
            with ExitStack() as stack:
                shares = stack.enter_context(stream.epoch(epoch, start_step=index))
                for _, share in zip(
                    range(min(until - self.step, stream.steps_per_epoch - index)), shares, strict=False
                ):
                    yield share

    def _validate(self) -> None:
        sums: dict[str, Tensor] = {}
        num_samples = 0
        with self._streams["validation"].epoch(0) as shares:
            for share in shares:
                for micro_batch in share.micro_batches:
                    num_samples += micro_batch.num_samples
                    for name, values in self._batched.metrics(micro_batch).items():
                        sums[name] = sums.get(name, torch.zeros(())) + values.cpu() * micro_batch.num_samples
        means = {name: (total / num_samples).tolist() for name, total in sums.items()}
        metric, sign = self._judged_by(list(means))
        for index, member in enumerate(self.members):
            member.metrics = {name: float(values[index]) for name, values in means.items()}
            value = sign * member.metrics[metric]
            member.score = value if math.isfinite(value) and math.isfinite(self._losses[index]) else -math.inf
            member.evaluations = list(deque([*member.evaluations, member.score], maxlen=self._num_evaluations))
        self._validated_step = self.step
        if all(member.score == -math.inf for member in self.members):
            raise TrainingError(
                f"The loss of all {len(self.members)} members has diverged by step {self.step}: lower the learning "
                "rates of the space, or set train.grad_clip."
            )

    def _judged_by(self, names: Sequence[str]) -> tuple[str, float]:
        """Return the metric to compare members by, and the sign that makes more better."""
        if self._objective is None:
            metric = next((name for name in names if name != "loss"), "loss")
            listed = lower_names(getattr(self._task, "lower_is_better", None))
            self._objective = {"metric": metric, "mode": str(mode_of_metric(metric, listed))}
        metric = self._objective["metric"]
        if metric not in names:
            there = ", ".join(sorted(names))
            raise ConfigError(f"search.objective.metric: no member reports {metric!r}; what is reported is {there}")
        return metric, 1.0 if self._objective["mode"] == "max" else -1.0

    def _next_generation(self) -> None:
        """Run exploit and explore for all members, based on the scores and states before any copy."""
        self._explored_step = self.step
        scores = {index: member.score for index, member in enumerate(self.members)}
        seen = {index: tuple(member.evaluations) for index, member in enumerate(self.members)}
        number = self.step // self._interval_steps
        chosen = [
            choose_source(
                self._exploit,
                index,
                scores,
                seen,
                rng_of(self._seed, _EXPLOIT, index, number),
                fraction=self._fraction,
                p_value=self._p,
            )
            for index in scores
        ]
        sources = [index if source is None else source for index, source in enumerate(chosen)]
        before = list(self.members)
        for index, source in enumerate(chosen):
            if source is not None:
                self.members[index] = self._copy_of(index, source, before[source], number)
        if any(source is not None for source in chosen):
            self._batched.copy(sources)
            self._losses = self._losses[sources]

    def _copy_of(self, index: int, source: int, copied: _Member, number: int) -> _Member:
        changes = explored(
            self._explore,
            self._space,
            copied.changes,
            rng_of(self._seed, _EXPLORE, index, number),
            factors=self._factors,
            resample_probability=self._resample_probability,
        )
        text = f"copied member {source}; {describe_changes(copied.changes, changes)}"
        line = {"member": index, "parent": source, "step": self.step, "changes": changes, "change": text}
        self.lineage.append(line)
        return _Member(changes, copied.score, dict(copied.metrics), list(copied.evaluations))

    def _told(self) -> dict[str, Any]:
        members = [{"changes": member.changes, "score": _json(member.score)} for member in self.members]
        news, self._num_reported = self.lineage[self._num_reported :], len(self.lineage)
        return {"members": members, "best": self.best, "lineage": [dict(line) for line in news]}


def _json(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _number(score: float | None) -> float:
    return -math.inf if score is None else float(score)
