"""The way from a config to its plans on this machine, or on others; and the record of what real runs took."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.machine import kept
from orchestray.trainers.planning import record as records
from orchestray.trainers.planning.cluster import Cluster
from orchestray.trainers.planning.measuring import Measurements
from orchestray.trainers.planning.planner import AS_IT_STANDS, Planner, Plans
from orchestray.trainers.planning.predict import Predictor, refuse_unknown

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig
    from orchestray.trainers.machine.profile import MachineProfile
    from orchestray.trainers.planning.plans import Plan

Source = str | os.PathLike[str] | Mapping[str, Any]


def plan(
    source: Source | TrainConfig,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    nodes: int = 1,
    machine: str | os.PathLike[str] | None = None,
    price_per_hour: float | None = None,
    budget: float | None = None,
    mtbf_h: float | None = None,
    report: Callable[[int, int], None] = lambda _done, _all: None,
) -> Plans:
    """Return the plans for a config: the schemes that fit, ranked by their predicted time.

    What is not known yet is measured in processes of this machine, about a second a scheme, and kept.

    Args:
        source: path of a YAML file, a mapping, or a `TrainConfig`.
        overrides: `key.path=value`, applied after loading.
        workers: most workers; default: the cores of all machines.
        nodes: number of machines.
        machine: file of the profile of each machine; default: this machine's own.
        price_per_hour: price of a worker for an hour, in any currency; default: that of the profile, if it has one.
        budget: most that the whole run may cost, in the unit of the profile's `price_per_worker_hour`; default: any.
        mtbf_h: mean hours between failures of a run, for the goodput of each plan; default: plans have none.
        report: called with the numbers of schemes done and in all.

    Raises:
        ConfigError: the config is wrong, this machine has no profile, or no scheme fits.
    """
    # First what is wrong in the call: the profile that may be missing takes half a minute to measure.
    config = load_train_config(source, overrides)
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers must be 1 or more, got {workers}")
    planner, cluster = _planner(nodes, machine, price_per_hour, budget=budget, mtbf_h=mtbf_h)
    return planner.plans(config, workers or cluster.machine.cores * nodes, report)


def plan_as_it_stands(
    source: Source | TrainConfig,
    *,
    overrides: Sequence[str] = (),
    nodes: int = 1,
    machine: str | os.PathLike[str] | None = None,
    price_per_hour: float | None = None,
    mtbf_h: float | None = None,
) -> Plan:
    """Return the prediction of a config as it stands; arguments and errors as in `plan`."""
    config = load_train_config(source, overrides)
    planner, _ = _planner(nodes, machine, price_per_hour, mtbf_h=mtbf_h)
    return planner.this(config)


def note_run(config: TrainConfig, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Add a run that has ended to the record, if it can be predicted without measuring anything.

    Args:
        config: config of the run.
        lines: its metric lines.

    Returns:
        Predicted and measured step, for the run's result; None: this machine is not calibrated, or the config was
        not planned here before.
    """
    with suppress(OrchestrayError):
        machine = kept.load()
        predictor, measurements = _predictor(Cluster(machine))
        _refuse_unrecorded(config)
        if all(measurements.knows(each) for each in predictor.wanted(config)):
            return _noted(config, lines, predictor, machine)
    return None


def note_later(directory: Path) -> dict[str, Any] | None:
    """Predict a run that has ended, measuring what it takes, and add it to the record unless it is there.

    Args:
        directory: directory of the run.

    Returns:
        Predicted and measured step; None: it made too few steps.

    Raises:
        OrchestrayError: the run's config cannot be predicted.
    """
    from orchestray.platform.run.metrics import read_lines

    machine = kept.load()
    config = load_train_config(directory / "config.yaml", look_at_task=False)
    _refuse_unrecorded(config)
    return _noted(config, read_lines(directory / "metrics.jsonl"), _predictor(Cluster(machine))[0], machine)


def _refuse_unrecorded(config: TrainConfig) -> None:
    refuse_unknown(config)
    if config.train.batch_schedule is not None:
        text = "steps become longer as batches grow, so a run has no usual step to put beside a prediction"
        raise ConfigError(f"config: train.batch_schedule: {text}")


def _steps_between_exchanges(config: TrainConfig) -> int | None:
    """Return after how many steps all workers exchange; None: after each, or not by a number of steps."""
    exchange: Any = config.strategy.exchange
    every = getattr(exchange, "every", None)
    return every if isinstance(every, int) and getattr(exchange, "unit", "steps") == "steps" else None


def _noted(
    config: TrainConfig, lines: Iterable[Mapping[str, Any]], predictor: Predictor, machine: MachineProfile
) -> dict[str, Any] | None:
    lines = [*lines]
    measured_s = records.measured_step_s(lines, every=_steps_between_exchanges(config))
    if measured_s is None:
        return None
    record = records.load_record(machine.name)
    predicted = predictor.predict(config, AS_IT_STANDS, {})
    corrected, traits = predicted.corrected(record.correction(predicted.traits)), predicted.traits
    if all((entry.name, entry.measured_s) != (config.name, measured_s) for entry in record.entries):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        records.append(
            records.Entry(
                traits.family,
                config.name,
                predicted.step_s,
                measured_s,
                at,
                machine.name,
                traits.scheme,
                traits.task,
                predicted.num_workers + predicted.num_servers,
                records.measured_start_s(lines, measured_s),
            )
        )
    assert corrected.interval_s is not None
    return {"step_s": corrected.step_s, "interval_s": [*corrected.interval_s], "measured_step_s": measured_s}


def _planner(
    nodes: int,
    machine: str | os.PathLike[str] | None,
    price_per_hour: float | None,
    *,
    budget: float | None = None,
    mtbf_h: float | None = None,
) -> tuple[Planner, Cluster]:
    here = kept.load()
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise ConfigError(f"--price-per-hour must be 0 or more, got {price_per_hour:g}")
    if nodes < 1:
        raise ConfigError(f"--nodes must be 1 or more, got {nodes}")
    for option, value in (("--mtbf-hours", mtbf_h), ("--budget", budget)):
        if value is not None and not value > 0:
            raise ConfigError(f"{option} must be above 0, got {value:g}")
    if machine is None:
        cluster = Cluster(here, nodes)
    else:
        there = kept.load(Path(machine), of_any_machine=True)
        _check_torch(there, here, machine)
        cluster = Cluster(there, nodes, here)
    if price_per_hour is not None:
        cluster = replace(cluster, machine=replace(cluster.machine, price_per_worker_hour=price_per_hour))
    _, measurements = _predictor(cluster)
    return Planner(cluster, measurements, records.load_record(here.name), mtbf_h=mtbf_h, budget=budget), cluster


def _check_torch(there: MachineProfile, here: MachineProfile, file: str | os.PathLike[str]) -> None:
    """Raise if times measured here cannot be scaled to a machine, as its profile is of another version of torch."""
    theirs, ours = there.versions.get("torch"), here.versions.get("torch")
    if theirs != ours:
        text = f"was measured with torch {theirs}, and this is {ours}"
        raise ConfigError(f"{os.fspath(file)} {text}: run `orchestray calibrate` there with torch {ours}")


def _predictor(cluster: Cluster) -> tuple[Predictor, Measurements]:
    directory = kept.cache_directory() / "measurements"
    measurements = Measurements(directory, {**kept.versions(), "processor": kept.processor()}, kept.cores())
    return Predictor(cluster, measurements), measurements


def overrides_of(plan: Plan) -> list[str]:
    """Return the `key.path=value` arguments that run a plan."""
    return [f"{path}={_text(value)}" for path, value in plan.changes.items()]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
