"""What a resumed run may change."""

from __future__ import annotations

from typing import Any

from orchestray.platform.config.problems import shown
from orchestray.platform.config.schema import TrainConfig

_FREE = ("strategy", "resources", "engine", "checkpoint", "max_restarts", "allow_faults", "faults")
_MAY_GROW = ("train.epochs", "train.steps", "train.time_limit_s")


def resume_differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """The keys in which a resumed run's config differs from the saved one although they may not differ.

    A run may go on under another strategy, with other resources, and for longer; whatever else were to change would
    make it another run.

    Returns: a text each, "train.batch_size (was 64, now 32)"; empty if the run may go on.
    """
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    differences = []
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was == now or path.partition(".")[0] in _FREE:
            continue
        kind = f"{path.rpartition('.')[0]}.type"
        if path != kind and before.get(kind) != after.get(kind):
            continue  # the keys that another type brings, or takes along
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
    """Nested mappings as dotted keys; lists are values. A mapping that is empty is one too."""
    if not isinstance(data, dict) or not data:
        return {path: data}
    return {
        key: value
        for name, item in data.items()
        for key, value in flat(item, f"{path}.{name}" if path else str(name)).items()
    }
