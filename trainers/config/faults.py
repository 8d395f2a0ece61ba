"""The sections `faults` and `distill`. Faults are for chaos tests, and refused unless `allow_faults` is set."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from orchestray.platform.config.base import AboveZero, Positive, Section, Text, ZeroToOne, text_like
from orchestray.platform.config.problems import nearest, shown

KINDS = ("kill", "slow", "delay", "drop", "byzantine")
ROLES = ("worker", "parameter_server", "leaf_server")
"""Roles of the processes that a fault can affect."""

_TARGET = re.compile(r"^([a-z_]+)/[0-9]+$")


def _target(value: object) -> object:
    found = _TARGET.match(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'must be "<role>/<rank>", such as worker/0, got {shown(value)}')
    if found[1] not in ROLES:
        hint = nearest(found[1], ROLES)
        raise ValueError(f"must name a worker, parameter_server or leaf_server, got {shown(value)}{hint}")
    return value


Target = Annotated[str, text_like(_TARGET.pattern, '"<role>/<rank>"'), BeforeValidator(_target)]


class Fault(Section):
    """A fault of one process, which exactly one of `kill`, `slow`, `delay`, `drop` and `byzantine` names."""

    kill: Target | None = None
    """Process "<role>/<rank>" that is killed (SIGKILL)."""
    slow: Target | None = None
    """Process that computes `factor` times as slowly."""
    delay: Target | None = None
    """Process whose messages are each delayed by `factor` seconds."""
    drop: Target | None = None
    """Process whose messages are each lost with probability `factor`, and sent again."""
    byzantine: Target | None = None
    """Worker that sends wrong gradients on purpose."""
    at_step: Positive = 1
    """First step of the fault; with `kill`: the step in which the process is killed."""
    factor: AboveZero = 10.0
    """Slowdown (`slow`), delay in seconds (`delay`) or probability (`drop`)."""
    attack: Literal["sign_flip", "gaussian", "same_value"] = "sign_flip"
    """Gradient that is sent with `byzantine`: the negated one, noise, or one value everywhere."""
    scale: AboveZero = 100.0
    """Scale of the gradient that is sent with `byzantine`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            text = f"got {' and '.join(kinds)}" if kinds else "got none of them"
            raise ValueError(f"must name exactly one of {', '.join(KINDS)}, such as kill: worker/0; {text}")
        return self

    @property
    def kind(self) -> str:
        """The kind of fault: `kill`, `slow`, `delay`, `drop` or `byzantine`."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def target(self) -> tuple[str, int]:
        """Role and rank of the affected process."""
        role, _, rank = str(getattr(self, self.kind)).partition("/")
        return role, int(rank)


class Distill(Section):
    """Distillation: training on another run's outputs."""

    teacher: Text
    """Run directory of the teacher: any trained run, including an ensemble."""
    temperature: AboveZero = 2.0
    """Divisor of the logits of both models before the softmax."""
    weight: ZeroToOne = 0.5
    """Fraction of the loss that is the distance from the teacher; the rest is the task's own loss."""
