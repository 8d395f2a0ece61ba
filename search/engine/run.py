"""The run of a search on Ray, from its config to the run of its best trial."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster.cluster import connect, prepare
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.platform.run.directory import RunPaths, read_result
from orchestray.platform.run.files import dump_json, storage_errors, write_atomic
from orchestray.platform.run.metrics import read_lines
from orchestray.search.checkpoints.state_files import StateFiles
from orchestray.search.config.gangs import most_workers
from orchestray.search.config.trial import trial_config
from orchestray.search.engine.controller import SearchController
from orchestray.search.engine.controller_team import controllers_on
from orchestray.search.engine.messages import GANG, ORDINARY, TrialLimits
from orchestray.search.engine.objective import objectives_of
from orchestray.search.engine.placement_watch import PlacementWatch
from orchestray.search.engine.resume import session_of
from orchestray.search.engine.session import SearchError
from orchestray.search.engine.start_throttle import StartThrottle, cores_of
from orchestray.search.engine.trial_output import TrialLogs
from orchestray.search.results.curve import curve_of
from orchestray.search.results.schema import SearchOutcome, TrialChange
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.settings import texts_of
from orchestray.trainers.core.parts import parts_of

if TYPE_CHECKING:
    import threading

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.engine.experiment import WriteRun
    from orchestray.search.engine.messages import TrialResult, TrialTask
    from orchestray.search.engine.session import MethodSession
    from orchestray.search.results.paths import SearchPaths
    from orchestray.search.results.writer import SearchRecords
    from orchestray.trainers.config.schema import TrainConfig


def run_search(
    config: SearchConfig,
    records: SearchRecords,
    *,
    session: MethodSession | None = None,
    address: str | None = None,
    resume: bool = False,
    stop: threading.Event | None = None,
    on_change: Callable[[TrialChange], None] = lambda _change: None,
    notify: Callable[[str], None] = lambda _text: None,
    said: Callable[[str, list[str]], None] = lambda _who, _lines: None,
    save_every_s: float = 10.0,
) -> SearchOutcome:
    """Run a search to its end, and write the run of its best trial.

    Args:
        config: config of the search.
        records: open records of its directory.
        session: conversation with its method, with the journal replayed; default: created here.
        address: see `platform.cluster.connect`.
        resume: True to continue from the end of the journal.
        stop: set this event to end the search in an orderly way.
        on_change: called with each status change of a trial.
        notify: called with a sentence that the user should see.
        said: called with lines that a trial has printed, and its name.
        save_every_s: seconds between two writes of the state of a running trial; 0: after each report.

    Returns:
        How it ended: `failed` if every trial has failed, `interrupted` if it was stopped.

    Raises:
        ConfigError: the method cannot search this space, or the objective is not reported.
        OrchestrayError: the search cannot continue.
    """
    prepare(address)
    objectives = objectives_of(config)
    files = StateFiles(records.paths.trial_states)
    if resume:
        files.remove_remains()
    else:
        files.clear()

    def make_config(changes: Mapping[str, Any], genome: Any, steps: int, trial: int) -> TrainConfig:
        return trial_config(config, changes, genome, steps, trial=trial)

    controller = SearchController(
        session or session_of(config, records.journal),
        make_config,
        objectives,
        records,
        files,
        parallel=config.search.parallel,
        unit=config.unit,
        on_change=on_change,
    )
    budget, resources = config.search.budget, config.base.resources
    limits = TrialLimits(
        objectives,
        str(records.paths.trial_states.absolute()),
        save_every_s,
        budget.trial_time_limit_s,
        budget.trial_memory_mb,
        resources.num_threads,
    )
    deadline_s = math.inf if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s - records.seconds
    if controller.is_over:
        return _finish(controller, records, limits, stop, is_stopped=False)
    cluster = connect(address)
    from orchestray.platform.actors.pool import make_room  # imports Ray, which reads its token on import

    make_room(cluster)  # earlier training in this process may hold every CPU
    limits = replace(
        limits,
        cpus_per_worker=share_of_cpus(config, cluster),
        texts=texts_of(config.base),
        logs=str(records.paths.logs.absolute()),
    )
    watch = _placement_watch(config, cluster, notify)
    with (
        contextlib.closing(TrialLogs(records.paths.logs, said)) as logs,
        controllers_on(cluster, controller.session.method) as team,
    ):
        is_stopped, is_left = _run_trials(config, controller, limits, records, cluster, stop, deadline_s, watch, logs)
        processes = {} if team is None else team.describe()
    if not is_stopped and not controller.is_over:
        controller.suspend()
    outcome = _finish(controller, records, limits, stop, is_stopped=is_stopped, is_left=is_left)
    parts = [*outcome.parts, *processes.pop("parts", ())]
    return replace(outcome, parts=parts, more={**outcome.more, **processes})


def _run_trials(
    config: SearchConfig,
    controller: SearchController,
    limits: TrialLimits,
    records: SearchRecords,
    cluster: Cluster,
    stop: threading.Event | None,
    deadline_s: float,
    watch: PlacementWatch,
    logs: TrialLogs,
) -> tuple[bool, bool]:
    """Run trials until nothing is left to do, the search is stopped, or its time is up.

    Returns True if it was stopped, and True if the run of the best is written.

    A trial of several workers has a placement group with a bundle for each of them. Its own process, which keeps their
    checkpoints, shares that group.
    """
    # These import Tune, which takes a second.
    from orchestray.search.engine.callbacks import make_callbacks
    from orchestray.search.engine.experiment import Experiment
    from orchestray.search.engine.fit import fit
    from orchestray.search.engine.trainable import hosted_trial
    from orchestray.search.engine.tune_faults import has_place

    _check_room(config, cluster)
    num_workers = most_workers(config.base, config.search.space)
    bundle = _asked(config, cluster)[1]
    bundles = [{}, *[bundle] * num_workers] if num_workers else [bundle]

    def look(experiment: Experiment) -> None:
        logs.look()
        records.keep_time(config.search.budget.time_limit_s)
        if not experiment.should_end():
            watch.look(is_under_way=bool(experiment.since_s), has_place=has_place)

    is_left = False

    def finish(write: WriteRun) -> None:
        nonlocal is_left
        kept = controller.best()
        if kept is not None and not (kept.is_lost or num_workers):
            _leave_best(controller, records.paths, Path(limits.directory) / "by-the-last", write)
            is_left = True

    throttle = StartThrottle(config.search.parallel, cores_of(None if num_workers else cluster.resources()))
    experiment = Experiment(controller, limits, throttle, stop=stop, deadline_s=deadline_s, look=look, finish=finish)
    fit(
        experiment,
        hosted_trial(config.name, limits, bundles),
        name=config.name,
        directory=records.paths.tune.absolute(),
        objective=config.search.objective[0],
        callbacks=make_callbacks(config.search.callbacks),
    )
    return experiment.was_stopped, is_left


def _placement_watch(config: SearchConfig, cluster: Cluster, notify: Callable[[str], None]) -> PlacementWatch:
    """Return a watch over the resources of the search's processes, which reports what they need and what is free."""
    from orchestray.platform.actors import placement

    def say() -> None:
        text = placement.no_place_in_time(cluster, *_asked(config, cluster))
        notify(f"no trial is under way: the search waits for room. {text}")

    return PlacementWatch(say, patience_s=placement.PLACEMENT_TIMEOUT_S)


def _check_room(config: SearchConfig, cluster: Cluster) -> None:
    """Refuse a search whose trials the cluster never has room for.

    Raises:
        ClusterError: the cluster never has room for a trial.
    """
    total = cluster.resources()
    num_places, bundle = _asked(config, cluster)
    for name, amount in bundle.items():
        if amount * num_places > total.get(name, 0.0) + 1e-6:
            raise ClusterError(
                f"A trial of {num_places} worker(s) asks for {amount:g} {name} each, and the cluster has "
                f"{cluster.describe()}. Ask for fewer workers (base.strategy.network) or less for each "
                "(base.resources)."
            )


def _asked(config: SearchConfig, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """Return the number of workers of a trial, and the resources of each."""
    gpus = config.base.resources.gpus_per_worker
    bundle = {"CPU": share_of_cpus(config, cluster), **({"GPU": gpus} if gpus else {})}
    return max(1, most_workers(config.base, config.search.space)), bundle


def share_of_cpus(config: SearchConfig, cluster: Cluster) -> float:
    """Return the CPUs per worker: on a cluster of our own, users may choose more workers than cores."""
    resources = config.base.resources
    workers = max(1, most_workers(config.base, config.search.space)) * config.search.parallel
    if not cluster.owned:
        return resources.cpus_per_worker
    fair = math.floor(cluster.resources().get("CPU", 1.0) / workers * 1000) / 1000
    return min(resources.cpus_per_worker, fair)


def _finish(
    controller: SearchController,
    records: SearchRecords,
    limits: TrialLimits,
    stop: threading.Event | None,
    *,
    is_stopped: bool,
    is_left: bool = False,
) -> SearchOutcome:
    """Return how a search ended, and write the run of its best trial unless it `is_left` already."""
    kept = controller.best()
    if kept is None and controller.is_over and not is_stopped and controller.num_good:
        raise SearchError(
            f"{controller.num_good} trials have ended well, and the files with their states are lost or damaged: there "
            "is no run of the best. trials.jsonl has what each came to; train the best of them anew with its config."
        )
    if kept is not None and not (is_stopped and kept.is_lost):  # a user who stops a search does not wait for training
        with contextlib.suppress(OrchestrayError) if is_stopped else contextlib.nullcontext():
            if kept.is_lost and stop is not None and stop.is_set():
                is_stopped = True
            elif not is_left:
                write = partial(_leave_run_here, limits=limits)
                _leave_best(controller, records.paths, Path(limits.directory) / "best", write)
    elif not is_stopped and controller.is_over and controller.first_error is not None:
        return SearchOutcome("failed", error=f"Every trial failed; the first: {controller.first_error}")
    elif not is_stopped and not controller.is_over:
        return SearchOutcome("failed", error=_nothing_in_time(controller.first_error))
    best = None if kept is None else controller.best_trial(kept)
    method = controller.session.method
    parts, tally = parts_of(method, folders=("search.methods",)), method.tally()
    more = {"tally": tally} if tally else {}
    if is_stopped:
        return SearchOutcome("interrupted", best=best, parts=parts, more=more)
    if controller.is_over:  # otherwise unfinished trials may get more time; the best run is written in either case
        controller.states.clear(kept)
    return SearchOutcome("succeeded", best=best, parts=parts, more=more)


def _nothing_in_time(first_error: str | None) -> str:
    """Return what to do about a search whose time was up before it had a result."""
    failed = "" if first_error is None else f" A trial has failed: {first_error}"
    return (
        "The time limit (search.budget.time_limit_s) passed before any trial had reported, so there is no best. Raise "
        "it and go on with --resume; or train fewer steps (search.budget.steps_per_trial), or use a method whose "
        f"trials report before their end (asha, median_stopping).{failed}"
    )


def _leave_run_here(order: TrialTask, directory: Path, limits: TrialLimits) -> TrialResult:
    """Write a trial's run in this process."""
    from orchestray.search.engine.trial_worker import TrialHost
    from orchestray.trainers.config.schema import Strategy
    from orchestray.trainers.core.arithmetic import settings_given_back

    config, alone = order.config, order
    assert config is not None
    if order.program == GANG:  # without workers: one process with the same weights
        alone = replace(order, program=ORDINARY, config=config.model_copy(update={"strategy": Strategy()}))
    host = TrialHost(limits)
    try:
        with settings_given_back():
            result = host.leave_run(alone, str(directory))
    finally:
        host.close()
    if result.error is None and alone is not order:
        write_atomic(directory / "config.yaml", dump_yaml(config).encode())
    return result


def _leave_best(controller: SearchController, paths: SearchPaths, aside: Path, write: WriteRun) -> None:
    """Write `best/`.

    Args:
        controller: controller of a search with a best trial.
        paths: paths of the search.
        aside: directory in which the run is made: a kill meanwhile leaves the previous one intact.
        write: writes the run of a trial.

    Raises:
        OrchestrayError: it cannot be written.
    """
    kept, directory = controller.best(), paths.best
    assert kept is not None
    shutil.rmtree(aside, ignore_errors=True)
    result = write(controller.order_for_best(kept), aside)
    if result.error is not None:
        raise OrchestrayError(f"The run of the best trial ({kept.trial}) could not be written: {result.error}")
    # The writing process has built the network from its weights alone, without the learning curve.
    written = read_result(RunPaths(aside)) or {}
    reports, best = read_lines(paths.reports), controller.best_trial(kept)
    steps = None if controller.unit == "steps" else written.get("steps")
    curve = curve_of(reports, best, kept.step, written.get("epochs"), steps)
    write_atomic(RunPaths(aside).metrics, "".join(f"{dump_json(line)}\n" for line in curve).encode())
    with storage_errors(f"write {directory}"):
        shutil.rmtree(directory, ignore_errors=True)
        aside.replace(directory)
