"""The parameters of an ensemble that is trained as one model (`train.ensemble`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestray.platform.config.base import Section, ZeroToOne


class EnsembleLoss(Section):
    """A loss that knows of the ensemble (Lee et al., 2015): members of one model, trained on their averaged answer."""

    members: Annotated[int, Field(strict=True, ge=2)]
    """Number of members, each the task's model with weights of its own."""
    weight: ZeroToOne = 0.5
    """Fraction of the loss that is that of the averaged answer; the rest is the mean of the members' own losses."""
    average: Literal["outputs", "probabilities"] = "outputs"
    """Values that the answer is the mean of: the members' `outputs`, or their softmax (`probabilities`)."""
