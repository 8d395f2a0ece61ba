"""The bytes that a model split over a tensor group would send, layer by layer, without the group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from orchestray.platform.comm.collective import ring_bytes
from orchestray.platform.comm.dry import Call, DryCollective
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.assemble import make_plan
from orchestray.trainers.planning.layer_watch import plain_name
from orchestray.trainers.planning.subject import Subject

KINDS = ("auto", "channels", "spatial", "branches", "one_weird_trick")
"""Values of `strategy.network.plan`."""


@dataclass(frozen=True)
class Traffic:
    """A step of a model that is split by a plan."""

    kind: str
    """Value of `strategy.network.plan`."""
    degree: int
    """Workers of the tensor group."""
    plan: Mapping[str, str]
    """Style of each module that is split."""
    layer_bytes: Mapping[str, int]
    """Bytes that the first worker sends in a step for each layer, forward and backward."""
    parameters: int
    """Parameters that the first worker holds."""
    gradient_bytes: Mapping[str, int]
    """Bytes that each layer of the plan would send in a step if the samples were divided instead: its gradients."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the first worker sends in a step."""
        return sum(self.layer_bytes.values())

    @property
    def schemes(self) -> dict[str, Literal["samples", "features"]]:
        """The dimension to divide for each layer of the plan, so that it sends least.

        Divided samples send a layer's gradients, divided features its activations. So this goes by the ratio of
        activations to weights.
        """
        return {
            name: "samples" if gradients <= self._bytes_within(name) else "features"
            for name, gradients in self.gradient_bytes.items()
        }

    def _bytes_within(self, module: str) -> int:
        within = (count for name, count in self.layer_bytes.items() if f"{name}.".startswith(f"{module}."))
        return sum(within)


def traffic_of_plans(subject: Subject, degree: int = 2) -> tuple[Traffic, ...]:
    """Return the traffic of each kind of plan that splits something of the model.

    Plans are not tried on values, as those of a run are: a wrong guess of how a model uses its layers is counted here,
    and left out there.

    Args:
        subject: the model with inputs, on `meta`.
        degree: workers of the tensor group.
    """
    found = (_traffic(subject, kind, degree) for kind in KINDS)
    return tuple(one for one in found if one is not None and one.plan)


def _traffic(subject: Subject, kind: str, degree: int) -> Traffic | None:
    """Return the traffic of a kind of plan; None if it does not fit the model."""
    model = copy.deepcopy(subject.model)
    task: Any = subject.task
    recorder: Any = Recorder()
    try:
        plan = make_plan(task, model, kind, degree)
        calls = _Calls(recorder)
        member = calls.member = DryCollective(0, degree, calls)
        split = split_model(model, plan, lambda: member, member.rank, degree)
        divided = replace(subject, model=model)
        with torch.no_grad():  # the first pass looks at sizes with copies of layers, which a recorder takes for them
            divided.forward()
        calls.layer_bytes.clear()
        with recorder:
            loss = divided.forward()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except (OrchestrayError, RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    sent = calls.layer_bytes
    for name, parameter in model.named_parameters():
        if name in split.partial and parameter.requires_grad:
            sent[name.rpartition(".")[0]] += ring_bytes(parameter, degree)
    return Traffic(
        kind,
        degree,
        dict(plan),
        {layer: count for layer, count in sent.items() if count},
        sum(each.numel() for each in model.parameters()),
        _gradient_bytes(subject.model, plan, degree),
    )


def _gradient_bytes(model: nn.Module, plan: Mapping[str, str], degree: int) -> dict[str, int]:
    """Return the bytes of an all-reduce of the gradients of each module; parts of containers are left out."""
    modules = dict(model.named_modules())
    return {
        name: sum(ring_bytes(each, degree) for each in modules[name].parameters() if each.requires_grad)
        for name in plan
        if name in modules
    }


class _Calls(list[Call]):
    """The operations of a dry member, with the bytes that it would send for each layer.

    Args:
        recorder: knows the layer whose operation runs.

    Attributes:
        layer_bytes: bytes that each layer would send, as `Collective.bytes_sent` counts them.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._counted = 0
        self.layer_bytes: Counter[str] = Counter()
        self.member: DryCollective | None = None

    def append(self, call: Call) -> None:
        super().append(call)
        assert self.member is not None
        sent = self.member.bytes_sent  # counted before the operation starts
        self.layer_bytes[plain_name(self._recorder.layer)] += sent - self._counted
        self._counted = sent
