"""docs/search.md is true and whole: every method, space, dimension and key, with its default."""

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

from orchestray.platform.config.error_location import sections_of
from orchestray.platform.config.yaml_text import read
from orchestray.search.config import schema
from orchestray.search.config.dimensions import Dimension
from orchestray.search.registry.methods import METHODS as REGISTRY
from orchestray.search.spaces.registry import SPACES
from support.method_cases import CASES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text(encoding="utf-8")
METHODS = [REGISTRY.params(name) for name in REGISTRY]
DIMENSIONS = sections_of(Dimension)
SECTIONS = {"search": schema.SearchSection, "search.budget": schema.Budget}


def type_of(section: type[BaseModel]) -> str:
    """Return the `type` of a section."""
    (name,) = section.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    return str(name)


def row(name: str) -> list[str]:
    """Return the cells of the first row that begins with a name, without the name."""
    found = re.search(rf"^\| `{re.escape(name)}` \| (.*) \|$", PAGE, flags=re.MULTILINE)
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


@pytest.mark.parametrize("method", METHODS, ids=type_of)
def test_every_method_is_documented_with_its_keys_and_defaults(method: type[BaseModel]) -> None:
    fields = {name: field for name, field in method.model_fields.items() if name != "type"}
    defaults = {name: plain(field.get_default(call_default_factory=True)) for name, field in fields.items()}
    assert told(row(type_of(method))[0]) == defaults


def test_the_row_of_trials_names_the_methods_that_need_none() -> None:
    said = row("search.budget.trials")[1]
    assert set(re.findall(r"`(\w+)`", said)) == {name for name in REGISTRY if REGISTRY.params(name).counts_itself}


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
    said = row(name)[1]
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
    assert told(row(space)[0]) == required | {
        one.name: plain(one.default) for one in parameters if one.name not in required
    }


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=type_of)
def test_every_type_of_value_is_documented_with_its_keys(dimension: type[BaseModel]) -> None:
    assert set(re.findall(r"`(\w+)`", row(type_of(dimension))[-1])) == set(dimension.model_fields) - {"type"}


def test_every_key_of_a_search_is_documented_with_its_default() -> None:
    expected = {
        name: "required" if field.is_required() else json.dumps(field.default)
        for name, field in schema.SearchConfig.model_fields.items()
    }
    for path, section in SECTIONS.items():
        for name, field in section.model_fields.items():
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, BaseModel):
                expected[f"{path}.{name}"] = "required" if field.is_required() else json.dumps(default)
    rows = re.findall(r"^\| `((?:search\.[\w.]+)|name|base|search)` \| (`[^`|]*`|required) \|", PAGE, re.MULTILINE)
    documented = {key: said if said == "required" else json.dumps(read(said.strip("`"))) for key, said in rows}
    assert documented == expected
