"""The `search.method` section: the union of the registered methods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from orchestray.search.methods.hyper.params import Proposals
from orchestray.search.methods.params import MethodSection
from orchestray.search.registry.methods import METHODS, why_not_within


def _refuse(value: object) -> object:
    reason = why_not_within(value.get("type")) if isinstance(value, Mapping) else None
    if reason is not None:
        raise ValueError(reason)
    return value


if TYPE_CHECKING:
    AnyMethod = MethodSection
else:
    AnyMethod = METHODS.union()
    _SECTIONS = [METHODS.params(name) for name in METHODS]
    _INSIDE = reduce(or_, (section for section in _SECTIONS if section.why_not_within is None))
    for _section in _SECTIONS:
        if issubclass(_section, Proposals):
            union = Annotated[_INSIDE, Field(discriminator="type"), BeforeValidator(_refuse)]
            _section.model_rebuild(_types_namespace={"ProposingMethod": union})


def section_of(name: str) -> type[MethodSection]:
    """Return the section of a method, complete with what may be inside it.

    Raises:
        ConfigError: the method does not exist.
    """
    return METHODS.params(name)
