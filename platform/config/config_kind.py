"""A check of the kind of a config file, so that a command that gets another kind names the right command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.platform.errors import ConfigError

_MARKS = {"training": {"task", "train"}, "search": {"base", "search"}, "endpoint": {"models"}}
"""Top-level keys that only a config of this kind has."""

_COMMANDS = {
    ("search", "training"): "run it with: orchestray search {label}",
    ("endpoint", "training"): "start it with: orchestray serve {label}",
    ("training", "search"): "run it with: orchestray train {label}; or name it as the base of a search",
    ("endpoint", "search"): "start it with: orchestray serve {label}",
    ("training", "endpoint"): "what is served is its run: orchestray train {label}, then orchestray serve runs/{name}",
    ("search", "endpoint"): "what is served is its best run: orchestray search {label}, "
    "then orchestray serve runs/{name}",
}
"""Advice by the kind of the config and the kind that was expected."""


def refuse_another_kind(data: Mapping[str, Any], wanted: str, *, label: str) -> None:
    """Raise an error if plain data is a config of another kind than `wanted`; other errors are left to the schema.

    Args:
        data: data as read, before overrides of the command line.
        wanted: "training", "search" or "endpoint".
        label: file name for the message.

    Raises:
        ConfigError: the data has keys of exactly one other kind, and none of the expected kind.
    """
    kinds = [kind for kind, marks in _MARKS.items() if marks & data.keys()]
    if len(kinds) != 1 or kinds[0] == wanted:
        return
    article = {"training": "a", "search": "a", "endpoint": "an"}
    advice = _COMMANDS[kinds[0], wanted].format(label=label, name=data.get("name", "NAME"))
    raise ConfigError(
        f"{label}: is the config of {article[kinds[0]]} {kinds[0]}, and that of {article[wanted]} {wanted} "
        f"was wanted; {advice}"
    )
