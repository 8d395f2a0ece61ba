"""The pages on searches name every method, with what it promises, and every space with its arguments."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orchestray.platform.config.yaml_text import read
from orchestray.search.registry.methods import METHODS as REGISTRY
from orchestray.search.spaces.registry import SPACES
from support.method_cases import CASES

DOCS = Path(__file__).resolve().parents[2] / "docs"
METHODS_PAGE = (DOCS / "explanation" / "search-methods.md").read_text(encoding="utf-8")
SPACES_PAGE = (DOCS / "how-to" / "architecture-search.md").read_text(encoding="utf-8")
METHODS = [REGISTRY.params(name) for name in REGISTRY]


def type_of(section: type[BaseModel]) -> str:
    """Return the `type` of a section."""
    (name,) = section.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    return str(name)


def row(page: str, name: str) -> list[str]:
    """Return the cells of the first row of a page that begins with a name, without the name."""
    found = re.search(rf"^\| `{re.escape(name)}` \| (.*) \|$", page, flags=re.MULTILINE)
    assert found is not None, f"{name} has no row"
    return found[1].split(" | ")


def told(cell: str) -> dict[str, Any]:
    """Return the keys of a cell with their defaults; `...` where one is required."""
    given = dict.fromkeys(re.findall(r"`(\w+)` \(required\)", cell), ...)
    for code in re.findall(r"`(\w+: [^`]+)`", cell):
        given |= read(code)
    return given


def plain(value: Any) -> Any:
    """Return a default as YAML has it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    return json.loads(json.dumps(value))


def test_the_reference_names_the_methods_that_need_no_number_of_trials() -> None:
    meaning = row((DOCS / "reference" / "config-search.md").read_text(encoding="utf-8"), "trials")[-1]
    assert set(re.findall(r"`(\w+)`", meaning)) == {name for name in REGISTRY if REGISTRY.params(name).counts_itself}


WHERE: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "yes": lambda given: True,
    "no": lambda given: False,
    "if `synchronous`": lambda given: given["synchronous"],
    "if `synchronous` or `packed`": lambda given: given["synchronous"] or given["packed"],
    "with one controller": lambda given: given["controllers"] == 1,
}
"""Meaning of the column *same*, as a condition on a method's keys."""


@pytest.mark.parametrize("method", METHODS, ids=type_of)
def test_the_column_same_says_which_methods_are_order_free_and_those_are_held_to_it(method: type[BaseModel]) -> None:
    name = type_of(method)
    said = row(METHODS_PAGE, name)[0]
    defaults = {key: field.get_default(call_default_factory=True) for key, field in method.model_fields.items()}
    changes: list[dict[str, Any]] = [{}, *({key: True} for key in re.findall(r"`(\w+)`", said))]
    changes += [{"controllers": 3}] if "controller" in said else []
    cases = [case for case in CASES.values() if case.method == name]
    for case in cases:
        for change in changes:
            given = defaults | dict(case.parameters) | change
            assert case.make(**change).is_order_free == WHERE[said](given), change
    assert said == "no" or any(case.make().is_order_free for case in cases), "no case would show that it is not"


@pytest.mark.parametrize("space", SPACES)
def test_every_space_is_documented_with_its_arguments_and_defaults(space: str) -> None:
    module, _, name = SPACES[space].partition(":")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    required = {one.name: ... for one in parameters if one.default is one.empty}
    assert told(row(SPACES_PAGE, space)[0]) == required | {
        one.name: plain(one.default) for one in parameters if one.name not in required
    }
