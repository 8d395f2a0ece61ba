"""The `faults` section: what shall go wrong, and when. For chaos tests; refused unless `allow_faults` is set."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from orchestray.platform.config.base import AboveZero, Positive, Section, Text, ZeroToOne
from orchestray.platform.config.problems import nearest, shown

KINDS = ("kill", "slow", "delay", "drop", "byzantine")
ROLES = ("worker", "parameter_server", "leaf_server")
"""Roles of the processes of a run that something can happen to."""

_TARGET = re.compile(r"^([a-z_]+)/[0-9]+$")


def _target(value: object) -> object:
    found = _TARGET.match(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'must be "<role>/<rank>", such as worker/0, got {shown(value)}')
    if found[1] not in ROLES:
        hint = nearest(found[1], ROLES)
        raise ValueError(f"must name a worker, parameter_server or leaf_server, got {shown(value)}{hint}")
    return value


Target = Annotated[str, Field(strict=True, pattern=_TARGET.pattern), BeforeValidator(_target)]


class Fault(Section):
    """One thing that goes wrong: exactly one of `kill`, `slow`, `delay`, `drop` and `byzantine` names whom."""

    kill: Target | None = None
    """The process "<role>/<rank>" is killed (SIGKILL)."""
    slow: Target | None = None
    """It computes `factor` times as slowly."""
    delay: Target | None = None
    """Each of its messages is held back for `factor` seconds."""
    drop: Target | None = None
    """Each of its messages is lost on the way, with the probability `factor`, and sent again."""
    byzantine: Target | None = None
    """It sends wrong gradients on purpose."""
    at_step: Positive = 1
    """From this step on; `kill`: in it."""
    factor: AboveZero = 10.0
    """How slow, how late, or how likely."""
    attack: Literal["sign_flip", "gaussian", "same_value"] = "sign_flip"
    """With `byzantine`: the gradient's opposite, noise, or one value everywhere."""
    scale: AboveZero = 100.0
    """With `byzantine`: how large what it sends is."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            text = f"got {' and '.join(kinds)}" if kinds else "got none of them"
            raise ValueError(f"must name exactly one of {', '.join(KINDS)}, such as kill: worker/0; {text}")
        return self

    @property
    def kind(self) -> str:
        """Which of the five."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def target(self) -> tuple[str, int]:
        """Role and rank of the process it happens to."""
        role, _, rank = str(getattr(self, self.kind)).partition("/")
        return role, int(rank)


class Distill(Section):
    """The run is trained on another run's outputs."""

    teacher: Text
    """Run directory of the teacher: any trained run, an ensemble too."""
    temperature: AboveZero = 2.0
    """What the logits of both are divided by before the softmax."""
    weight: ZeroToOne = 0.5
    """Part of the loss that is the distance from the teacher; the rest is the task's own loss."""
