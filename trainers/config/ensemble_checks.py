"""Rules on an ensemble that is trained as one model."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View


def _pipeline(view: View) -> Iterator[Problem]:
    if view("train.ensemble") is not None and view("strategy.network.pipeline") > 1:
        text = "the members of train.ensemble stand beside each other, and stages one after the other"
        yield Problem("strategy.network.pipeline", f"{text}; use pipeline: 1, with data or tensor")


def _distilled(view: View) -> Iterator[Problem]:
    if view("train.ensemble") is not None and view("distill") is not None:
        text = "compares one answer with the teacher's, and train.ensemble has one for each member"
        yield Problem("distill", f"{text}; take one of them out, or distill into each member as a run of its own")


ENSEMBLE_RULES: tuple[Rule, ...] = (_pipeline, _distilled)
