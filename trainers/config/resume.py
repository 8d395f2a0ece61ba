"""The config changes that are allowed when a run is resumed."""

from __future__ import annotations

from typing import Any

from orchestray.platform.config.problems import shown
from orchestray.trainers.config.schema import TrainConfig

_FREE = (
    "strategy",
    "resources",
    "engine",
    "checkpoint",
    "max_restarts",
    "hang_timeout_s",
    "report_hang_s",
    "trackers",
    "stall_timeout_s",
    "allow_faults",
    "faults",
)
_MAY_GROW = ("train.epochs", "train.steps", "train.time_limit_s")


def resume_differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Return the changed keys of a resumed run's config that must not change.

    A run may be resumed with another strategy, with other resources, and for longer. Any other change would make it a
    different run.

    Args:
        old: saved config of the run.
        new: config to resume the run with.

    Returns:
        A text for each key, such as "train.batch_size (was 64, now 32)"; an empty list if the run may be resumed.
    """
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    differences = []
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was == now or path.partition(".")[0] in _FREE:
            continue
        kind = f"{path.rpartition('.')[0]}.type"
        if path != kind and before.get(kind) != after.get(kind):
            continue  # a change of type adds and removes its own keys
        if path not in _MAY_GROW:
            differences.append(f"{path} (was {shown(was)}, now {shown(now)})")
        elif not _grows(path, was, now):
            differences.append(f"{path} (was {shown(was)}, now {shown(now)}; it may only be raised)")
    return differences


def _grows(path: str, was: Any, now: Any) -> bool:
    if was is None or now is None:
        return path == "train.time_limit_s" and now is None  # no limit is the highest one
    return bool(now > was)


def flat(data: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; lists and empty mappings are values."""
    if not isinstance(data, dict) or not data:
        return {path: data}
    return {
        key: value
        for name, item in data.items()
        for key, value in flat(item, f"{path}.{name}" if path else str(name)).items()
    }
