"""The contents of `result.json` and of the timeline, from the outcome of the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.versions import WHAT_RAN, installed_versions

if TYPE_CHECKING:
    from orchestray.trainers.driver.runlog.run_log import RunProgress


def result_of(outcome: Any, run_progress: RunProgress) -> dict[str, Any]:
    """Return the result of a run whose replicas have ended.

    Args:
        outcome: `Outcome` of the replicas.
        run_progress: progress of the run.
    """
    interrupted = outcome.ended == "interrupted"
    return {
        **failed(run_progress, "interrupted" if interrupted else "succeeded", None),
        "steps": outcome.step,
        "epochs": outcome.epochs,
        "samples_per_s": round(outcome.samples / outcome.training_s, 3) if outcome.training_s > 0 else None,
        "final": outcome.final,
        "bytes": {"sent": outcome.bytes_sent, "dense": outcome.bytes_dense, **_links(outcome.usage)},
        "staleness": _staleness(outcome.staleness),
        "bubble": _bubble(outcome.usage),
        "memory": {"peak_bytes": outcome.memory, **_activations(outcome.usage)},
        **_busy(outcome.usage),
        **_workers(outcome.usage),
        "parts": parts_of_all(outcome.usage),
        **reports_of_all(outcome.usage),
        **_arithmetic(outcome.usage),
        **_initial(outcome.usage),
        **_retries(outcome.usage),
        **outcome.summary,
        "stopped_by": outcome.stopped_by,
    }


def parts_of_all(usage: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the classes that carried out the run in any of the processes, sorted (`trainers/core/parts.py`)."""
    return sorted({part for process in usage for part in process.get("parts", ())})


def reports_of_all(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the objects of all processes say of their work, in the order of the processes; empty if nothing."""
    reports: dict[str, list[Any]] = {}
    for process in usage:
        for name, said in process.get("reports", {}).items():
            reports.setdefault(name, []).extend(said)
    return {"reports": dict(sorted(reports.items()))} if reports else {}


def _arithmetic(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return torch's arithmetic on the first worker; empty without one that knows it."""
    found = next((worker["arithmetic"] for worker in usage if "arithmetic" in worker), None)
    return {} if found is None else {"arithmetic": found}


def _initial(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was done to the model before the first step; empty if that was nothing."""
    found = next((worker["initial"] for worker in usage if worker.get("initial")), None)
    return {} if found is None else {"initial": found}


def _links(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last attempt's bytes by link between the workers of one copy of the model; empty without links."""
    links: Counter[str] = Counter()
    for worker in usage:
        links.update(worker["bytes_by_link"])
    return {"links": dict(sorted(links.items()))} if links else {}


def _staleness(updates: Mapping[int, int]) -> dict[str, Any] | None:
    """Return the last attempt's staleness: largest, mean, and the number of updates by staleness."""
    if not updates:
        return None
    total = sum(updates.values())
    mean = sum(value * count for value, count in updates.items()) / total
    histogram = {str(value): updates[value] for value in sorted(updates)}
    return {"max": max(updates), "mean": round(mean, 6), "histogram": histogram}


def _bubble(usage: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the fraction of the workers' time in the pipeline in which none of their stages computed."""
    span_s = sum(worker["span_s"] for worker in usage)
    busy_s = sum(worker["busy_s"] for worker in usage)
    return round(1.0 - busy_s / span_s, 6) if span_s > 0 else None


def _busy(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"busy_s": [worker["busy_s"] for worker in usage]} if any(worker["span_s"] for worker in usage) else {}


def _workers(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each worker's use of time in the last attempt; parameter-server runs report it themselves."""
    return {"workers": [worker["worker"] for worker in usage]} if usage else {}


def _retries(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of reads that the workers tried again; empty without any."""
    num_retries = sum(worker.get("read_retries", 0) for worker in usage)
    return {"read_retries": num_retries} if num_retries else {}


def _activations(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    peaks = [worker["peak_activation_bytes"] for worker in usage]
    return {"peak_activation_bytes": peaks} if any(peaks) else {}


def timeline_of(usage: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the measured schedule of the last steps, with the actions of all workers."""
    steps: dict[int, list[Any]] = {}
    for worker in usage:
        for action in worker["timeline"]:
            rest = {key: value for key, value in action.items() if key != "step"}
            steps.setdefault(int(action["step"]), []).append(rest)
    return {"steps": [{"step": step, "actions": steps[step]} for step in sorted(steps)]} if steps else None


def failed(run_progress: RunProgress, status: str, error: str | None) -> dict[str, Any]:
    """Return the result of a run that has no outcome; what is not known is null.

    Args:
        run_progress: progress of the run.
        status: `succeeded`, `failed` or `interrupted`.
        error: text of the error, or None.
    """
    return {
        "status": status,
        "steps": run_progress.last_step,
        "epochs": None,
        "seconds": round(run_progress.now_s(), 3),
        "time_to_first_step_s": run_progress.first_step_s,
        "samples_per_s": None,
        "goodput": run_progress.goodput.value(run_progress.now_s(), is_recovering=run_progress.lost_at_s is not None),
        "final": None,
        "bytes": None,
        "staleness": None,
        "bubble": None,
        "memory": None,
        "restarts": run_progress.restarts,
        "stopped_by": None,
        "error": error,
        "versions": installed_versions(*WHAT_RAN),
    }
