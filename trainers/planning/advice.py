"""Advice before a run: whether to distribute it, with or without a server, and how consistent the workers should be.

One device where the data fit it, data parallelism for many or large samples, and a split model only where it does not
fit. On consistency and centralisation see Ben-Nun and Hoefler (2019), section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cheapest, cost_s, costs_s
from orchestray.trainers.survey.cluster.server import parameter_server
from orchestray.trainers.survey.cluster.stragglers import Compute

Distribution = Literal["single", "data parallel", "split", "split and data parallel"]
Centre = Literal["server", "all-reduce", "gossip"]
Consistency = Literal["synchronous", "stale-synchronous", "asynchronous"]


@dataclass(frozen=True)
class Memory:
    """Bytes that a training takes.

    Args:
        model_bytes: parameters, gradients and the state of the optimizer.
        activation_bytes: kept for the backward pass of the smallest batch that is worth computing.
        data_bytes: all samples.
    """

    model_bytes: float
    activation_bytes: float
    data_bytes: float


@dataclass(frozen=True)
class Distributed:
    """An answer to the question whether to distribute."""

    choice: Distribution
    reason: str
    least_parts: int = 1
    """Devices that a model needs at least, by its memory alone."""


def when_to_distribute(memory: Memory, device_bytes: float) -> Distributed:
    """Return whether a training is for one device, for replicas of the model, or for parts of it.

    Args:
        memory: bytes of the training.
        device_bytes: memory of a device.
    """
    model_bytes = memory.model_bytes + memory.activation_bytes
    has_much_data = memory.data_bytes > device_bytes
    if model_bytes > device_bytes:
        parts = -int(-model_bytes // device_bytes)
        reason = f"the model takes {_size(model_bytes)}, and a device has {_size(device_bytes)}"
        if has_much_data:
            return Distributed("split and data parallel", f"{reason}; the data do not fit it either", parts)
        return Distributed("split", reason, parts)
    if has_much_data:
        reason = f"the model fits a device, and {_size(memory.data_bytes)} of data do not"
        return Distributed("data parallel", reason)
    return Distributed("single", f"the model and {_size(memory.data_bytes)} of data fit one device")


@dataclass(frozen=True)
class Needs:
    """Needs of a training, which decide before any cost does.

    Args:
        is_asynchronous: workers must not wait for one another.
        is_elastic: workers come and go.
        has_no_centre: no process may be one that all depend on.
    """

    is_asynchronous: bool = False
    is_elastic: bool = False
    has_no_centre: bool = False


@dataclass(frozen=True)
class Centred:
    """An answer to the question who adds up the gradients."""

    choice: Centre
    reason: str
    algorithm: str
    """All-reduce with the least cost."""
    server_s: float
    """Seconds of a step's exchange with a server that is reached through a tree."""
    all_reduce_s: float
    """Seconds of the best all-reduce."""


def centralised_or_not(num_workers: int, num_bytes: float, link: AlphaBeta, needs: Needs | None = None) -> Centred:
    """Return whether to use a server: needs first, then the least cost.

    A server that combines pushes on their way through a tree costs what a tree costs. All-reduces wait for every
    worker, so asynchrony, and workers that come and go, want a server; if there must be none, they want gossip.

    Args:
        num_workers: workers.
        num_bytes: bytes of the gradient.
        link: time of a message.
        needs: what the training needs; default: nothing.
    """
    needs = needs or Needs()
    costs = costs_s(num_workers, num_bytes, link)
    algorithm, server_s = cheapest(costs), cost_s("tree", num_workers, num_bytes, link)
    numbers = algorithm, server_s, costs[algorithm]
    if needs.is_asynchronous or needs.is_elastic:
        wanted = "workers that do not wait" if needs.is_asynchronous else "workers that come and go"
        if needs.has_no_centre:
            return Centred("gossip", f"{wanted} cannot all-reduce, and a server would be a centre", *numbers)
        return Centred("server", f"{wanted} cannot all-reduce", *numbers)
    if needs.has_no_centre or costs[algorithm] < server_s:
        reason = "a server would be a centre" if needs.has_no_centre else f"{algorithm} costs less than a server"
        return Centred("all-reduce", reason, *numbers)
    return Centred("server", "no all-reduce costs less", *numbers)


@dataclass(frozen=True)
class Consistent:
    """An answer to the question how consistent the workers should be."""

    choice: Consistency
    reason: str
    bound: int | None
    """Most steps that a worker may be ahead of the slowest; None: any number."""
    slowdowns: tuple[tuple[int, float], ...]
    """Time of each bound that was tried, in that of workers that never wait."""


def which_consistency(
    compute: Compute, num_workers: int, *, tolerance: float = 0.1, num_steps: int = 100
) -> Consistent:
    """Return the strictest consistency under which waiting for stragglers costs little.

    Args:
        compute: seconds of the workers' steps.
        num_workers: workers.
        tolerance: part of the time that waiting may cost.
        num_steps: steps to simulate; messages take no time here.
    """
    seconds = compute.draw(num_steps, num_workers)

    def finish_s(bound: int | None) -> float:
        return parameter_server(seconds, 0.0, AlphaBeta(0.0, 0.0), bound=bound).finish_s

    free_s = finish_s(None)
    slowdowns: list[tuple[int, float]] = []
    for bound in _BOUNDS:
        slowdowns.append((bound, finish_s(bound) / free_s if free_s else 1.0))
        if slowdowns[-1][1] <= 1 + tolerance:
            choice: Consistency = "stale-synchronous" if bound else "synchronous"
            reason = f"waiting costs {slowdowns[-1][1] - 1:.0%} of the time"
            if bound:
                reason += f", and {slowdowns[0][1] - 1:.0%} in step"
            return Consistent(choice, reason, bound, tuple(slowdowns))
    reason = f"waiting costs {slowdowns[-1][1] - 1:.0%} even {_BOUNDS[-1]} steps apart, as some workers are always slow"
    return Consistent("asynchronous", reason, None, tuple(slowdowns))


_BOUNDS = (0, 1, 2, 4, 8)


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
