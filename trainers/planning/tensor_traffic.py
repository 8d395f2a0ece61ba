"""The bytes that a model split over a tensor group would send, layer by layer, without the group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.platform.comm.pending import DONE, Pending
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.parallel.tensor.assemble import make_plan
from orchestray.trainers.planning.subject import Subject

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from orchestray.platform.comm.collective import Operation

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

    @property
    def num_bytes(self) -> int:
        """Bytes that the first worker sends in a step."""
        return sum(self.layer_bytes.values())


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
        member = LoneMember(degree, recorder)
        split = split_model(model, plan, lambda: member, member.rank, degree)
        divided = replace(subject, model=model)
        with torch.no_grad():  # the first pass looks at sizes with copies of layers, which a recorder takes for them
            divided.forward()
        member.sent_bytes.clear()
        with recorder:
            loss = divided.forward()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except (OrchestrayError, RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    sent = Counter({layer.partition(".")[2]: count for layer, count in member.sent_bytes.items()})
    for name, parameter in model.named_parameters():
        if name in split.partial and parameter.requires_grad:
            sent[name.rpartition(".")[0]] += ring_bytes(parameter, degree)
    return Traffic(kind, degree, dict(plan), dict(sent), sum(each.numel() for each in model.parameters()))


class LoneMember(Collective):
    """The first member of a group whose others are not there: it counts what it would send, and computes shapes.

    Args:
        size: number of members.
        recorder: knows the layer whose operation runs.

    Attributes:
        sent_bytes: bytes that each layer would send, as `Collective.bytes_sent` counts them.
    """

    def __init__(self, size: int, recorder: Recorder) -> None:
        super().__init__(_Nobody(size))
        self._recorder = recorder
        self.sent_bytes: Counter[str] = Counter()

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        self._count(ring_bytes(tensor, self.size))
        return DONE

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count((self.size - 1) * tensor.nbytes)
        return torch.stack([tensor] * self.size)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        self._check_parts(part, whole)
        self._count((self.size - 1) * part.nbytes)
        return DONE

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._check_parts(part, whole)
        self._count((self.size - 1) * part.nbytes)
        return DONE

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        del receive
        self._count(sum(tensor.nbytes for tensor in send.values()))
        return DONE

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if source == self.rank:
            self._count((self.size - 1) * tensor.nbytes)

    def barrier(self) -> None:
        return

    def sibling(self, name: str) -> Collective:
        del name
        return self

    def subgroup(self, name: str, ranks: Sequence[int]) -> Collective:
        if list(ranks) == list(range(self.size)):
            return self
        raise ValueError(f"a lone member has no group {name!r}")

    def prefix_store(self, name: str) -> Store:
        raise ValueError("a lone member has nobody to meet")

    def _count(self, num_bytes: int) -> None:
        self.sent_bytes[self._recorder.layer] += num_bytes


class _Nobody:
    """A stand-in for a process group."""

    def __init__(self, size: int) -> None:
        self.rank = lambda: 0
        self.size = lambda: size
