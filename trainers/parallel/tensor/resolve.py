"""The way from a written plan to the styles of modules."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.base import STYLES

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Plan

_SHOWN = 12
_WHOLE = "whole"
"""Style that excludes a module from a pattern."""


def resolve_plan(model: nn.Module, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the styles of each module that a plan names, in the model's order.

    A key is a module's name or a pattern (`blocks.*.feed_forward_input`). A name takes precedence over a pattern, a
    later pattern over an earlier one. A value is a style, several joined by a plus, or "whole".

    Raises:
        ConfigError: names, patterns or styles do not exist; one sentence for each.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    first = {id(module): name for name, module in reversed(modules)}
    called = {name: first[id(module)] for name, module in modules}
    """Maps each name of a module (it may occur twice) to its first name."""
    called.update({key: key for key in plan if _is_range(key) and key.rpartition(".")[0] in called})
    names = list(called)
    problems: list[str] = []
    styles: dict[str, str] = {}
    patterns = [key for key in plan if _is_pattern(key) and key not in names]
    for key in [*patterns, *(key for key in plan if key not in patterns)]:
        value = plan[key]
        problems += _style_problems(key, value)
        found = [name for name in names if fnmatchcase(name, key)] if key in patterns else [key]
        if not found or found[0] not in names:
            problems.append(_unknown_module(key, names))
        else:
            styles.update({called[name]: value for name in found})
    if problems:
        raise ConfigError(problems)
    return {name: _styles(styles[name]) for name in names if styles.get(name, _WHOLE) != _WHOLE}


def _is_range(key: str) -> bool:
    """Return True for a range of an `nn.Sequential`'s children: `features.0:5`."""
    return ":" in key.rpartition(".")[2]


def _is_pattern(key: str) -> bool:
    return any(character in key for character in "*?[")


def _styles(value: str) -> tuple[str, ...]:
    return tuple(style.strip() for style in value.split("+"))


def _style_problems(key: str, value: object) -> list[str]:
    if not isinstance(value, str):
        return [f"The plan of splitting gives {key!r} {value!r}, which is not a style; styles are {_listed(STYLES)}."]
    if value == _WHOLE:
        return []
    return [
        f"The plan of splitting gives {key!r} the style {style!r}, which there is not{_nearest(style, list(STYLES))}; "
        f"there are {_listed(STYLES)}."
        for style in _styles(value)
        if style not in STYLES
    ]


def _unknown_module(key: str, names: list[str]) -> str:
    there = [name for name in names if name]
    what = "pattern" if _is_pattern(key) else "module"
    if what == "pattern":
        return f"The plan of splitting has the pattern {key!r}, which fits no module; the model has {_listed(there)}."
    return (
        f"The plan of splitting names the module {key!r}, which the model does not have{_nearest(key, there)}; it has "
        f"{_listed(there)}."
    )


def _nearest(word: str, there: list[str]) -> str:
    close = get_close_matches(word, there, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _listed(words: object) -> str:
    every = list(words)  # type: ignore[call-overload]
    shown = ", ".join(every[:_SHOWN])
    return f"{shown} and {len(every) - _SHOWN} more" if len(every) > _SHOWN else shown or "no parts"
