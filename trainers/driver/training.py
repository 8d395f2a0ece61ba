"""The way from a config to a trained run: opens the run directory, runs the engine, writes the result."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.cluster.cluster import connect, prepare
from orchestray.platform.errors import ConfigError, Interrupted, OrchestrayError
from orchestray.platform.process.stopping import Asked, stop_on_signals
from orchestray.platform.run.checkpoint_files import checkpoint_steps
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.run.store import open_store
from orchestray.platform.run.writer import RunWriter
from orchestray.platform.terminal.progress import Progress
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.modes import goals_text
from orchestray.trainers.config.resource_checks import unused_gpus
from orchestray.trainers.config.resume import resume_differences
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.driver.runlog.kept_code import keep_code
from orchestray.trainers.driver.runlog.kill_schedule import still_to_happen
from orchestray.trainers.driver.runlog.result import failed, result_of, timeline_of
from orchestray.trainers.driver.runlog.run_log import RunLog, RunProgress
from orchestray.trainers.driver.runlog.scale_requests import ScaleRequests
from orchestray.trainers.optim.batch_sizes import scaled_lr
from orchestray.trainers.trackers.feed import Feeds
from orchestray.trainers.trackers.registry import makers
from orchestray.trainers.validate.refuse import check_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestray.trainers.saved.run import Run
    from orchestray.trainers.trackers.base import Tracker

Source = str | os.PathLike[str] | Mapping[str, Any] | TrainConfig


def train(
    source: Source,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    address: str | None = None,
    resume: bool = False,
    quiet: bool = True,
    started_at: float | None = None,
) -> Run:
    """Train under the scheme of a config, on Ray; return the finished run.

    Args:
        source: path of a YAML file, a mapping, or a `TrainConfig`.
        overrides: `key.path=value`, applied after loading.
        runs_dir: directory in which run directories are created; the run's is `<runs_dir>/<name>`.
        name: name that replaces the config's.
        address: Ray cluster to use; default: the one this process is connected to, RAY_ADDRESS, or a new local one.
        resume: True to continue the run of that name.
        quiet: True to show no progress display.
        started_at: wall-clock time to count from; default: now.

    Raises:
        ConfigError: the config is wrong; every problem is listed.
        RunNameError: the name is in use, or with `resume` no run has it.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
        OrchestrayError: the run failed; `result.json` holds the same text.
    """
    from orchestray.trainers.saved.run import load_run

    started_at = time.time() if started_at is None else started_at
    config = load_train_config(source, overrides, name=name)
    check_layout(config, label=os.fspath(source) if isinstance(source, str | os.PathLike) else "config")
    trackers = makers(config.trackers)
    if not resume:
        with RunDirectory.create(runs_dir, config.name, storage=config.checkpoint.storage) as directory:
            _attempt(config, directory, address, quiet, started_at, trackers, resume_from=None)
            return load_run(directory.path)
    with RunDirectory.open_existing(runs_dir, config.name, storage=config.checkpoint.storage) as directory:
        has_config = directory.paths.config.exists()  # not if it ended before it had written that, as on a full disk
        previous = load_train_config(str(directory.paths.config)) if has_config else config
        before = directory.paths.checkpoint_location(previous.checkpoint.storage)
        # Before its first step a run has nothing that another config could spoil.
        if (differences := resume_differences(previous, config)) and (
            read_lines(directory.paths.metrics) or checkpoint_steps(open_store(before))
        ):
            place = directory.paths.config
            problems = [f"{place}: a resumed run may not change {difference}" for difference in differences]
            problems[-1] += "; to start a run with that, leave out --resume and give it another --name"
            raise ConfigError(problems)
        result = directory.read_result()
        if result is not None and _is_done(previous, config, result):
            with Progress(name=config.name, directory=directory.path, quiet=quiet) as progress:
                progress.finish(result)
        else:
            _refuse_made(directory, result or {})
            _attempt(config, directory, address, quiet, started_at, trackers, resume_from=before)
        return load_run(directory.path)


def _refuse_made(directory: RunDirectory, result: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a run was made from another one: it has no checkpoint, and would begin afresh."""
    for key in ("averaged", "compressed"):
        if key in result:
            raise ConfigError(
                f"{directory.path} was made from the run {result[key]['run']} ({key}), so no training goes on "
                f"in it; to train its model, leave out --resume and set train.init_from={directory.path}"
            )


def _is_done(previous: TrainConfig, config: TrainConfig, result: Mapping[str, Any]) -> bool:
    """Return True if a run has nothing left to do: it succeeded, and its budget was not raised since."""
    if result.get("status") != "succeeded":
        return False
    before, now = previous.train, config.train
    return (before.epochs, before.steps, before.time_limit_s) == (now.epochs, now.steps, now.time_limit_s)


def _attempt(
    config: TrainConfig,
    directory: RunDirectory,
    address: str | None,
    quiet: bool,
    started_at: float,
    trackers: Sequence[tuple[str, Callable[[Path], Tracker]]],
    *,
    resume_from: str | None,
) -> None:
    """Run the engine, and leave a result whatever happens."""
    if resume_from is not None:  # a cluster that does not answer must not take the result of a run that has one
        connect(address)
    directory.write_config(dump_yaml(config))
    directory.remove_result()
    run_progress = RunProgress(started_at)
    progress = Progress(name=config.name, directory=directory.path, quiet=quiet)
    result: dict[str, Any]
    asked = Asked()
    with RunWriter(directory, clock=run_progress.now_s) as writer, progress:
        run_log = RunLog(run_progress, writer, progress)
        run_log.scale_requests = ScaleRequests(directory)
        feeds = Feeds(trackers, directory.path, progress.warn)
        feeds.start(config.model_dump(mode="json"), config.name, resumed=resume_from is not None)
        if goals := goals_text(config):
            progress.event(goals)
        if caution := unused_gpus(config.resources):
            run_log.warn("unused GPUs", caution)
        try:
            outcome = _run_engine(config, directory, address, run_log, resume_from, asked)
        except KeyboardInterrupt:
            error: BaseException = Interrupted(
                "Interrupted before a checkpoint could be saved; what was saved before is intact.", asked.number
            )
            _close(directory, writer, progress, feeds, failed(run_progress, "interrupted", str(error)))
            raise error from None
        except OrchestrayError as raised:
            status = "interrupted" if isinstance(raised, Interrupted) else "failed"
            _close(directory, writer, progress, feeds, failed(run_progress, status, str(raised)))
            raise
        except BaseException as raised:
            text = f"{type(raised).__name__}: {raised}"
            _close(directory, writer, progress, feeds, failed(run_progress, "failed", text))
            raise
        finally:
            run_log.scale_requests.close(run_progress.last_step)
        result = result_of(outcome, run_progress)
        if (scaling := config.train.lr_scaling) is not None and (optimizer := config.train.optimizer) is not None:
            result["lr"] = scaled_lr(scaling.model_dump(), optimizer.lr, config.train.batch_size)
        if (timeline := timeline_of(outcome.usage)) is not None:
            directory.write_timeline(timeline)
        writer.flush()
        if result["status"] == "succeeded" and (noted := _noted(config, directory)):
            result["predicted"] = noted
        _close(directory, writer, progress, feeds, result)
    if result["status"] == "interrupted":
        text = f"Interrupted at step {result['steps']}, with a checkpoint saved. Go on with --resume."
        raise Interrupted(text, asked.number)


def _noted(config: TrainConfig, directory: RunDirectory) -> dict[str, Any] | None:
    """Return the planner's prediction of a run beside what it took; None: this machine is not calibrated."""
    from orchestray.trainers.machine import kept

    if not kept.default_file().exists():
        return None
    from orchestray.trainers.planning.plan import note_run  # late: most machines are not calibrated

    return note_run(config, read_lines(directory.paths.metrics))


def _run_engine(
    config: TrainConfig,
    directory: RunDirectory,
    address: str | None,
    run_log: RunLog,
    resume_from: str | None,
    asked: Asked,
) -> Any:
    storage = directory.checkpoint_location
    settings = ReplicaSettings.from_config(config, storage=storage, model_directory=str(directory.paths.model))
    keep_code(directory, settings, run_log)
    directory.keep_elsewhere()
    checkpoint = None
    prepare(address)  # what finds a checkpoint imports Ray
    if resume_from is not None:
        events = read_lines(directory.paths.events)
        checkpoint = _go_on_from(resume_from, settings, directory, run_log)
        reached = 0 if checkpoint is None else int(checkpoint.step)
        settings = replace(settings, faults=still_to_happen(settings.faults, events, reached))
    stop = threading.Event()
    with (
        stop_on_signals(stop.set, run_log.progress.event, meanwhile="saving a checkpoint", asked=asked),
        contextlib.closing(run_log.output),
    ):
        cluster = connect(address)
        if stop.is_set():
            raise KeyboardInterrupt
        from orchestray.trainers.driver.control.attempt import Attempt

        attempt = Attempt.of(config, settings, cluster, run_log, checkpoint, stop)
        if config.engine == "ray_train":
            from orchestray.trainers.driver.engines.ray_train import run_in_ray_train

            return run_in_ray_train(config, attempt)
        from orchestray.trainers.driver.engines.actors import run_in_actors

        return run_in_actors(config, attempt)


def _go_on_from(before: str, settings: ReplicaSettings, directory: RunDirectory, run_log: RunLog) -> Any:
    """Find the checkpoint to continue from, and cut the metrics back to its step.

    Args:
        before: location of the run's checkpoints until now; `settings` may give another one from now on.
        settings: settings of the run as it continues.
        directory: directory of the run.
        run_log: log of the run.
    """
    from orchestray.trainers.driver.engines.driver import latest_checkpoint

    if before != settings.checkpoint_storage:
        # An attempt may die before it saves in the new place; then only this event tells later ones of the old place.
        run_log.writer.event("checkpoints_moved", before=before, now=settings.checkpoint_storage)
        run_log.writer.flush()
    moved = [line["before"] for line in read_lines(directory.paths.events) if line["event"] == "checkpoints_moved"]
    places = dict.fromkeys([settings.checkpoint_storage, before, str(directory.paths.checkpoints), *moved])
    every = [found for place in places if (found := latest_checkpoint(place, run_log)) is not None]
    found = max(every, key=lambda candidate: int(candidate.step), default=None)
    run_log.writer.truncate_after(0 if found is None else found.step)
    if found is None:
        run_log.progress.event("no checkpoint was saved: starting again from the first step")
        return None
    run_progress = run_log.run_progress
    run_progress.started_at -= float(found.state.get("seconds", 0.0))
    for line in read_lines(directory.paths.metrics):
        run_progress.is_news(line)
    run_log.record(found.state.get("lines", []))
    run_log.progress.event(f"going on from the checkpoint of step {found.step}")
    return found


def _close(
    directory: RunDirectory, writer: RunWriter, progress: Progress, feeds: Feeds, result: dict[str, Any]
) -> None:
    """Write how the run ended; a disk that refuses must not hide why the run failed."""
    with contextlib.suppress(OrchestrayError) if result["status"] == "failed" else contextlib.nullcontext():
        writer.event({"succeeded": "finished"}.get(result["status"], result["status"]), error=result["error"])
        writer.flush()
        directory.write_result(result)
    feeds.finish(result["status"])
    progress.finish({**result, "error": None})  # the error is reported separately
