"""A training config as a class trainable of Ray Tune, for a user's own `tune.Tuner`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.search.repeater import TRIAL_INDEX

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import current
from orchestray.platform.config.base import Section
from orchestray.platform.errors import ConfigError
from orchestray.platform.usercode.beside import use_texts
from orchestray.search.checkpoints.trial_folder import read_config, read_state, write_state
from orchestray.search.config.gangs import is_alone, num_workers
from orchestray.search.config.trial import checked, put_in
from orchestray.search.engine import tune_faults
from orchestray.search.engine.trial_process import prepare_process
from orchestray.search.spaces.dimensions import plain_value
from orchestray.search.tune.searcher import INHERITS
from orchestray.trainers.config.load import Source, load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.settings import texts_of

if TYPE_CHECKING:
    from ray.tune import Checkpoint

    from orchestray.search.trials.gang import GangTrial, WorkerPool
    from orchestray.search.trials.task_cache import TaskCache
    from orchestray.search.trials.training import TrainingTrial
    from orchestray.trainers.saved.run import Run


class TrialTrainable(Trainable):
    """A trial that trains a config with the values that Tune gives it; `trainable` makes a class of it.

    The config of a Tune trial maps keys of the training config (`train.optimizer.lr`, or nested) to values. A result
    has `step`, the metrics of the validation at that step, and `train_loss`. A checkpoint is the whole state, so that a
    restored trial ends with the bits of one that was never interrupted.
    """

    base: ClassVar[TrainConfig]
    """Config that the values of a trial change."""
    texts: ClassVar[Mapping[str, str]]
    """Texts of the user's files, by path, for nodes that have not got them."""
    report_every_steps: ClassVar[int | None]
    """Steps between two results; None: those between two validations, or of an epoch."""

    _reached_step: int = 0
    _program: TrainingTrial | GangTrial | None = None
    _task_cache: TaskCache | None = None
    _workers: WorkerPool | None = None

    # -- for Tune ------------------------------------------------------------------------------------------------------

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return the resources of a trial: of its process, or of an empty bundle for it and one for each worker.

        Tune calls this in the driver, whose earlier trainings may keep processes that hold every CPU: they are ended.
        """
        _make_room()
        made = cls.trial_config(config)
        bundle = _bundle_of(made)
        return PlacementGroupFactory([bundle] if is_alone(made) else [{}, *[bundle] * num_workers(made)])

    @classmethod
    def trial_config(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the training config of a trial.

        Args:
            values: values of dotted keys of the base config, or nested as the config is. A section without `type` is
                merged with the base's.

        Raises:
            ConfigError: the base config refuses the values.
        """
        given = {key: plain_value(value, key) for key, value in values.items() if key not in (INHERITS, TRIAL_INDEX)}
        changes = _by_dotted_key(given, cls.base)
        if index := values.get(TRIAL_INDEX):  # trials that Tune's `Repeater` repeats would all be the same
            changes["train.seed"] = changes.get("train.seed", cls.base.train.seed) + index
        data = cls.base.model_dump(mode="json")
        found = put_in(data, cls.base, changes) or checked(data, look_at_task=False)
        if isinstance(found, TrainConfig):
            return found
        refused = {problem.path for problem in found}
        whole = {key: int(value) for key, value in changes.items() if key in refused and _is_whole(value)}
        if whole:  # `tune.quniform`, and searchers such as BayesOpt, draw floats for whole numbers
            return cls.trial_config({**changes, **whole})
        shown = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        raise ConfigError([problem.line(f"a trial with {shown}") for problem in found])

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        """Build the trial's model and data.

        Raises:
            ConfigError: there are parameters, as `tune.with_parameters` gives them.
        """
        if parameters:
            raise ConfigError(
                f"tune.with_parameters: a trainable of orchestray takes no parameters, got {', '.join(parameters)}; "
                "give trainable() a config with what is the same for all trials, such as arguments of its task"
            )
        prepare_process(self.base.resources.num_threads)
        self._build(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Build another trial in this process, which keeps the data."""
        prepare_process(self.base.resources.num_threads)
        self._build(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train up to the next result, and validate."""
        program = self._trial
        until = self._reached_step + self._steps_of_a_report()
        with use_texts(self.texts):
            progress = program.advance(min(until, program.total_steps))
            measures = program.measures()
        is_at_end = progress.step < until or progress.step == program.total_steps
        self._reached_step = progress.step
        return {**measures, **progress.metrics, "step": progress.step, "done": is_at_end or progress.is_over}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the state of the trial."""
        write_state(Path(checkpoint_dir), self._config, self._trial.state())

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Go on from a state, which may be another trial's."""
        assert isinstance(checkpoint, str)
        with use_texts(self.texts):
            state = read_state(Path(checkpoint))
            self._trial.load(state)
        self._reached_step = int(state.position.get("step", 0))

    def cleanup(self) -> None:
        """End the workers of a trial that has several."""
        self._drop()
        if self._workers is not None:
            self._workers.close()

    # -- the program ---------------------------------------------------------------------------------------------------

    @property
    def _trial(self) -> TrainingTrial | GangTrial:
        assert self._program is not None, "setup() was not called"
        return self._program

    def _build(self, values: Mapping[str, Any]) -> None:
        from orchestray.search.trials.task_cache import TaskCache

        self._drop()
        self._config = self.trial_config(values)
        self._reached_step = 0
        self._task_cache = self._task_cache or TaskCache()
        with use_texts(self.texts):
            self._program = self._ordinary() if is_alone(self._config) else self._gang()
            if INHERITS in values:
                self._program.inherit(read_state(Path(values[INHERITS])))

    def _ordinary(self) -> TrainingTrial:
        from orchestray.search.trials.training import TrainingTrial

        return TrainingTrial(self._config, task_cache=self._task_cache)

    def _gang(self) -> GangTrial:
        from orchestray.search.trials.gang import GangTrial, WorkerPool

        _check_places(self._config)
        self._workers = self._workers or WorkerPool(ray.util.get_node_ip_address())
        return GangTrial(self._config, room=self._workers, directory=self.logdir)

    def _drop(self) -> None:
        """Release the previous trial before the next one is built."""
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def _steps_of_a_report(self) -> int:
        train = self._config.train
        if self.report_every_steps is not None:
            return self.report_every_steps
        return train.validate_every_steps or self._trial.steps_per_epoch

    # -- for the user --------------------------------------------------------------------------------------------------

    @classmethod
    def save_run(cls, checkpoint: Checkpoint, directory: str | os.PathLike[str]) -> Run:
        """Write the run of a checkpoint, with its model, as `orchestray serve` and `load_run` take it.

        Args:
            checkpoint: checkpoint of a trial of this class.
            directory: directory of the run, which must not exist.

        Raises:
            RunNameError: the directory exists.
            CheckpointError: the checkpoint is not one of this class, or damaged.
        """
        from orchestray.search.trials.training import TrainingTrial
        from orchestray.trainers.config.schema import Strategy
        from orchestray.trainers.core.arithmetic import settings_given_back
        from orchestray.trainers.saved.run import load_run

        with checkpoint.as_directory() as folder, use_texts(cls.texts), settings_given_back():
            trial = TrainingTrial(read_config(Path(folder)).model_copy(update={"strategy": Strategy()}))
            trial.load(read_state(Path(folder)))
            trial.leave_run(Path(directory).absolute())
        return load_run(directory)


def _make_room() -> None:
    """End the processes that earlier trainings of this one keep warm, if there are any."""
    if (cluster := current()) is not None:
        make_room(cluster)


def _bundle_of(config: TrainConfig) -> dict[str, float]:
    """Return the resources of each worker of a trial."""
    gpus = config.resources.gpus_per_worker
    return {"CPU": float(config.resources.cpus_per_worker), **({"GPU": float(gpus)} if gpus else {})}


def _check_places(config: TrainConfig) -> None:
    """Refuse a placement group in which the workers of a trial would wait for ever.

    Raises:
        ConfigError: it has too few bundles beside that of this process.
    """
    group = ray.util.get_current_placement_group()
    bundles = [] if group is None else group.bundle_specs
    wanted, number = _bundle_of(config), num_workers(config)
    enough = [each for each in bundles if all(each.get(name, 0.0) + 1e-6 >= one for name, one in wanted.items())]
    taken = 1 if ray.get_runtime_context().get_assigned_resources() else 0  # Tune's process has the first, if not empty
    if bundles and len(enough) - taken < number:
        asked = ", ".join(f"{name}: {one:g}" for name, one in wanted.items())
        raise ConfigError(
            f"tune.with_resources: this trial has {number} workers, each in a bundle with {asked} of its own, and its "
            f"placement group has {bundles}: take with_resources away, as trainable() asks for what each trial needs "
            "(resources.cpus_per_worker of its config says how much a worker gets)"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _by_dotted_key(values: Mapping[str, Any], section: Any, around: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys; those of a section with its `type` are one value.

    Args:
        values: values by key.
        section: section of the config that has the keys.
        around: its own dotted key, with a dot behind it.

    Raises:
        ConfigError: a key is there twice.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = reduce(lambda place, name: getattr(place, name, None), key.split("."), section)
        is_nested = isinstance(inner, Section) and isinstance(value, Mapping) and "type" not in value
        given = _by_dotted_key(value, inner, f"{around}{key}.") if is_nested else {f"{around}{key}": value}
        if twice := found.keys() & given.keys():
            raise ConfigError(f"a trial has two values of {', '.join(sorted(twice))}: name each key once")
        found |= given
    return found


def trainable(
    config: Source, overrides: Sequence[str] = (), *, report_every_steps: int | None = None
) -> type[TrialTrainable]:
    """Return a class trainable for `tune.Tuner` that trains a config with the values of a trial.

    For example, by a searcher of Ray Tune:

        tuner = tune.Tuner(
            trainable("configs/train/digits.yaml"),
            param_space={"train.optimizer.lr": tune.loguniform(1e-3, 1)},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=8, reuse_actors=True),
        )
        best = tuner.fit().get_best_result()

    A trial of several workers (`strategy.network`) gets a placement group with a bundle for each of them.

    Args:
        config: path of a training config, its content as a mapping, or a `TrainConfig`.
        overrides: `key.path=value`, applied after loading.
        report_every_steps: training steps between two results; default: `train.validate_every_steps`, or an epoch.

    Raises:
        ConfigError: the config has problems.
    """
    if report_every_steps is not None and report_every_steps < 1:
        raise ConfigError(f"report_every_steps must be at least 1, got {report_every_steps}")
    base = load_train_config(config, overrides)
    tune_faults.mend()
    _make_room()  # under `tune.with_resources` Tune does not ask the class for its resources
    attributes = {"base": base, "texts": texts_of(base), "report_every_steps": report_every_steps}
    name = re.sub(r"\W+", "_", base.name)
    return type(name, (TrialTrainable,), {**attributes, "__module__": __name__, "__doc__": TrialTrainable.__doc__})
