"""The processes of a search's controllers and of their parameter servers, as members of two gangs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.search.methods.controllers.policy import Policy, Vocabulary, policy_gradient
from orchestray.search.methods.controllers.server import Layout, Learned, push_of
from orchestray.trainers.core.parts import parts_of
from orchestray.trainers.ps.protocol.host_bases import AcceptingHost, dial
from orchestray.trainers.ps.protocol.messages import Link
from orchestray.trainers.ps.protocol.requests import Pull, Request
from orchestray.trainers.ps.server.server import ShardServer

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.choices import Decision
    from orchestray.trainers.ps.protocol.address import Address


class ServerHost(AcceptingHost):
    """A host of one shard of what the controllers have learned."""

    def __init__(self) -> None:
        super().__init__("server of controllers")
        self._server: ShardServer | None = None

    def begin(self, rank: int, address: str, state: Learned, learning_rate: float) -> int:
        """Serve a shard from a state; called again when there are more options than there was room for.

        Args:
            rank: index of the shard.
            address: address of this node.
            state: state of all shards.
            learning_rate: learning rate of Adam.

        Returns:
            The port at which controllers connect.
        """
        self.close()
        self._rank, self._address = rank, address
        self._server = ShardServer(state.machine(rank, learning_rate))
        return int(self._listen().port)

    def accept(self, controller: int, name: str) -> None:
        """Expect a controller under this name, and serve it in a thread of its own."""
        assert self._server is not None
        self._meet(name, f"controller {controller}", self._server.serve)

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """Return the version of the shard, and a copy of its state."""
        assert self._server is not None
        return self._server.version, self._server.snapshot()

    def usage(self) -> dict[str, Any]:
        """Return the process, the version, the bytes that went through this server, both ways, and its parts."""
        version = 0 if self._server is None else self._server.version
        return {"pid": os.getpid(), "version": version, "bytes": self._bytes_moved(), "parts": parts_of(self._server)}

    def close(self) -> None:
        """End the server and every connection."""
        if self._server is not None:
            self._server.close()
        self._expect_nobody()
        self._hang_up()
        self._server = None


@dataclass(frozen=True)
class Lesson:
    """The outcome of a batch: what the controller has fetched after its push."""

    staleness: tuple[int, ...]
    """Number of updates by others, at each shard, since the parameters that the batch was drawn with."""
    versions: tuple[int, ...]
    """Version of each shard."""
    parts: Sequence[Tensor]
    """Learned values, by shard."""


class ControllerHost:
    """A host of one controller: it computes the gradients of its batches, pushes them, and fetches."""

    def __init__(self, hidden: int, seed: int, entropy_weight: float, num_controllers: int) -> None:
        """
        Args:
            hidden: units of the LSTM.
            seed: seed of the initial weights.
            entropy_weight: added reward for each nat of entropy.
            num_controllers: number of controllers.
        """
        self._policy = Policy(Vocabulary(), hidden=hidden, seed=seed)
        self._entropy_weight, self._num_controllers = entropy_weight, num_controllers
        self._links: list[Link] = []

    def connect(
        self,
        controller: int,
        layout: Layout,
        servers: Sequence[Address],
        versions: Sequence[int],
        learned: Mapping[str, Tensor],
    ) -> None:
        """Connect to the server of each shard.

        Args:
            controller: index of this controller.
            layout: layout of the shards.
            servers: address of the server of each shard.
            versions: version of each shard in what this controller has fetched.
            learned: that, by parameter.
        """
        self.close()
        self._controller, self._layout = controller, layout
        self._versions, self._learned = tuple(versions), dict(learned)
        for shard, server in enumerate(servers):
            channel = dial(server, f"controller {controller}", f"server of controllers {shard}")
            self._links.append(Link(shard, channel, controller, replace=None))
        for asked in [link.ask(link.hello(is_new=True)) for link in self._links]:
            asked.wait()

    def learn(
        self,
        names: Sequence[tuple[str, str]],
        sequences: Sequence[Sequence[Decision]],
        advantages: Sequence[float],
        number: int,
    ) -> Lesson:
        """Push the policy gradient of a batch to every shard, and fetch what was learned by then.

        Args:
            names: choice and option of each row.
            sequences: the answers, drawn with what this controller fetched last.
            advantages: reward minus baseline of each sequence.
            number: number of the batch, from 1.

        Raises:
            ChannelClosedError: a server is lost.
        """
        policy = self._policy
        policy.vocabulary.load(names)
        policy.adopt(self._learned)
        gradients = policy_gradient(policy, sequences, advantages, entropy_weight=self._entropy_weight)
        sent = [-part for part in self._layout.cut(gradients)]
        parts = [torch.empty_like(part) for part in sent]
        asked = []
        for link, gradient, into, read in zip(self._links, sent, parts, self._versions, strict=True):
            push = push_of(self._controller, number, read, self._num_controllers)
            asked.append(link.ask(Request(push=push, pull=Pull()), [gradient], into=[into]))
        answers = [one.wait() for one in asked]
        self._versions = tuple(answer.version for answer in answers)
        self._learned = self._layout.joined(parts)
        return Lesson(tuple(answer.staleness for answer in answers), self._versions, parts)

    def identify(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def close(self) -> None:
        """End the connections."""
        for link in self._links:
            link.close()
        self._links = []
