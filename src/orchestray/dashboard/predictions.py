"""The planner's predictions beside what the runs took."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestray.dashboard.follow import signature_of
from orchestray.dashboard.listing import Library, part, read_yaml
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.directory import RunPaths, read_result

_DEGREES = ("data", "tensor", "pipeline")


def predictions(library: Library) -> list[dict[str, Any]]:
    """Return a row for each run that was predicted: name, scheme, and seconds of a step, predicted and measured."""
    rows = []
    for entry in library.entries().values():
        if entry.kind == "run":
            files = (signature_of(entry.path / name) for name in ("result.json", "config.yaml"))
            if (row := _row(entry.path, *files)) is not None:
                rows.append({"name": entry.name, **row})
    return rows


@lru_cache(maxsize=4096)
def _row(path: Path, *_files: object) -> dict[str, Any] | None:
    """Return the row of a run without its name; None: it has no prediction. The files are read when they change."""
    try:
        result = read_result(RunPaths(path))
    except OrchestrayError:
        return None
    predicted = part(result or {}, "predicted")
    predicted_s, measured_s = (_seconds(predicted.get(key)) for key in ("step_s", "measured_step_s"))
    if predicted_s is None or measured_s is None:
        return None
    interval = predicted.get("interval_s")
    return {
        "scheme": _scheme(read_yaml(path / "config.yaml")),
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "interval_s": interval if isinstance(interval, list) and len(interval) == 2 else None,
    }


def _seconds(value: object) -> float | None:
    return value if isinstance(value, int | float) and value > 0 else None


def _scheme(config: dict[str, Any]) -> str:
    """Return a config's scheme in a few words."""
    strategy = part(config, "strategy")
    network, exchange = part(strategy, "network"), part(strategy, "exchange")
    sizes = [f"{name} {network[name]}" for name in _DEGREES if isinstance(network.get(name), int) and network[name] > 1]
    compression = part(strategy, "compression").get("type", "none")
    words = [*sizes, exchange.get("type") if sizes else "one process", compression if compression != "none" else None]
    return ", ".join(str(word).replace("_", " ") for word in words if word)
