"""The sections of a config and the constructors of the methods have the same parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from orchestray.search.methods.base import Method
from orchestray.search.registry.methods import METHODS

COMMON = {"proposer", *inspect.signature(Method.__init__).parameters}


def parameters_of(method: type) -> dict[str, Any]:
    """Return the parameters that not every method has, with their defaults, base classes' included."""
    found: dict[str, Any] = {}
    for owner in method.__mro__:
        parameters = inspect.signature(vars(owner).get("__init__", lambda **_: None)).parameters.values()
        own = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in COMMON]
        found = {one.name: one.default for one in own} | found
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_section_has_the_parameters_of_its_method_with_the_same_defaults(name: str) -> None:
    fields = {
        key: field for key, field in METHODS.params(name).model_fields.items() if key not in ("type", "proposals")
    }
    defaults = {key: field.get_default(call_default_factory=True) or None for key, field in fields.items()}
    assert defaults == {key: default or None for key, default in parameters_of(METHODS.find(name)).items()}


@pytest.mark.parametrize("name", METHODS)
def test_what_counts_trials_is_a_number_of_the_section(name: str) -> None:
    section = METHODS.params(name)
    assert all("int" in str(section.model_fields[key].annotation) for key in section.counts)
