"""Every scheme of training on the simulated cluster: its step, what it sends, how stale it is, and its goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestray.trainers.survey.cluster.allreduce import ALL_REDUCES, all_reduce, gathered
from orchestray.trainers.survey.cluster.failures import (
    Failures,
    going_on_goodput,
    restarting,
    young_daly_s,
)
from orchestray.trainers.survey.cluster.gossip import gossip
from orchestray.trainers.survey.cluster.network import Bytes, Exchange, Network
from orchestray.trainers.survey.cluster.pipeline import Pipelines
from orchestray.trainers.survey.cluster.server import parameter_server
from orchestray.trainers.survey.cluster.stragglers import Compute


@dataclass(frozen=True)
class Options:
    """Options of single schemes.

    Args:
        bound: most steps that a worker of a stale-synchronous server may be ahead.
        num_servers: servers that the parameters are sharded over.
        local_steps: steps of local SGD between two averages.
        schedule: schedule of a pipeline.
        stages: workers along a pipeline; replicas of it are data-parallel.
        micro_batches: micro-batches of a pipeline's step.
        activation_bytes: bytes between two stages for the samples of one worker and step.
    """

    bound: int = 3
    num_servers: int = 1
    local_steps: int = 8
    schedule: str = "1f1b"
    stages: int = 4
    micro_batches: int = 16
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class Setting:
    """A cluster, a load, and what goes wrong.

    Args:
        network: workers and links.
        num_bytes: bytes of the gradient, and of the parameters.
        compute: seconds of a worker's computation on its samples of a step.
        num_steps: steps to simulate.
        failures: failures of workers.
        checkpoint_every: steps between checkpoints; None: Young and Daly's interval.
        options: options of single schemes.
        seed: seed of failures and of gossip.
    """

    network: Network
    num_bytes: float
    compute: Compute
    num_steps: int = 100
    failures: Failures = field(default_factory=lambda: Failures(0.0))
    checkpoint_every: int | None = None
    options: Options = field(default_factory=Options)
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a scheme. All workers together compute `num_workers` mini-batches a step."""

    scheme: str
    step_s: float
    """Seconds of a step, in the mean."""
    compute_s: float
    """Seconds of a step that a worker computes, in the mean."""
    staleness: float
    """Updates by others between the parameters of a gradient and its own update, in the mean."""
    most_stale: int
    near_bytes: float
    """Bytes that all links within nodes carry in a step."""
    far_bytes: float
    """Bytes that all links between nodes carry in a step."""
    goodput: float
    """Share of the time that is work which failures did not undo, from 0 to 1."""
    checkpoint_every: int | None
    """Steps between checkpoints; None where the state is not restored from one."""

    @property
    def useful_step_s(self) -> float:
        """Seconds of a step, with what failures and checkpoints cost; infinite if no step is ever done."""
        return self.step_s / self.goodput if self.goodput else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and `useful_step_s`, which is None if no step is ever done."""
        return {**asdict(self), "useful_step_s": self.useful_step_s if self.goodput else None}


def simulate(scheme: str, setting: Setting) -> Result:
    """Simulate the steps of a scheme.

    Raises:
        ValueError: there is no such scheme, or it cannot be run on these workers.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"there is no scheme {scheme!r}; there are {', '.join(_SCHEMES)}")
    compute_s = setting.compute.draw(setting.num_steps, setting.network.num_workers)
    return replace(_SCHEMES[scheme](setting, compute_s), scheme=scheme)


def _synchronous(
    exchanged: Callable[[Network, float], Exchange], setting: Setting, compute_s: NDArray[np.float64]
) -> Result:
    exchange = exchanged(setting.network, setting.num_bytes)
    done_s, ends_s = np.zeros(setting.network.num_workers), []
    for row in compute_s:
        done_s = exchange.after(done_s + row)
        ends_s.append(done_s.max())
    return _restarted(setting, compute_s, np.diff(ends_s, prepend=0.0), exchange.num_bytes)


def _local(setting: Setting, compute_s: NDArray[np.float64]) -> Result:
    every = setting.options.local_steps
    exchange = all_reduce("ring", setting.network, setting.num_bytes)
    done_s, ends_s, num_exchanges = np.zeros(setting.network.num_workers), [], 0
    for begin in range(0, setting.num_steps, every):
        rows = compute_s[begin : begin + every]
        done_s = exchange.after(done_s + rows.sum(axis=0))
        ends_s += [done_s.max()] * len(rows)
        num_exchanges += 1
    steps_s = np.diff(ends_s, prepend=0.0)
    return _restarted(setting, compute_s, steps_s, exchange.num_bytes.times(num_exchanges / setting.num_steps))


def _pipeline(setting: Setting, compute_s: NDArray[np.float64]) -> Result:
    """Run data-parallel pipelines; each stage adds up its gradients among the replicas in a ring, once it is done."""
    options, network = setting.options, setting.network
    num_pipelines, rest = divmod(network.num_workers, options.stages)
    if rest:
        raise ValueError(f"pipelines of {options.stages} workers each do not divide {network.num_workers} workers")
    members = np.arange(network.num_workers).reshape(num_pipelines, options.stages)
    message_bytes = options.activation_bytes * options.stages / options.micro_batches
    is_far = bool((network.nodes[members[:, :-1]] != network.nodes[members[:, 1:]]).any())
    transfer_s = network.link(is_far=is_far).time_s(message_bytes) if message_bytes else 0.0
    pipelines = Pipelines(options.schedule, options.stages, options.micro_batches, transfer_s)
    part_bytes = setting.num_bytes / options.stages / num_pipelines
    ring = network.rings(members.T, part_bytes) if num_pipelines > 1 else None
    rounds = 2 * (num_pipelines - 1)
    done_s, ends_s = np.zeros(network.num_workers), []
    for row in compute_s:
        done_s = pipelines.step_s(row[members], done_s.reshape(members.shape)).ravel()
        done_s = done_s if ring is None else ring.repeated(done_s, rounds)
        ends_s.append(done_s.max())
    sent = Bytes() if ring is None else ring.num_bytes.times(rounds)
    if message_bytes and options.stages > 1:
        hops = network.round(members[:, :-1].ravel(), members[:, 1:].ravel(), message_bytes * options.micro_batches)
        sent += hops.num_bytes.times(2)
    return _restarted(setting, compute_s, np.diff(ends_s, prepend=0.0), sent)


def _gossip(setting: Setting, compute_s: NDArray[np.float64]) -> Result:
    done_s, sent = gossip(compute_s, setting.num_bytes, setting.network, setting.seed)
    step_s = float(done_s.max()) / setting.num_steps
    goodput = going_on_goodput(step_s, setting.network.num_workers, setting.failures, None)
    return _result(compute_s, step_s, sent, goodput)


def _server(bound: Callable[[Options], int | None], setting: Setting, compute_s: NDArray[np.float64]) -> Result:
    options, num_workers = setting.options, setting.network.num_workers
    is_far = setting.network.num_nodes > 1
    most = bound(options)
    link = setting.network.link(is_far=is_far)
    served = parameter_server(compute_s, setting.num_bytes, link, bound=most, num_servers=options.num_servers)
    each = 2 * num_workers * setting.num_bytes
    sent = Bytes(0.0, each) if is_far else Bytes(each, 0.0)
    step_s = served.finish_s / setting.num_steps
    if most == 0:  # all pushes of a step are one update
        return _restarted(setting, compute_s, np.full(setting.num_steps, step_s), sent)
    goodput = going_on_goodput(step_s, num_workers, setting.failures, most)
    return replace(
        _result(compute_s, step_s, sent, goodput),
        staleness=float(served.staleness.mean()),
        most_stale=int(served.staleness.max()),
    )


def _restarted(setting: Setting, compute_s: NDArray[np.float64], steps_s: NDArray[np.float64], sent: Bytes) -> Result:
    """Return the result of a scheme whose workers all wait for one another, and restart from a checkpoint together."""
    num_workers, step_s = setting.network.num_workers, float(steps_s.mean())
    every = setting.checkpoint_every
    if every is None and setting.failures.rate_per_s and step_s:
        every = max(1, round(young_daly_s(num_workers, setting.failures) / step_s))
    if every is None:
        return _result(compute_s, step_s, sent, 1.0)
    draw = np.random.default_rng(setting.seed)
    # An interval's steps are drawn among those simulated: the sum of many is close to a normal one.
    spread_s = float(steps_s.std()) * math.sqrt(every)
    intervals_s = np.maximum(every * step_s + spread_s * draw.standard_normal(_NUM_INTERVALS), every * steps_s.min())
    if setting.failures.rate_per_s * num_workers * (every * step_s + setting.failures.restart_s) > _HOPELESS:
        return replace(_result(compute_s, step_s, sent, 0.0), checkpoint_every=every)
    outcome = restarting(intervals_s, num_workers, setting.failures, draw)
    return replace(_result(compute_s, step_s, sent, outcome.goodput), checkpoint_every=every)


_NUM_INTERVALS = 20_000
_HOPELESS = 12.0
"""Expected failures between two checkpoints from which on not one interval in 100,000 would come to its end."""


def _result(compute_s: NDArray[np.float64], step_s: float, sent: Bytes, goodput: float) -> Result:
    return Result("", step_s, float(compute_s.mean()), 0.0, 0, sent.near, sent.far, goodput, None)


_SCHEMES: Mapping[str, Callable[[Setting, NDArray[np.float64]], Result]] = MappingProxyType(
    {
        **{algorithm: partial(_synchronous, partial(all_reduce, algorithm)) for algorithm in ALL_REDUCES},
        "shard": partial(_synchronous, gathered),
        "server": partial(_server, lambda _: 0),
        "stale": partial(_server, lambda options: options.bound),
        "async": partial(_server, lambda _: None),
        "gossip": _gossip,
        "local": _local,
        "pipeline": _pipeline,
    }
)
SCHEMES: tuple[str, ...] = tuple(_SCHEMES)
"""Names of the schemes: all-reduces, sharded parameters, parameter servers, gossip, local SGD and pipelines."""
