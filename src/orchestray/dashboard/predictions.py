"""The planner's predictions beside what the runs took."""

from __future__ import annotations

from typing import Any

from orchestray.dashboard.listing import Library, part, read_yaml
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.directory import RunPaths, read_result

_DEGREES = ("data", "tensor", "pipeline")


def predictions(library: Library) -> list[dict[str, Any]]:
    """Return a row for each run that was predicted: name, scheme, and seconds of a step, predicted and measured."""
    rows = []
    for entry in library.entries().values():
        try:
            result = read_result(RunPaths(entry.path)) if entry.kind == "run" else None
        except OrchestrayError:
            continue
        predicted = part(result or {}, "predicted")
        predicted_s, measured_s = (_seconds(predicted.get(key)) for key in ("step_s", "measured_step_s"))
        if predicted_s is None or measured_s is None:
            continue
        interval = predicted.get("interval_s")
        row: dict[str, Any] = {"name": entry.name, "scheme": _scheme(read_yaml(entry.path / "config.yaml"))}
        row |= {"predicted_s": predicted_s, "measured_s": measured_s, "error": predicted_s / measured_s - 1}
        rows.append(row | {"interval_s": interval if isinstance(interval, list) and len(interval) == 2 else None})
    return rows


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
