"""Workers that host the nodes of a network: actors of Ray that compute whenever a message arrives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from queue import PriorityQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.errors import ClusterError, TrainingError
from orchestray.trainers.survey.message_driven.network import Settings, make_nodes, weights_of
from orchestray.trainers.survey.message_driven.nodes import Message, Node, Parameterised, Pump
from orchestray.trainers.survey.message_driven.trees import Tree

PLACEMENT: Sequence[Sequence[str]] = (
    ("pump", "places", "copies", "operands", "operator", "leaf"),
    ("not", "and", "answer", "loss"),
    ("or", "xor"),
)
"""The nodes of each worker."""


@dataclass
class Trained:
    """The network after a training.

    Attributes:
        nodes: all nodes by name.
        num_sent: messages that went from one worker to another.
        seconds: time from the first message to the last.
    """

    nodes: dict[str, Node]
    num_sent: int
    seconds: float

    @property
    def parameterised(self) -> dict[str, Parameterised]:
        return {name: node for name, node in self.nodes.items() if isinstance(node, Parameterised)}

    @property
    def weights(self) -> Tensor:
        """All parameters as one vector, in the order of `weights_of`."""
        return weights_of({name: node.module for name, node in self.parameterised.items()})

    @property
    def staleness(self) -> Counter[int]:
        """Number of messages to nodes with parameters, by the updates between their two ways."""
        return sum((node.staleness for node in self.parameterised.values()), Counter())


class Worker:
    """The host of some nodes: messages wait in a queue, those on their way back before those on their way forward.

    Args:
        hosted: names of its nodes.
        trees: samples.
        settings: settings of the training.
    """

    def __init__(self, hosted: Sequence[str], trees: Sequence[Tree], settings: Settings) -> None:
        torch.set_num_threads(1)
        nodes = make_nodes(trees, settings)
        self._nodes = {name: nodes[name] for name in hosted}
        self._inbox: PriorityQueue[tuple[bool, int, Message | None]] = PriorityQueue()
        self._numbers = count()

    def receive(self, messages: Sequence[Message | None]) -> None:
        """Put messages into the queue; None: all is done."""
        for message in messages:
            self._inbox.put((message is None or message.is_forward, next(self._numbers), message))

    def run(self, peers: Mapping[str, Any]) -> Trained:
        """Compute until all trees are done.

        Args:
            peers: actors of the other workers by the names of their nodes.
        """
        began_s, num_sent = perf_counter(), 0
        pump = self._nodes.get("pump")
        self.receive(pump.start() if isinstance(pump, Pump) else [])
        outbox: defaultdict[Any, list[Message | None]] = defaultdict(list)
        send = {peer: peer.receive.options(num_returns=0).remote for peer in peers.values()}
        while (message := self._inbox.get()[-1]) is not None:
            sent = self._nodes[message.to].receive(message)
            self.receive([each for each in sent if each.to in self._nodes])
            for each in sent:
                if each.to not in self._nodes:
                    outbox[peers[each.to]].append(each)
                    num_sent += 1
            is_done = isinstance(pump, Pump) and pump.is_done
            if is_done:
                outbox.update({peer: [None] for peer in peers.values()})
                self.receive([None])
            if is_done or self._inbox.empty():  # more than one message in a call costs no more than one
                for peer, messages in outbox.items():
                    send[peer](messages)
                outbox.clear()
        for node in self._nodes.values():
            if isinstance(node, Parameterised):
                node.stepper.step()  # the gradients of the last trees, if they are too few for a step
        return Trained(self._nodes, num_sent, perf_counter() - began_s)


class Training:
    """A training by messages between actors, which begins at once.

    Args:
        trees: samples, each of which is used once.
        settings: settings.
        placement: the nodes of each worker.
    """

    def __init__(
        self, trees: Sequence[Tree], settings: Settings, placement: Sequence[Sequence[str]] = PLACEMENT
    ) -> None:
        import ray  # late: an experiment without it takes a second less to start

        self._ray, self._placement = ray, placement
        # One thread computes, and one takes in messages meanwhile.
        worker: Any = ray.remote(num_cpus=0)(Worker).options(max_concurrency=2)
        self.actors: list[Any] = [worker.remote(hosted, trees, settings) for hosted in placement]
        ray.get([actor.receive.remote([]) for actor in self.actors])  # all are there: none waits for a process to start
        self._runs: list[Any] = []
        for actor in self.actors:
            peers = {
                name: other
                for other, hosted in zip(self.actors, placement, strict=True)
                if other is not actor
                for name in hosted
            }
            self._runs.append(actor.run.remote(peers))

    def result(self) -> Trained:
        """Wait for the end; return the network.

        Raises:
            ClusterError: the process of a worker died.
            TrainingError: a node failed.
        """
        whole = Trained({}, 0, 0.0)
        left = list(self._runs)
        try:
            while left:
                (ended,), left = self._ray.wait(left)
                part = self._ended(ended)
                whole.nodes.update(part.nodes)
                whole.num_sent += part.num_sent
                whole.seconds = max(whole.seconds, part.seconds)
        finally:
            for actor in self.actors:
                self._ray.kill(actor)
        return whole

    def _ended(self, run: Any) -> Trained:
        hosted = ", ".join(self._placement[self._runs.index(run)])
        try:
            part: Trained = self._ray.get(run)
        except self._ray.exceptions.RayActorError as error:
            text = f"The worker with the nodes {hosted} died, and its messages with it; start the training again."
            raise ClusterError(text) from error
        except self._ray.exceptions.RayTaskError as error:
            raise TrainingError(f"A node of the worker with {hosted} failed: {error.cause}") from error
        return part
