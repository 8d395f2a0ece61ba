"""Rules on parameter servers that need no model: consistency, transport, groups, and replicas of several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.optim.params import Muon, OptimizerClass, Sgd, Soap, YellowFin
from orchestray.trainers.sync.parameter_server import ParameterServer

_PATH = "strategy.exchange"


def _of_servers(rule: Callable[[View, ParameterServer], Iterator[Problem]]) -> Rule:
    """Return the rule as one that reports nothing with another exchange."""

    def ruled(view: View) -> Iterator[Problem]:
        exchange = view("strategy.exchange")
        if isinstance(exchange, ParameterServer):
            yield from rule(view, exchange)

    return ruled


@_of_servers
def _staleness(_view: View, exchange: ParameterServer) -> Iterator[Problem]:
    is_stale = exchange.consistency == "stale"
    if is_stale and exchange.staleness is None:
        text = "is required with consistency: stale, and missing: the steps the fastest worker may be ahead, such as 2"
        yield Problem(f"{_PATH}.staleness", text)
    if not is_stale and exchange.staleness is not None:
        text = f"bounds how far a worker may be ahead, which consistency: {exchange.consistency} does not"
        yield Problem(f"{_PATH}.staleness", f"{text}; use consistency: stale, or take it out")


@_of_servers
def _backup_workers(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    data = view("strategy.network.data")
    if exchange.backup_workers == 0:
        return
    path = f"{_PATH}.backup_workers"
    if exchange.consistency == "asynchronous":
        text = "repeat the work of the slowest, for whom asynchronous workers do not wait; use backup_workers: 0"
        yield Problem(path, text)
    elif exchange.backup_workers >= data:
        fitting = f"at most {data - 1} would fit" if data > 1 else "raise it, or use backup_workers: 0"
        text = f"must be fewer than strategy.network.data ({data}), of which they are a part"
        yield Problem(path, f"{text}, got {exchange.backup_workers}; {fitting}")


@_of_servers
def _balance(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if exchange.balance == "even":
        return
    path = f"{_PATH}.balance"
    if exchange.consistency == "asynchronous":
        text = "speed is for workers that wait for each other; asynchronous ones take as many shares as they can"
        yield Problem(path, f"{text}; use balance: even")
    if exchange.backup_workers:
        text = "with balance: speed nobody is left to be waited for, and who repeats a share tells nothing of a speed"
        yield Problem(f"{_PATH}.backup_workers", f"{text}; use backup_workers: 0, or balance: even")
    if exchange.groups > 1:
        text = "speed needs to know how long each worker takes, and a leaf server answers for its workers together"
        yield Problem(path, f"{text}; use balance: even, or groups: 1")
    kind = view("strategy.aggregation.type")
    if kind != "mean":
        text = f"speed gives workers shares of different sizes, which {kind} would compare as if they were alike"
        yield Problem(path, f"{text}; use balance: even, or aggregation: mean")


@_of_servers
def _cadence(_view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if exchange.consistency == "asynchronous":
        return
    given = exchange.consistency
    for key, usual, what in (
        ("push_every", 1, "would hold back a part of the step that the others wait for"),
        ("fetch_every", 1, "would compute with parameters older than the step allows"),
        ("overlap", False, "would compute with parameters older than the step allows"),
    ):
        if getattr(exchange, key) != usual:
            shown = "false" if usual is False else usual
            text = f"a worker {what} with consistency: {given}; use {key}: {shown}, or consistency: asynchronous"
            yield Problem(f"{_PATH}.{key}", text)
    if given == "synchronous" and exchange.lr_scale != "none":
        text = "scales updates by their staleness, and synchronous ones have none; use lr_scale: none, or "
        yield Problem(f"{_PATH}.lr_scale", f"{text}consistency: stale or asynchronous")


@_of_servers
def _rates(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    optimizer = view("train.optimizer")
    if exchange.rates == "coupled":
        if exchange.global_lr != 1.0:
            text = "is the servers' own rate, and with rates: coupled there is one rate"
            yield Problem(f"{_PATH}.global_lr", f"{text}; use rates: decoupled, or take it out")
        return
    path = f"{_PATH}.rates"
    if exchange.consistency == "synchronous":
        text = "decoupled is for workers of which some are ahead, got consistency: synchronous"
        yield Problem(path, f"{text}; use consistency: stale or asynchronous, or rates: coupled")
        return
    if optimizer is not None and (not isinstance(optimizer, Sgd) or optimizer.momentum):
        given = "sgd with momentum" if isinstance(optimizer, Sgd) else optimizer.type
        text = f"decoupled has workers make plain steps, and the optimizer is {given}"
        yield Problem(path, f"{text}; use sgd without momentum, or rates: coupled")
    for key, is_usual, usual, what in (
        ("transport", exchange.transport == "channel", "channel", "there is a server to take the mean"),
        ("groups", exchange.groups == 1, "1", "one server sees the steps of all workers"),
        ("lr_scale", exchange.lr_scale == "none", "none", "the servers weigh a late step already"),
        ("backup_workers", exchange.backup_workers == 0, "0", "a share that is computed twice has two steps"),
        ("balance", exchange.balance == "even", "even", "the mean of a round is of shares of one size"),
        ("fetch_every", exchange.fetch_every == exchange.push_every, f"{exchange.push_every}", "a push ends a round"),
    ):
        if not is_usual:
            yield Problem(f"{_PATH}.{key}", f"with rates: decoupled {what}; use {key}: {usual}, or rates: coupled")
    if _replica_size(view) > 1:
        text = "decoupled is for workers that hold whole networks; use rates: coupled, or tensor: 1 and pipeline: 1"
        yield Problem(path, text)


@_of_servers
def _shared_memory(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if exchange.transport != "shared_memory":
        return
    if exchange.consistency != "asynchronous":
        text = f"is for workers that never wait (HOGWILD), got consistency: {exchange.consistency}"
        yield Problem(f"{_PATH}.transport", f"{text}; use consistency: asynchronous, or transport: channel")
    for key, reason in (
        ("shards", "there is one memory"),
        ("replicas", "there is one memory"),
        ("groups", "no server stands between the workers and the memory"),
    ):
        if getattr(exchange, key) > 1:
            text = f"with transport: shared_memory {reason}; use {key}: 1, or transport: channel"
            yield Problem(f"{_PATH}.{key}", text)
    for key, is_usual, usual in (
        ("push_every", exchange.push_every == 1, "1"),
        ("fetch_every", exchange.fetch_every == 1, "1"),
        ("overlap", not exchange.overlap, "false"),
    ):
        if not is_usual:
            text = "with transport: shared_memory each share changes the memory at once, and reads what is there"
            yield Problem(f"{_PATH}.{key}", f"{text}; use {key}: {usual}, or transport: channel")
    if view("resources.gpus_per_worker") > 0:
        text = "is memory of CPUs, and the workers compute on GPUs; use transport: channel, or gpus_per_worker: 0"
        yield Problem(f"{_PATH}.transport", text)
    if exchange.persist:
        text = "with transport: shared_memory updates are never acknowledged, so none can be on disk before it is"
        yield Problem(f"{_PATH}.persist", f"{text}; use persist: false, or transport: channel")


@_of_servers
def _groups(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    data = view("strategy.network.data")
    if exchange.groups > data:
        text = f"each leaf server needs a worker of its own, and strategy.network.data is {data}"
        yield Problem(f"{_PATH}.groups", f"{text}, got {exchange.groups}; at most {data} would fit")
    if exchange.groups > 1 and exchange.backup_workers:
        text = "repeat what others compute, and a leaf server waits for its own; use backup_workers: 0, or groups: 1"
        yield Problem(f"{_PATH}.backup_workers", text)
    if exchange.groups > 1 and exchange.persist and exchange.consistency == "asynchronous":
        text = (
            "goes on from each shard's last update, and a lost leaf server may have sent its last to some of them alone"
        )
        yield Problem(f"{_PATH}.persist", f"{text}; use persist: false, or groups: 1")
    if exchange.significance > 0 and exchange.groups == 1:
        text = "holds back what need not cross to other groups, and with groups: 1 there are none; raise groups"
        yield Problem(f"{_PATH}.significance", text)
    elif exchange.significance > 0 and exchange.consistency != "asynchronous":
        text = f"lets the groups' parameters differ, which consistency: {exchange.consistency} does not allow"
        yield Problem(f"{_PATH}.significance", f"{text}; use consistency: asynchronous, or significance: 0")
    if exchange.significance_decay != "none" and not exchange.significance:
        text = "has significance fall, and with significance: 0 every change is sent; raise it, or take this out"
        yield Problem(f"{_PATH}.significance_decay", text)


@_of_servers
def _softsync(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if exchange.softsync is None:
        return
    path, data = f"{_PATH}.softsync", view("strategy.network.data")
    if data % exchange.softsync:
        text = f"divides strategy.network.data ({data}) into the gradients of an update, got {exchange.softsync}"
        yield Problem(path, f"{text}; use one of its divisors")
    for key, is_usual, usual, reason in (
        ("consistency", exchange.consistency == "asynchronous", "asynchronous", "no worker waits for an update"),
        ("transport", exchange.transport == "channel", "channel", "a server gathers gradients"),
        ("groups", exchange.num_leaves == 0, "1", "the servers gather what workers push, and leaf servers sums"),
        ("push_every", exchange.push_every == 1, "1", "a push is one gradient"),
        ("rates", exchange.rates == "coupled", "coupled", "the servers make the steps"),
    ):
        if not is_usual:
            text = f"with softsync: {exchange.softsync} {reason}; use {key}: {usual}, or take softsync out"
            yield Problem(f"{_PATH}.{key}", text)


@_of_servers
def _compute_groups(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if not exchange.compute_groups:
        return
    for key, is_usual, usual, reason in (
        ("consistency", exchange.consistency == "asynchronous", "asynchronous", "groups do not wait for each other"),
        ("transport", exchange.transport == "channel", "channel", "a leaf server sums a group's gradients"),
        ("significance", exchange.significance == 0, "0", "a group's whole update is sent"),
        ("push_every", exchange.push_every == 1, "1", "a group's workers push each share together"),
        ("fetch_every", exchange.fetch_every == 1, "1", "a group's workers compute with the same weights"),
        ("overlap", not exchange.overlap, "false", "a group's workers compute with the same weights"),
        ("rates", exchange.rates == "coupled", "coupled", "the servers make the steps"),
        ("factors", exchange.factors == "never", "never", "leaf servers send sums of gradients"),
        ("pulls", exchange.pulls == "whole", "whole", "leaf servers hold parameters of their own"),
        ("persist", not exchange.persist, "false", "a lost leaf server may have sent its last to some shards alone"),
    ):
        if not is_usual:
            text = f"with compute_groups: true {reason}; use {key}: {usual}, or compute_groups: false"
            yield Problem(f"{_PATH}.{key}", text)
    if _replica_size(view) > 1:
        text = "is for workers that hold whole networks; use compute_groups: false, or tensor: 1 and pipeline: 1"
        yield Problem(f"{_PATH}.compute_groups", text)


@_of_servers
def _whole_gradient(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if exchange.shards == 1:
        return
    if view("train.grad_clip") is not None and exchange.consistency != "asynchronous":
        text = "needs the norm of a step's whole gradient, and "
        if _replica_size(view) == 1:
            text += f"with shards: {exchange.shards} nobody sees it; use shards: 1, or take grad_clip out"
        else:
            text += "stages push theirs to servers of their own; take it out, or use consistency: asynchronous, where "
            text += "each server clips its own part"
        yield Problem("train.grad_clip", text)


def _replica_size(view: View) -> int:
    return int(view("strategy.network.tensor") * view("strategy.network.pipeline"))


@_of_servers
def _whole_gradients(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    if (optimizer := view("train.optimizer")) is None:
        return
    if isinstance(optimizer, OptimizerClass | Muon | Soap) and exchange.transport == "shared_memory":
        text = f"{optimizer.type} keeps its state to itself, and workers on shared memory share theirs"
        yield Problem("train.optimizer.type", f"{text}; use transport: channel, or another optimizer")
    alone = exchange.transport == "shared_memory" or exchange.fetch_every > 1 or exchange.rates != "coupled"
    if optimizer.groups and alone:
        text = "groups are for the servers' steps, and here workers make steps of their own; use transport: channel, "
        yield Problem("train.optimizer.groups", f"{text}fetch_every: 1 and rates: coupled")
    if not isinstance(optimizer, YellowFin):
        return
    fix = "use exchange: allreduce, or sgd"
    if exchange.transport == "shared_memory":
        text = f"yellowfin tunes by one gradient after the other, and workers on shared memory write at once; {fix}"
        yield Problem("train.optimizer.type", text)
    elif exchange.shards > 1 or view("strategy.network.tensor") * view("strategy.network.pipeline") > 1:
        text = "yellowfin measures the norm of the whole gradient, which several servers hold parts of; "
        yield Problem("train.optimizer.type", f"{text}use shards: 1 and a network that is not cut, or sgd")


@_of_servers
def _split_network(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    """Refuse keys that do not work with replicas of several workers, each of which has servers of its own."""
    network = view("strategy.network")
    size = network.tensor * network.pipeline
    if size == 1:
        return
    if exchange.shards % size:
        text = f"each of the {size} workers of a replica (strategy.network: tensor x pipeline) has as many servers of"
        yield Problem(f"{_PATH}.shards", f"{text} its own; use a multiple of {size}, got {exchange.shards}")
    for key, is_usual, usual, reason in (
        ("groups", exchange.groups == 1, "1", "leaf servers hold whole networks"),
        ("transport", exchange.transport == "channel", "channel", "workers of shared memory hold whole networks"),
        ("backup_workers", exchange.backup_workers == 0, "0", "a replica of several workers repeats nobody's work"),
        ("push_every", exchange.push_every == 1, "1", "the workers of a replica push each share together"),
        ("fetch_every", exchange.fetch_every == 1, "1", "the workers of a replica fetch for each share"),
        ("overlap", not exchange.overlap, "false", "the workers of a replica compute one share at a time"),
        ("rates", exchange.rates == "coupled", "coupled", "the servers make the steps"),
    ):
        if not is_usual:
            text = f"{reason}; use {key}: {usual}, or in strategy.network tensor: 1 and pipeline: 1"
            yield Problem(f"{_PATH}.{key}", text)


@_of_servers
def _factors(_view: View, exchange: ParameterServer) -> Iterator[Problem]:
    """Refuse factors where something else than the gradient of one share is sent."""
    if exchange.factors == "never":
        return
    for key, is_usual, usual, reason in (
        ("transport", exchange.transport == "channel", "channel", "no server would multiply them"),
        ("groups", exchange.groups == 1, "1", "leaf servers send sums of gradients"),
        ("push_every", exchange.push_every == 1, "1", "factors of several shares do not add up"),
        ("fetch_every", exchange.fetch_every == 1, "1", "the worker's own steps need gradients"),
        ("overlap", not exchange.overlap, "false", "inputs and errors are those of the share just computed"),
        ("rates", exchange.rates == "coupled", "coupled", "workers send steps of their own"),
    ):
        if not is_usual:
            yield Problem(f"{_PATH}.factors", f"{reason}; use {key}: {usual}, or factors: never")


@_of_servers
def _pulls(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    """Refuse fetches of what has changed by workers whose own parameters are not the servers' of an earlier version."""
    if exchange.pulls == "whole":
        return
    for key, is_usual, usual, reason in (
        ("transport", exchange.transport == "channel", "channel", "parameters in shared memory are not fetched"),
        ("groups", exchange.groups == 1, "1", "leaf servers hold parameters of their own"),
        ("push_every", exchange.push_every == 1, "1", "they come with the answer to each push"),
        ("fetch_every", exchange.fetch_every == 1, "1", "the worker moves its own parameters in between"),
        ("overlap", not exchange.overlap, "false", "they come with the answer to each push"),
        ("rates", exchange.rates == "coupled", "coupled", "the worker moves its own parameters in between"),
    ):
        if not is_usual:
            yield Problem(f"{_PATH}.pulls", f"{reason}; use {key}: {usual}, or pulls: whole")
    if view("strategy.network.tensor") * view("strategy.network.pipeline") > 1:
        text = "the workers of a replica fetch whole parameters; use tensor: 1 and pipeline: 1"
        yield Problem(f"{_PATH}.pulls", f"{text} in strategy.network, or pulls: whole")


@_of_servers
def _rounds(view: View, exchange: ParameterServer) -> Iterator[Problem]:
    steps = view("train.steps")
    if steps is None:
        return
    for key, what in (("push_every", "push"), ("fetch_every", "fetch")):
        every = getattr(exchange, key)
        if every > steps * view("strategy.network.data"):
            text = f"the run has {steps} steps (train.steps), so no worker would take enough shares for a {what}"
            yield Problem(f"{_PATH}.{key}", f"{text}, got {every}")


SERVER_RULES: tuple[Rule, ...] = (
    _staleness,
    _backup_workers,
    _balance,
    _cadence,
    _rates,
    _shared_memory,
    _groups,
    _compute_groups,
    _softsync,
    _whole_gradient,
    _whole_gradients,
    _split_network,
    _factors,
    _pulls,
    _rounds,
)
