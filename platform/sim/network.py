"""A network in virtual time: latency, bandwidth and loss for each link, and a clock that jumps from event to event.

A message of n bytes over a link takes latency_s + n / bandwidth_bytes_per_s (the alpha-beta model, L + nG in Ben-Nun
and Hoefler, 2019). A link carries one message at a time. With `ports="node"` a node also sends only one message at a
time over all its links, and receives one at a time. A parameter server's own port is then the bottleneck that it is in
practice. All results depend only on the program and the seed: real time and thread timing play no part. With
`Link(latency_s=1)` the finish time is the number of rounds.

Replicas are generator functions, which yield the handles they wait for (cheap: thousands of them), or plain functions,
which use the channel like any other. Tensors of torch's `meta` device cost time on the wire and no memory.

    network = SimulatedNetwork(Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
    here, there = network.pair("worker/0", "server/0")

    def worker():
        yield network.sleep(0.5)                       # computes
        yield here.isend(gradient)
        parameters = (yield here.irecv()).tensor

    network.start("worker/0", worker)
    network.start("server/0", server)
    finish_s = network.run()
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from orchestray.platform.comm.channel.base import CLOSED_HERE, GONE, Channel, Message, Meta, Request, Tensors
from orchestray.platform.comm.channel.threads import Inbox, copied, num_bytes
from orchestray.platform.sim.programs import Due, Promise, SimulatedProgram, VirtualHandle
from orchestray.platform.sim.virtual_time import Clock


@dataclass(frozen=True)
class Link:
    """One direction between two nodes.

    A message is lost with probability `loss`; it is sent again `retransmit_s` later, or never if that is None.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    loss: float = 0.0
    retransmit_s: float | None = None

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bandwidth_bytes_per_s <= 0 or not 0 <= self.loss < 1:
            raise ValueError(f"a link has latency_s >= 0, bandwidth_bytes_per_s > 0 and loss in [0, 1), got {self}")


@dataclass
class Traffic:
    """The traffic of a link. `num_bytes` counts every sending of a message, even if it is lost."""

    num_messages: int = 0
    num_bytes: int = 0
    num_lost: int = 0
    busy_s: float = 0.0


class SimulatedNetwork(Clock):
    """Nodes by name, their links, and the clock. `link` is one for all or a function of (sender, receiver)."""

    def __init__(
        self, link: Link | Callable[[str, str], Link], *, ports: Literal["link", "node"] = "link", seed: int = 0
    ) -> None:
        super().__init__()
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self._link = link
        self._shared_ports = ports == "node"
        self._seed = seed
        self._wires: dict[tuple[str, str], _Wire] = {}
        self._free_s: dict[object, float] = {}
        self._ends: dict[str, list[SimulatedChannel]] = {}
        self._on_node: dict[str, list[SimulatedProgram]] = {}

    def pair(self, left: str, right: str, *, timeout_s: float = math.inf) -> tuple[SimulatedChannel, SimulatedChannel]:
        """Return the two ends of a channel between two nodes; timeouts are virtual seconds.

        Channels of the same two nodes share their link.
        """
        a, b = SimulatedChannel(left, right, timeout_s, self), SimulatedChannel(right, left, timeout_s, self)
        a._other, b._other = b, a
        self._ends.setdefault(left, []).append(a)
        self._ends.setdefault(right, []).append(b)
        return a, b

    def start(self, name: str, program: Callable[[], Any]) -> SimulatedProgram:
        """Start a replica on the node `name`, which may have several.

        If one fails or is killed, the node's channels close.
        """
        replica = super().start(name, program)
        replica.on_end(self._close_failed)
        self._on_node.setdefault(name, []).append(replica)
        return replica

    def kill(self, name: str, at_s: float) -> None:
        """Let the replicas of a node die at time `at_s`."""

        def die() -> None:
            for replica in self._on_node.get(name, []):
                replica.kill()

        self.at(at_s, die)

    def transmit(self, sender: str, receiver: str, size_bytes: int, arrive: Callable[[], None]) -> float:
        """Send `size_bytes`, and call `arrive` when the last byte has arrived.

        Returns:
            Time at which the sender's port is free again.
        """
        wire = self._wire(sender, receiver)
        duration_s = size_bytes / wire.link.bandwidth_bytes_per_s
        start_s = max(self.now_s, self._free_s.get(wire.egress, 0.0))
        head_s = start_s + wire.link.latency_s
        while size_bytes and wire.link.loss and wire.dice.random() < wire.link.loss:
            wire.carried(size_bytes, duration_s, lost=True)
            if wire.link.retransmit_s is None:
                self._free_s[wire.egress] = start_s + duration_s
                return start_s + duration_s
            head_s += duration_s + wire.link.retransmit_s
        wire.carried(size_bytes, duration_s, lost=False)
        self._free_s[wire.egress] = start_s + duration_s
        # A channel keeps its order: messages that follow a lost one wait for it.
        head_s = max(head_s, wire.tail_s)
        wire.tail_s = head_s + duration_s
        if self._shared_ports:
            self.at(head_s, lambda: self._take_in(wire.ingress, duration_s, arrive))
        else:
            self.at(head_s + duration_s, arrive)
        return start_s + duration_s

    def _take_in(self, port: object, duration_s: float, arrive: Callable[[], None]) -> None:
        end_s = self._free_s[port] = max(self.now_s, self._free_s.get(port, 0.0)) + duration_s
        self.at(end_s, arrive)

    def _wire(self, sender: str, receiver: str) -> _Wire:
        wire = self._wires.get((sender, receiver))
        if wire is None:
            link = self._link if isinstance(self._link, Link) else self._link(sender, receiver)
            key = (sender, receiver)
            out_port, in_port = (
                (("out", sender), ("in", receiver)) if self._shared_ports else (("out", *key), ("in", *key))
            )
            traffic = self.traffic[key] = Traffic()
            wire = self._wires[key] = _Wire(link, out_port, in_port, traffic, f"{self._seed} {sender} {receiver}")
        return wire

    def _close_failed(self, replica: SimulatedProgram) -> None:
        if replica.killed or replica.error is not None:
            for end in self._ends.get(replica.name, []):
                end.close()


class SimulatedChannel(Channel):
    """One end of a channel on a simulated network.

    A send is done when the last byte has left; nothing waits for the receiver.
    """

    def __init__(self, name: str, peer: str, timeout_s: float, network: SimulatedNetwork) -> None:
        super().__init__(name, peer, timeout_s)
        self._network = network
        self._inbox = Inbox(self, Promise)
        self._other: SimulatedChannel = self
        self._end: str | None = None

    def isend(self, tensors: Tensors, *, tag: str = "", meta: Meta = None) -> VirtualHandle[None]:
        message = copied(tensors, tag, meta)
        if self._end is not None:
            raise self.closed_error(self._end)
        size_bytes = num_bytes(message)
        self.bytes_sent += size_bytes
        self.messages_sent += 1
        left_s = self._network.transmit(self.name, self.peer, size_bytes, lambda: self._other._inbox.put(message))
        future = Due(self._network, left_s)
        return VirtualHandle(future, self.waiting_to("take", tag), self.timeout_s, self._network)

    def irecv(self, *, into: Tensors | None = None, tag: str | None = None) -> VirtualHandle[Message]:
        future = self._inbox.ask(_anything(tag) if into is None else Request.of(into, tag))
        return VirtualHandle(future, self.waiting_to("send", tag), self.timeout_s, self._network)

    def close(self) -> None:
        if self._end is None:
            self._end = CLOSED_HERE
            self._inbox.end(CLOSED_HERE, keep_messages=False)
            self._network.transmit(self.name, self.peer, 0, self._other._peer_closed)  # behind those in transit

    def _peer_closed(self) -> None:
        self._end = self._end or GONE
        self._inbox.end(GONE, keep_messages=True)


@cache
def _anything(tag: str | None) -> Request:
    """Return a request that any message with this tag fits; the same object is used for all of them."""
    return Request(None, tag)


@dataclass
class _Wire:
    """A link in use: its ports, its traffic, its random numbers, and the arrival of its last message."""

    link: Link
    egress: object
    ingress: object
    traffic: Traffic
    seed: str
    tail_s: float = 0.0

    @cached_property
    def dice(self) -> random.Random:
        """Random numbers of this link alone, so that its losses do not depend on the traffic of other links."""
        return random.Random(self.seed)

    def carried(self, size_bytes: int, duration_s: float, *, lost: bool) -> None:
        if size_bytes:
            self.traffic.num_messages += 1
            self.traffic.num_bytes += size_bytes
            self.traffic.num_lost += lost
            self.traffic.busy_s += duration_s


def lockstep_round(
    ready_s: npt.NDArray[np.float64],
    sender_of: npt.NDArray[np.intp],
    message_bytes: float | npt.NDArray[np.float64],
    link: Link,
) -> npt.NDArray[np.float64]:
    """Compute a round of a collective in which every rank i sends one message and receives one from `sender_of[i]`.

    For schedules with too many messages to simulate one by one: a ring of 1,000 ranks has 2 million of them per
    all-reduce. Without loss, the result equals the simulation.

    Args:
        ready_s: time at which each rank may send, [num_ranks].
        sender_of: rank from which each rank receives, [num_ranks].
        message_bytes: bytes of each message.
        link: link between any two ranks.

    Returns:
        Time at which each rank has its message, [num_ranks].
    """
    arrives_s = ready_s[sender_of] + link.latency_s + message_bytes / link.bandwidth_bytes_per_s
    return np.maximum(ready_s, arrives_s)
