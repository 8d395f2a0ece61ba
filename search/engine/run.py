"""A search from its config to its best run, on Ray."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster.cluster import connect, prepare
from orchestray.platform.config.dump import dump_yaml
from orchestray.platform.config.search.gangs import most_workers
from orchestray.platform.config.search.trial import trial_config
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.platform.run.directory import RunPaths, read_result
from orchestray.platform.run.files import dump_json, storage_errors, write_atomic
from orchestray.platform.run.metrics import read_lines
from orchestray.search.engine.conductor import Conductor
from orchestray.search.engine.crowd import cores_of
from orchestray.search.engine.director import SearchError
from orchestray.search.engine.going_on import director_of
from orchestray.search.engine.objective import Objective, Objectives
from orchestray.search.engine.orders import GANG, ORDINARY, Rules
from orchestray.search.engine.scarcity import Scarcity
from orchestray.search.engine.state_files import StateFiles
from orchestray.search.records.curve import curve_of
from orchestray.search.records.lines import SearchOutcome, TrialChange

if TYPE_CHECKING:
    import threading

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.platform.config.search.schema import SearchConfig
    from orchestray.search.engine.director import Director
    from orchestray.search.engine.orders import Order, Told
    from orchestray.search.engine.tuning import Stage
    from orchestray.search.records.paths import SearchPaths
    from orchestray.search.records.writer import SearchRecords

_LEAVE_S = 600.0
"""How long an idle process may take to write the run of the best, where it need not train it again."""
_LEAVE_STOPPED_S = 10.0
"""The same, of whatever it does, once the search was stopped."""


def run_search(
    config: SearchConfig,
    records: SearchRecords,
    *,
    director: Director | None = None,
    address: str | None = None,
    resume: bool = False,
    stop: threading.Event | None = None,
    on_change: Callable[[TrialChange], None] = lambda _change: None,
    notify: Callable[[str], None] = lambda _text: None,
    save_every_s: float = 10.0,
) -> SearchOutcome:
    """Run a search to its end, and leave the run of its best trial.

    Args:
        config: of the search.
        records: of its directory, which is open.
        director: of the search, which has made the calls of the journal again; default: it is made here.
        address: as of `platform.cluster.connect`.
        resume: go on from where the journal ends.
        stop: set to have it end in an orderly way: what runs writes its state.
        on_change: told how a trial stands whenever that changes.
        notify: told, in a sentence, what its user should know.
        save_every_s: seconds between two writings of the state of a trial under way; 0: after each report.

    Returns:
        How it ended: `failed` if every trial has failed, `interrupted` if it was stopped.

    Raises:
        ConfigError: the method cannot search this space, or the objective is not reported.
        OrchestrayError: the search cannot go on.
    """
    prepare(address)
    objectives = Objectives([Objective(one.metric, str(one.mode)) for one in config.search.objective])
    files = StateFiles(records.paths.trial_states)
    if resume:
        files.remove_remains()
    else:
        files.clear()

    def make_config(changes: Mapping[str, Any], genome: Any, steps: int, trial: int) -> TrainConfig:
        return trial_config(config, changes, genome, steps, trial=trial)

    conductor = Conductor(
        director or director_of(config, records.journal),
        make_config,
        objectives,
        records,
        files,
        parallel=config.search.parallel,
        on_change=on_change,
    )
    budget, resources = config.search.budget, config.base.resources
    rules = Rules(
        objectives,
        str(records.paths.trial_states.absolute()),
        save_every_s,
        budget.trial_time_limit_s,
        budget.trial_memory_mb,
        resources.num_threads,
    )
    deadline_s = math.inf if budget.time_limit_s is None else time.monotonic() + budget.time_limit_s - records.seconds
    if conductor.is_over:
        return _finish(conductor, records, rules, None, stop, is_stopped=False)
    cluster = connect(address)
    from orchestray.platform.gang.pool import make_room  # brings Ray, which looks for its token when it comes

    make_room(cluster)  # what this process trained before may hold every CPU
    rules = replace(rules, cpus_per_worker=share_of_cpus(config, cluster))
    with contextlib.ExitStack() as stack:
        stage = _stage(config, conductor, rules, cluster, stack)
        is_stopped = _carry_out(stage, _scarcity(config, cluster, notify), stop, deadline_s)
        if not is_stopped and not conductor.is_over:
            conductor.suspend()
        return _finish(conductor, records, rules, stage, stop, is_stopped=is_stopped)


def _carry_out(stage: Stage, scarcity: Scarcity, stop: threading.Event | None, deadline_s: float) -> bool:
    """Go on until nothing is left to do, the search is stopped, or its time is up; returns whether it was stopped."""
    while stage.step():
        scarcity.look(is_under_way=stage.is_under_way, has_place=stage.has_place)
        is_stopped = stop is not None and stop.is_set()
        if is_stopped or time.monotonic() > deadline_s:
            stage.halt()
            return is_stopped
    return False


def _scarcity(config: SearchConfig, cluster: Cluster, notify: Callable[[str], None]) -> Scarcity:
    """Looks after the places of the search's processes, and says what they ask for and what is free."""
    from orchestray.platform.gang import placement

    def say() -> None:
        text = placement.no_place_in_time(cluster, *_asked(config, cluster))
        notify(f"no trial is under way: the search waits for room. {text}")

    return Scarcity(say, patience_s=placement.PLACEMENT_TIMEOUT_S)


def _stage(
    config: SearchConfig, conductor: Conductor, rules: Rules, cluster: Cluster, stack: contextlib.ExitStack
) -> Stage:
    """The processes for the trials, which `stack` ends.

    A trial of one process is counted against what the cluster has; one of several workers has a placement group, with
    a bundle for each of them, that its own process (which keeps their checkpoints) shares.
    """
    from orchestray.search.engine.processes import Processes

    parallel, total = config.search.parallel, cluster.resources()
    num_workers = most_workers(config.base, config.search.space)
    is_nested = num_workers > 0
    num_places, bundle = _asked(config, cluster)
    for name, amount in bundle.items():
        if amount * num_places > total.get(name, 0.0) + 1e-6:
            raise ClusterError(
                f"A trial of {num_places} worker(s) asks for {amount:g} {name} each, and the cluster has "
                f"{cluster.describe()}. Ask for fewer workers (base.strategy.network) or less for each "
                "(base.resources)."
            )
    processes = stack.enter_context(Processes(rules.num_threads))
    first: list[Order] = []
    if not is_nested:
        room = min(int(total.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount)
        room = min(room, max(1, int(cores_of(total))))
        while len(first) < min(parallel, room) and (order := conductor.begin()) is not None:
            first.append(order)
        processes.start_early(first, bundle)
    from orchestray.search.engine.tuning import Stage  # takes a second, in which they start

    bundles = [{}, *[bundle] * num_workers] if is_nested else [bundle]
    return stack.enter_context(
        Stage(
            conductor,
            rules,
            processes,
            parallel=parallel,
            bundles=bundles,
            total=None if is_nested else total,
            first=first,
        )
    )


def _asked(config: SearchConfig, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """Places that a trial asks for, and what each of them has."""
    gpus = config.base.resources.gpus_per_worker
    bundle = {"CPU": share_of_cpus(config, cluster), **({"GPU": gpus} if gpus else {})}
    return max(1, most_workers(config.base, config.search.space)), bundle


def share_of_cpus(config: SearchConfig, cluster: Cluster) -> float:
    """CPUs of each worker of a trial: on a cluster of our own more of them than cores is a choice of the user's."""
    resources = config.base.resources
    workers = max(1, most_workers(config.base, config.search.space)) * config.search.parallel
    if not cluster.owned:
        return resources.cpus_per_worker
    fair = math.floor(cluster.resources().get("CPU", 1.0) / workers * 1000) / 1000
    return min(resources.cpus_per_worker, fair)


def _finish(
    conductor: Conductor,
    records: SearchRecords,
    rules: Rules,
    stage: Stage | None,
    stop: threading.Event | None,
    *,
    is_stopped: bool,
) -> SearchOutcome:
    kept = conductor.best()
    if kept is None and conductor.is_over and not is_stopped and conductor.num_good:
        raise SearchError(
            f"{conductor.num_good} trials have ended well, and the files with their states are lost or damaged: there "
            "is no run of the best. trials.jsonl has what each came to; train the best of them anew with its config."
        )
    if kept is not None and not (is_stopped and kept.is_lost):  # who stops a search does not wait for a training
        with contextlib.suppress(OrchestrayError) if is_stopped else contextlib.nullcontext():
            is_stopped |= not _leave_best(conductor, records.paths, rules, stage, stop)
    elif not is_stopped and conductor.is_over and conductor.first_error is not None:
        return SearchOutcome("failed", error=f"Every trial failed; the first: {conductor.first_error}")
    best = None if kept is None else conductor.best_trial(kept)
    if is_stopped:
        return SearchOutcome("interrupted", best=best)
    if conductor.is_over:  # else what is under way goes on if there is more time; the best is wanted in either case
        conductor.states.clear(kept)
    return SearchOutcome("succeeded", best=best)


def _leave_run_here(order: Order, directory: Path, rules: Rules) -> Told:
    """Have this process write a trial's run."""
    from orchestray.platform.config.schema import Strategy
    from orchestray.search.engine.host import TrialHost

    config, alone = order.config, order
    assert config is not None
    if order.program == GANG:  # no places for workers here: the same weights, as one process has them
        alone = replace(order, program=ORDINARY, config=config.model_copy(update={"strategy": Strategy()}))
    host = TrialHost(rules)
    try:
        told = host.leave_run(alone, str(directory))
    finally:
        host.close()
    if told.error is None and alone is not order:
        write_atomic(directory / "config.yaml", dump_yaml(config).encode())
    return told


def _gives_up(stop: threading.Event | None, *, has_to_train: bool) -> Callable[[], bool]:
    """Whether a process has, by now, been at the run of the best for too long."""
    began_s = time.monotonic()

    def is_given_up() -> bool:
        is_stopped = stop is not None and stop.is_set()
        limit_s = _LEAVE_STOPPED_S if is_stopped else math.inf if has_to_train else _LEAVE_S
        return time.monotonic() - began_s > limit_s

    return is_given_up


def _leave_best(
    conductor: Conductor, paths: SearchPaths, rules: Rules, stage: Stage | None, stop: threading.Event | None
) -> bool:
    """Write `best/`: by an idle process if there is one, else here; returns whether it is written.

    It is not where it would have to be trained again and the search was stopped meanwhile.
    """
    kept, directory = conductor.best(), paths.best
    assert kept is not None
    order = conductor.order_for_best(kept)
    folder = Path(rules.directory)  # whoever is killed meanwhile leaves the last one whole
    aside = folder / directory.name
    shutil.rmtree(aside, ignore_errors=True)
    told = None
    if stage is not None:
        told = stage.leave_run(order, aside, _gives_up(stop, has_to_train=kept.is_lost))
    if told is None:
        if kept.is_lost and stop is not None and stop.is_set():
            return False
        aside = folder / f"again-{directory.name}"  # a process that was given up need not be dead yet
        shutil.rmtree(aside, ignore_errors=True)
        told = _leave_run_here(order, aside, rules)
    if told.error is not None:
        raise OrchestrayError(f"The run of the best trial ({kept.trial}) could not be written: {told.error}")
    # Who writes it has built the network from its weights alone, and has not seen it learn.
    epochs = (read_result(RunPaths(aside)) or {}).get("epochs")
    curve = curve_of(read_lines(paths.reports), conductor.best_trial(kept), kept.step, epochs)
    write_atomic(RunPaths(aside).metrics, "".join(f"{dump_json(line)}\n" for line in curve).encode())
    with storage_errors(f"write {directory}"):
        shutil.rmtree(directory, ignore_errors=True)
        aside.replace(directory)
    return True
