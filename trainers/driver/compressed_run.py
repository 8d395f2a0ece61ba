"""A run directory whose model is a trained one made smaller; written by `orchestray compress`.

Deep Compression (Han, Mao and Dally 2016, figure 1): prune, train what is left, share values, train the values, and
code them. The training is that of `orchestray train`, with `train.init_from` and `train.init_keeps`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint_files import MODEL_FILE
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.model_files import HUFFMAN_FILE, load_model_json
from orchestray.platform.task import TaskSource
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.core.model_state import ModelState, StateKeeper
from orchestray.trainers.driver.averaged_run import validate
from orchestray.trainers.driver.runlog.result import failed
from orchestray.trainers.driver.runlog.run_log import RunProgress
from orchestray.trainers.driver.training import train
from orchestray.trainers.saved.checkpoint_model import BUFFERS
from orchestray.trainers.saved.interface import INTERFACE, Interface, read_interface
from orchestray.trainers.saved.run import Run, load_run
from orchestray.trainers.saved.trained_model import fill, read_model, write_model
from orchestray.trainers.shrink.deep_compression import (
    again_shared,
    again_sparse,
    few_valued,
    in_half,
    pruned,
    weights_of,
    with_shared_values,
)
from orchestray.trainers.shrink.tucker_task import in_factors, tucker_section

if TYPE_CHECKING:
    import os

    from torch import nn

    from orchestray.platform.task import Task
    from orchestray.trainers.config.schema import TrainConfig

_VALUES_RATE = 0.1
"""Learning rate with which shared values are trained, over that of the run."""


@dataclass(frozen=True)
class Recipe:
    """Ways to make a model smaller, with their numbers.

    Attributes:
        sparsity: part of the weights that is pruned, from 0 to below 1.
        bits: bits of a code: each tensor keeps at most 2 ** bits values besides zero, 1 to 8.
        tucker: part of the channels that the cores of convolutions keep, above 0 to 1; None: they stay whole.
        fine_tune_steps: steps of training after pruning, and again after sharing values; 0: none.
    """

    sparsity: float = 0.9
    bits: int = 5
    tucker: float | None = None
    fine_tune_steps: int = 0

    def check(self) -> None:
        """Raise a ConfigError if a number is out of range."""
        if not 0 <= self.sparsity < 1:
            raise ConfigError(f"orchestray compress: --sparsity must be from 0 to below 1, got {self.sparsity:g}")
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"orchestray compress: --bits must be 1 to 8, got {self.bits}")
        if self.tucker is not None and not 0 < self.tucker <= 1:
            raise ConfigError(f"orchestray compress: --tucker must be above 0 and at most 1, got {self.tucker:g}")
        if self.fine_tune_steps < 0:
            raise ConfigError(f"orchestray compress: --fine-tune must be 0 or more, got {self.fine_tune_steps}")


def compress(
    run: Run | str | os.PathLike[str],
    *,
    sparsity: float = 0.9,
    bits: int = 5,
    tucker: float | None = None,
    fine_tune: int = 0,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    address: str | None = None,
) -> Run:
    """Make a trained model smaller by Deep Compression; return the new run, which is validated.

    Args:
        run: finished run, or its directory.
        sparsity: part of the weights that is pruned, the smallest ones, from 0 to below 1.
        bits: bits of a weight's code: each tensor keeps at most 2 ** bits values besides zero, 1 to 8.
        tucker: part of the channels that the cores of convolutions keep in Tucker factors, above 0 to 1; None: the
            convolutions stay whole.
        fine_tune: steps of training after pruning, and again after sharing values; 0: none.
        name: name of the new run; default: that of the run with `-compressed`.
        runs_dir: directory in which the new run's directory is created; default: that of the run.
        address: Ray cluster for fine-tuning; default: see `train`.

    Raises:
        ConfigError: a number is out of range, or the run cannot be fine-tuned.
        CheckpointError: the run has no trained model, or the model nothing that could be made smaller.
        RunNameError: there is no such run, or the name is in use.
        TaskError: the task cannot be built any more.
        StorageError: the disk is full, or not writable.
    """
    whole = run if isinstance(run, Run) else load_run(run)
    return write_compressed(
        whole,
        Recipe(sparsity, bits, tucker, fine_tune),
        name=name or f"{whole.name}-compressed",
        runs_dir=runs_dir or whole.path.parent,
        address=address,
    )


def write_compressed(
    run: Run,
    recipe: Recipe,
    *,
    name: str,
    runs_dir: str | os.PathLike[str],
    address: str | None = None,
    train_run: Callable[..., Run] = train,
) -> Run:
    """Make a trained model smaller, validate it, and write it as a run of its own.

    Args:
        run: finished run.
        recipe: what is done.
        name: name of the new run.
        runs_dir: directory in which the new run's directory is created.
        address: Ray cluster for fine-tuning; default: see `train`.
        train_run: `train`, or what does the same.

    Raises:
        ConfigError: a number of the recipe is out of range, or an ensemble is to be fine-tuned.
        CheckpointError: the run has no trained model, or the model nothing that could be made smaller.
        RunNameError: the name is in use.
        TaskError: the task cannot be built any more.
    """
    recipe.check()
    run_progress, source = RunProgress(time.time()), run.path / "model"
    described = load_model_json(source)
    if recipe.fine_tune_steps and "ensemble" in described:
        raise ConfigError(
            "orchestray compress: --fine-tune trains one model, and the run has an ensemble; leave it out"
        )
    model, task, config = run.load_model(), run.load_task(), run.config
    before = _validated(run, task, model)
    if recipe.tucker is not None:
        inner = replace(run.task_source(), arguments=described["task"]["arguments"])
        section = tucker_section(inner, recipe.tucker)
        config = load_train_config({**config.model_dump(mode="json"), "task": section}, look_at_task=False)
        described = {**described, "task": TaskSource.from_config(config.task).to_json()}
        task, model = tasks.build(TaskSource.from_json(described["task"])), in_factors(model, recipe.tucker)
    config = config.model_copy(update={"name": name})
    if recipe.fine_tune_steps:
        _check_tuning(config, recipe.fine_tune_steps)
    interface = read_interface(source)
    state, quantized = StateKeeper(model).state(), few_valued(model.eval())
    state = replace(state, tensors={**state.tensors, **quantized}, buffers=described.get(BUFFERS, {}))
    weights = weights_of(model, state.tensors)
    with RunDirectory.create_whole(runs_dir, name) as directory:
        directory.write_config(dump_yaml(config))
        tuning = _Tuning(config, recipe.fine_tune_steps, task, interface, directory.path, address, train_run)
        stages: dict[str, Any] = {"whole": before}
        if recipe.tucker is not None:
            stages["in factors"] = _validated(run, task, model)

        def look(stage: str, reached: ModelState) -> None:
            stages[stage] = _validated(run, task, fill(model, reached, described.get("precision")).eval())

        names = [each for each in weights if each not in quantized]
        state = _small(state, names, recipe, tuning, look)
        about = {key: value for key, value in described.items() if key not in ("files", BUFFERS, INTERFACE)}
        write_model(directory.paths.model, state, about, task, interface, is_compressed=True)
        directory.write_result(
            {
                **failed(run_progress, "succeeded", None),
                "steps": run.result.get("steps") if run.result else None,
                "final": {"train": None, "validation": stages["coded"]},
                "compressed": {
                    "run": run.name,
                    "sparsity": recipe.sparsity,
                    "bits": recipe.bits,
                    "tucker": recipe.tucker,
                    "fine_tune_steps": recipe.fine_tune_steps,
                    "weights": sum(state.tensors[each].numel() for each in weights),
                    "weights_left": sum(int(state.tensors[each].count_nonzero()) for each in weights),
                    "bytes_before": _file(source).stat().st_size,
                    "bytes": _file(directory.paths.model).stat().st_size,
                    "validation": stages,
                },
            }
        )
    return load_run(Path(runs_dir) / name)


def _small(
    state: ModelState, names: list[str], recipe: Recipe, tuning: _Tuning, look: Callable[[str, ModelState], None]
) -> ModelState:
    """Return the state with few weights of few values, and all other numbers in half precision.

    Args:
        state: state of the trained model.
        names: names of its weights.
        recipe: what is done.
        tuning: training of what is left.
        look: called after each stage with its name and the state.
    """
    sparse = replace(state, tensors=pruned(state.tensors, names, recipe.sparsity))
    look("pruned", sparse)
    if recipe.fine_tune_steps:
        tuned = tuning(sparse, "zeros")
        sparse = replace(tuned, tensors=again_sparse(tuned.tensors, sparse.tensors, names))
        look("pruned, trained", sparse)
    found = replace(sparse, tensors=with_shared_values(sparse.tensors, names, recipe.bits))
    look("shared", found)
    if recipe.fine_tune_steps:
        tuned = tuning(found, "values")
        found = replace(tuned, tensors=again_shared(tuned.tensors, found.tensors, names))
    small = replace(found, tensors={name: in_half(each) for name, each in found.tensors.items()})
    look("coded", small)
    return small


@dataclass(frozen=True)
class _Tuning:
    """Training that goes on from a state, under the run's config, and keeps zeros or equal values."""

    config: TrainConfig
    steps: int
    task: Task
    interface: Interface | None
    directory: Path
    address: str | None
    train_run: Callable[..., Run]

    def __call__(self, state: ModelState, keeps: Literal["zeros", "values"]) -> ModelState:
        """Return the state that training ends with."""
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            start = Path(folder) / "start"
            write_model(start, state, {}, self.task, self.interface or Interface())
            tuned = self.train_run(
                _tuning_config(self.config, self.steps, str(start), keeps), runs_dir=folder, address=self.address
            )
            return read_model(tuned.path / "model")


def _tuning_config(config: TrainConfig, steps: int, start: str, keeps: Literal["zeros", "values"]) -> dict[str, Any]:
    """Return a config of the run's training, shorter, by as many replicas as the run had and a plain all-reduce."""
    whole = config.model_dump(mode="json")
    train = {**whole["train"], "steps": steps, "init_from": start, "init_keeps": keeps}
    train |= dict.fromkeys(("epochs", "until", "early_stopping", "time_limit_s", "init", "batch_schedule"))
    train |= {"init_except": [], "weight_norm": False}
    if keeps == "values":
        train["optimizer"] = {**train["optimizer"], "lr": train["optimizer"]["lr"] * _VALUES_RATE}
    return {
        **{key: whole[key] for key in ("task", "distill", "resources", "max_restarts")},
        "name": keeps,
        "train": train,
        "strategy": {"network": {"data": whole["strategy"]["network"]["data"]}},
        "checkpoint": {"every_steps": steps},
    }


def _check_tuning(config: TrainConfig, steps: int) -> None:
    """Raise a ConfigError if the run's training cannot go on with zeros that stay."""
    try:
        load_train_config(_tuning_config(config, steps, "start", "zeros"), look_at_task=False)
    except ConfigError as error:
        raise ConfigError(f"orchestray compress: --fine-tune cannot train this run; leave it out: {error}") from error


def _validated(run: Run, task: Task, model: nn.Module) -> dict[str, Any] | None:
    settings = run.config.train
    step = int((run.result or {}).get("steps") or 1)
    return validate(task, model, batch_size=settings.batch_size, precision=settings.precision, step=step)


def _file(directory: Path) -> Path:
    """Return the file with the tensors of a trained model.

    Raises:
        CheckpointError: there is none.
    """
    for name in (HUFFMAN_FILE, MODEL_FILE):
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"there is no trained model in {directory}: the run has not finished")
