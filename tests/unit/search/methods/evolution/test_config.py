"""The sections of a config and the constructors of the methods say the same."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import get_args

import pytest

from orchestray.platform.config.search.evolution import EvolutionMethod
from orchestray.search.methods.base import Method
from orchestray.search.methods.registry import METHODS

SECTIONS = {get_args(section.model_fields["type"].annotation)[0]: section for section in get_args(EvolutionMethod)}


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_has_the_parameters_of_its_method_with_the_same_defaults(name: str) -> None:
    module, class_name = METHODS[name].split(":")
    common = set(inspect.signature(Method.__init__).parameters)
    parameters = inspect.signature(getattr(import_module(module), class_name).__init__).parameters
    own = {key: parameter.default for key, parameter in parameters.items() if key not in common}
    fields = {key: field.default for key, field in SECTIONS[name].model_fields.items() if key != "type"}
    assert fields == own
