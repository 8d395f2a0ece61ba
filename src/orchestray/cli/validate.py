"""`orchestray validate`: a check of configs without starting anything."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import is_search_source, load_search_config, search_schema
from orchestray.search.config.schema import SearchConfig
from orchestray.serving.config.load import is_serve_source, load_serve_config
from orchestray.serving.config.schema import Scaling, ServeConfig
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.modes import goals_text
from orchestray.trainers.config.resource_checks import unused_gpus
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.task_lint import module_problems

app = typer.Typer()


class Kind(StrEnum):
    """The kinds of config."""

    TRAIN = "train"
    SEARCH = "search"
    SERVE = "serve"


@app.command(epilog="Example: orchestray validate configs/train/digits.yaml train.batch_size=128")
def validate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY.PATH=VALUE",
            help="The YAML files, and keys to set in each after it is read.",
            show_default=False,
        ),
    ] = None,
    *,
    schema: Annotated[
        Kind | None, typer.Option("--schema", help="Print the JSON schema of this kind of config, and do no more.")
    ] = None,
) -> None:
    """Check configs without starting Ray; print every problem, one per line."""
    if schema is not None:
        print(json.dumps(_schema(schema), indent=2))
        return
    overrides = [argument for argument in arguments or () if "=" in argument and not _is_there(argument)]
    files = [argument for argument in arguments or () if argument not in overrides]
    if not files:
        raise ConfigError(
            "orchestray validate: which config? For example: orchestray validate configs/train/digits.yaml"
        )
    stray = [file for file in files[1:] if not _is_there(file) and not file.endswith((".yaml", ".yml"))]
    problems = [f"{argument}: there is no such file; to set a key, write {argument}=VALUE" for argument in stray]
    for file in [file for file in files if file not in stray]:
        try:
            print(f"{file}: {_check(file, overrides)}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _is_there(argument: str) -> bool:
    """Return True if an argument names something that exists; a text too long for a file's name names nothing."""
    try:
        return Path(argument).exists()
    except (OSError, ValueError):
        return False


def _schema(kind: Kind) -> dict[str, Any]:
    if kind is Kind.SEARCH:
        return search_schema()
    return (ServeConfig if kind is Kind.SERVE else TrainConfig).model_json_schema()


def _check(file: str, overrides: list[str]) -> str:
    """Check one config, of any kind, and return a summary of what it would do."""
    # Imported here: it is slow to load.
    from orchestray.trainers.validate.refuse import check_layout

    if is_serve_source(file):
        return _serve_summary(load_serve_config(file, overrides))
    if is_search_source(file):
        search = load_search_config(file, overrides)
        _check_module(search.base, label=f"{file}: base")
        check_layout(search.base, label=f"{file}: base")
        from orchestray.search.engine.earlier import check_earlier
        from orchestray.search.registry.check import check_method

        if search.search.callbacks:
            from orchestray.search.engine.callbacks import check_callbacks

            check_callbacks(search.search.callbacks)
        cautions = [*check_method(search, label=file), *check_earlier(search, label=file), *_cautions(search.base)]
        return _noted(_search_summary(search, Path(file).absolute().parent), cautions)
    config = load_train_config(file, overrides)
    _check_module(config, label=file)
    check_layout(config, label=file)
    return _noted(_summary(config), _cautions(config))


def _cautions(config: TrainConfig) -> list[str]:
    return [caution] if (caution := unused_gpus(config.resources)) else []


def _noted(summary: str, cautions: list[str]) -> str:
    return "".join([summary, *(f"\n  note: {caution}" for caution in cautions)])


def _check_module(config: TrainConfig, *, label: str) -> None:
    """Raise an error for a task in a missing module, which a run would report only after its workers have started."""
    problems = list(module_problems(config.task.type, config.task.model_extra or {}))
    if problems:
        raise ConfigError([problem.line(label) for problem in problems])


def _serve_summary(config: ServeConfig) -> str:
    names = len({model.name for model in config.models})
    models = f"{names} model{'s' if names > 1 else ''} in {len(config.models)} version(s)"
    count = config.replicas
    replicas = f"{count.min} to {count.max} replicas" if isinstance(count, Scaling) else f"{count} replica(s)"
    return f"ok ({models}, {replicas}, {config.batching.policy} batches of up to {config.batching.max_batch_size})"


def _search_summary(config: SearchConfig, folder: Path) -> str:
    from orchestray.search.results.report import objectives_text  # late: it is slow to load

    search = config.search
    trials = "every point" if search.budget.trials is None else f"{search.budget.trials} trials"
    what = [f"{len(search.space)} key{'s' if len(search.space) > 1 else ''}"] if search.space else []
    what += [f"{_as_given(search.architecture.space, folder)} networks"] if search.architecture else []
    length = f"{trials} of {config.length_text}"
    task = _as_given(config.base.task.type, folder)
    return f"ok ({search.method.type} over {' and '.join(what)} of {task} for {objectives_text(config)}, {length})"


def _as_given(place: str, folder: Path) -> str:
    """Return a class in a file as a config of that folder names it; other names unchanged."""
    file, colon, name = place.rpartition(":")
    within = colon and Path(file).is_absolute() and Path(file).is_relative_to(folder)
    return f"{Path(file).relative_to(folder)}:{name}" if within else place


def _summary(config: TrainConfig) -> str:
    train, network = config.train, config.strategy.network
    length = f"{train.epochs} epochs" if train.epochs else f"{train.steps} steps"
    num_workers = network.data * network.tensor * network.pipeline
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    goals = f", {text}" if (text := goals_text(config)) else ""
    batches = f"in batches of {train.batch_size}"
    updates = train.optimizer or train.solver
    kind = "" if updates is None else f" of {updates.type}"
    return f"ok ({config.task.type}, {length}{kind} {batches}, {workers}{goals})"
