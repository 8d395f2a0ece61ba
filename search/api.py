"""The Python interface of searches (`orchestray.search`): from a config to the best run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, Interrupted, OrchestrayError, RunNameError, TrainingError
from orchestray.platform.process.stopping import Asked, stop_on_signals
from orchestray.platform.run.metrics import read_lines
from orchestray.platform.terminal.format import number
from orchestray.search.config.load import (
    SearchSource,
    dump_search_yaml,
    load_search_config,
)
from orchestray.search.config.resume import search_differences
from orchestray.search.display import SearchProgress, SearchView
from orchestray.search.engine.earlier import check_earlier
from orchestray.search.engine.resume import session_of
from orchestray.search.registry.check import check_method, space_of
from orchestray.search.results.figures import best_line, front_of
from orchestray.search.results.paths import is_search
from orchestray.search.results.report import bounds_text, goals_of, objectives_text, report_html
from orchestray.search.results.run import SearchRun, load_search
from orchestray.search.results.schema import OUT_OF_TIME, SearchOutcome, is_untrained
from orchestray.search.results.writer import SearchRecords
from orchestray.search.spaces.registry import text_of
from orchestray.trainers.validate.refuse import check_layout

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig
    from orchestray.search.engine.session import MethodSession

_STATUSES = ("succeeded", "stopped", "failed")
_MAX_NAMED = 10
"""Trials that a sentence names; it counts the others."""


def search(
    source: SearchSource,
    *,
    overrides: Sequence[str] = (),
    runs_dir: str | os.PathLike[str] = "runs",
    name: str | None = None,
    address: str | None = None,
    resume: bool = False,
    quiet: bool = True,
) -> SearchRun:
    """Search hyper-parameters or architectures on Ray, and return the finished search.

    Args:
        source: path of a YAML file, a mapping, or a `SearchConfig`.
        overrides: `key.path=value`, applied after loading.
        runs_dir: directory for run directories; the search's is `<runs_dir>/<name>`.
        name: name of the search, overriding the config's.
        address: Ray cluster to work on; default: the one this process is connected to, RAY_ADDRESS, or a new local one.
        resume: True to continue the search of that name: finished trials are neither lost nor repeated.
        quiet: True to hide the progress display.

    Raises:
        ConfigError: the config is wrong; every problem is listed.
        RunNameError: the name is in use, or with `resume` no search has it.
        Interrupted: Ctrl-C or SIGTERM; results so far are kept.
        OrchestrayError: the search failed (for example, all its trials did); `result.json` holds the same text.
    """
    config = load_search_config(source, overrides, name=name)
    label = os.fspath(source) if isinstance(source, str | os.PathLike) else "config"
    check_layout(config.base, label=f"{label}: base")
    cautions = check_method(config, label=label)
    if config.search.callbacks:
        from orchestray.search.engine.callbacks import check_callbacks  # late: it is slow to load

        check_callbacks(config.search.callbacks)
    if not resume:
        cautions = [*cautions, *check_earlier(config, label=label)]
        with SearchRecords.create(runs_dir, config.name) as records:
            session = session_of(config, records.journal)
            return _attempt(config, records, session, address, quiet, resume=False, cautions=cautions)
    with _existing(runs_dir, config.name) as records:
        previous = load_search_config(records.paths.config, look_at_task=False)
        if records.journal.entries() and (differences := search_differences(previous, config)):
            raise ConfigError(
                [f"{records.paths.config}: a resumed search may not change {difference}" for difference in differences]
            )
        result = records.directory.read_result()
        if result is not None and result.get("status") == "succeeded" and _same_budget(previous, config):
            if not records.paths.report.is_file():  # the disk was full when all else was written
                _write_report(config, records, result)
            with _progress(config, records, quiet) as progress:
                progress.finish(result)
            return load_search(records.paths.path)
        # First, so that a method which rejects its journal leaves the search unchanged.
        session = session_of(config, records.journal, previous=previous)
        return _attempt(config, records, session, address, quiet, resume=True)


def _code_notes(config: SearchConfig, records: SearchRecords) -> list[str]:
    """Keep the user's files as the search goes on with them, and return a sentence on those that have changed."""
    from orchestray.trainers.config.settings import ReplicaSettings  # late: these are slow to load
    from orchestray.trainers.driver.runlog.kept_code import changed_code, names_of

    settings = ReplicaSettings.from_config(config.base, storage="", model_directory="")
    if not (changed := changed_code(records.directory, settings)):
        return []
    text = f"the search goes on with other code than it was begun with: {names_of(changed)} changed since"
    return [f"{text}, so earlier trials cannot be compared with later ones"]


def _existing(runs_dir: str | os.PathLike[str], name: str) -> SearchRecords:
    path = os.path.join(runs_dir, name)  # noqa: PTH118 - either kind of path
    if os.path.isdir(path) and not is_search(path):  # noqa: PTH112
        raise RunNameError(f"'{name}' ({path}) is no search: there is nothing to go on with; choose another name")
    return SearchRecords.open_existing(runs_dir, name)


def _same_budget(previous: SearchConfig, config: SearchConfig) -> bool:
    before, now = previous.search.budget, config.search.budget
    return (before.trials, before.time_limit_s) == (now.trials, now.time_limit_s)


def _progress(config: SearchConfig, records: SearchRecords, quiet: bool) -> SearchProgress:
    view = SearchView(config.name, goals_of(config)[0], config.search.budget.trials)
    view.begin_with(records.lines)
    return SearchProgress(view, directory=records.paths.path, quiet=quiet)


def _attempt(
    config: SearchConfig,
    records: SearchRecords,
    session: MethodSession,
    address: str | None,
    quiet: bool,
    *,
    resume: bool,
    cautions: Sequence[str] = (),
) -> SearchRun:
    """Run the engine, and write a result and a report in any case."""
    records.write_config(dump_search_yaml(config))
    records.remove_result()
    stop, asked = threading.Event(), Asked()
    with _progress(config, records, quiet) as progress:
        progress.event(f"objective: {objectives_text(config)}")
        for caution in cautions:
            progress.event(f"note: {caution}")
        try:
            with stop_on_signals(stop.set, progress.event, meanwhile="keeping what was found", asked=asked):
                # These imports take seconds: a search interrupted meanwhile can be resumed, too.
                for caution in _code_notes(config, records):
                    progress.event(f"note: {caution}")
                from orchestray.search.engine.run import run_search

                outcome = run_search(
                    config,
                    records,
                    session=session,
                    address=address,
                    resume=resume,
                    stop=stop,
                    on_change=progress.change,
                    notify=lambda text: progress.event(f"note: {text}"),
                    said=progress.said,
                )
        except KeyboardInterrupt:
            _close(config, records, progress, SearchOutcome("interrupted"))
            raise Interrupted("Interrupted; what was found is kept. Go on with --resume.", asked.number) from None
        except OrchestrayError as raised:
            _close(config, records, progress, SearchOutcome("failed", error=str(raised)))
            raise
        except BaseException as raised:
            _close(config, records, progress, SearchOutcome("failed", error=f"{type(raised).__name__}: {raised}"))
            raise
        _close(config, records, progress, outcome)
    if outcome.status == "interrupted":
        raise Interrupted(
            f"Interrupted after {len(records.lines)} trials; what was found is kept. Go on with --resume.",
            asked.number,
        )
    if outcome.status == "failed":
        raise TrainingError(outcome.error or "The search failed.")
    return load_search(records.paths.path)


def result_of(config: SearchConfig, records: SearchRecords, outcome: SearchOutcome) -> dict[str, Any]:
    """Return the content of `result.json`."""
    lines = list(records.lines.values())
    best = best_line(lines, goals_of(config)[0])
    if outcome.best is not None:
        best = records.lines.get(outcome.best, best)
    counts = Counter(line["status"] for line in lines)
    return {
        **_infeasible(config, best),
        **_cut_off(lines),
        **_untrained(lines),
        **_copied(lines),
        "status": outcome.status,
        "trials": len(lines),
        "best": None if best is None else _short(config, best),
        "seconds": round(records.seconds, 3),
        "error": outcome.error,
        "counts": {status: counts[status] for status in _STATUSES},
        "steps": sum(int(line.get("steps") or 0) for line in lines),
        "unit": config.unit,
        "method": config.search.method.type,
        "parts": list(outcome.parts),
        "objectives": [{"metric": goal.metric, "mode": goal.mode} for goal in goals_of(config)],
        **outcome.more,
    }


def _infeasible(config: SearchConfig, best: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the sentence of a search in which no trial keeps all bounds, which names the nearest."""
    if best is None or best.get("feasible", True):
        return {}
    values = ", ".join(f"{name} {number(value)}" for name, value in best["constraints"].items())
    return {
        "infeasible": f"no trial is feasible, with {bounds_text(config)}; the best is that with the least violation, "
        f"trial {best['trial']}: {values}"
    }


def _untrained(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of trials that were only validated, as their networks break a bound; empty if it is 0."""
    count = sum(map(is_untrained, lines))
    return {"untrained": count} if count else {}


def _copied(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number and bytes of the states that trials have taken over from others; empty if there are none."""
    copies, copied_bytes = (sum(int(line.get(name) or 0) for line in lines) for name in ("copies", "copied_bytes"))
    return {"copies": copies, "copied_bytes": copied_bytes} if copies else {}


def _cut_off(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the sentence of a search whose time limit has ended trials on their way, which names them."""
    ended = [line for line in lines if line.get("reason") == OUT_OF_TIME]
    if not ended:
        return {}
    silent = [line for line in ended if line.get("objective") is None]
    missing = f"the values of {_numbers(silent)} are missing: no report before the limit; " if silent else ""
    return {
        "cut_off": f"search.budget.time_limit_s ended {_numbers(ended)} early; {missing}"
        "raise it and go on with --resume to train them to their end"
    }


def _numbers(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return for example `trials 3, 5`; the first few of many."""
    numbers = sorted(int(line["trial"]) for line in lines)
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_MAX_NAMED]))}{more}"


def _short(config: SearchConfig, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial as `best` of the result, with a readable description of its network."""
    names: tuple[str, ...] = (
        "trial",
        "objective",
        "objectives",
        "config",
        "genome",
        "parameters",
        "flops",
        "latency_ms",
    )
    names += ("constraints", "feasible", "violation")
    summary = {name: line[name] for name in names if name in line}
    summary["config"] = line.get("best_config", summary.get("config"))
    if (genome := summary.get("genome")) is not None and (space := space_of(config)) is not None:
        summary["network"] = text_of(space, genome)
    return summary


def _close(config: SearchConfig, records: SearchRecords, progress: SearchProgress, outcome: SearchOutcome) -> None:
    """Write the result and the report; if the search failed, a storage error must not hide the reason."""
    result = result_of(config, records, outcome)
    with contextlib.suppress(OrchestrayError) if outcome.status == "failed" else contextlib.nullcontext():
        records.flush()
        goals, lines = goals_of(config), list(records.lines.values())
        if len(goals) > 1:
            records.write_pareto(front_of(lines, goals))
        records.write_result(result)
        _write_report(config, records, result)
    progress.finish({**result, "error": None})  # the error has been shown separately


def _write_report(config: SearchConfig, records: SearchRecords, result: Mapping[str, Any]) -> None:
    nodes, reports = read_lines(records.paths.lineage_log), read_lines(records.paths.reports)
    records.write_report(report_html(config, result, list(records.lines.values()), reports, nodes))
