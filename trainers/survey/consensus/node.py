"""A node that is acceptor, proposer and learner at once, and stands for leader when it hears of none."""

from __future__ import annotations

import random
from collections.abc import Iterable

from orchestray.trainers.survey.consensus.messages import (
    Accept,
    Accepted,
    Alive,
    Chosen,
    Heartbeat,
    Message,
    Prepare,
    Promise,
    Refused,
    Value,
)
from orchestray.trainers.survey.consensus.roles import Acceptor, Disk, Learner, Proposer, majority

PATIENCE_S = 0.2
"""Seconds without a leader after which a node may stand; more than the time between two heartbeats."""
LOST_S = 0.35
"""Seconds without an answer after which a leader takes a node for lost."""
_MOST_AT_ONCE = 16

Sent = list[tuple[int, Message]]
"""Messages with the node that each goes to."""


class Node:
    """A node of the cluster: messages and times in, messages out. It has no clock, no network and no thread.

    Leaders are elected by chance and time, which safety does not rest on: any number of nodes may take themselves for
    the leader.
    """

    def __init__(
        self,
        number: int,
        num_nodes: int,
        disk: Disk,
        now_s: float,
        rng: random.Random,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            number: number of this node.
            num_nodes: number of nodes.
            disk: what an earlier process of this node has left, or a new one.
            now_s: time on the node's clock, in seconds.
            rng: source of the time it waits before it stands.
            patience_s: seconds without a leader after which it may stand; it waits up to twice as long.
        """
        self.number = number
        self.acceptor = Acceptor(disk)
        self.proposer = Proposer(number, majority(num_nodes))
        self.learner = Learner(majority(num_nodes))
        self._others = [node for node in range(num_nodes) if node != number]
        self._rng = rng
        self._patience_s = patience_s
        self._answered_s: dict[int, float] = {}
        self._stand_at_s = 0.0
        self._wait(now_s)

    @property
    def leads(self) -> bool:
        """True if it takes itself for the leader."""
        return self.proposer.leads

    def alive(self, now_s: float) -> list[int]:
        """Return the nodes, this one included, from which this leader has heard lately."""
        heard = [node for node, at_s in self._answered_s.items() if now_s - at_s < LOST_S]
        return sorted([self.number, *heard])

    def tick(self, now_s: float) -> Sent:
        """Do what time calls for: heartbeats, proposals sent again, or an election."""
        if self.leads:
            again = [message for accept in list(self.proposer.open.values()) for message in self._to_others(accept)]
            return self._to_others(Heartbeat(self.proposer.ballot)) + again
        if now_s < self._stand_at_s:
            return []
        self._wait(now_s)
        request = self.proposer.prepare(self.acceptor.promised, self.learner.first)
        own = self.receive(self.number, request, now_s)  # on the disk before another node hears of it
        assert own
        return self.receive(self.number, own[0][1], now_s) + self._to_others(request)

    def propose(self, value: Value, now_s: float) -> Sent:
        """Propose a value for the next slot; only a leader proposes."""
        return self._ask_all([self.proposer.propose(value)], now_s)

    def receive(self, sender: int, message: Message, now_s: float) -> Sent:
        """Take a message in, and return those that it calls for."""
        match message:
            case Prepare() | Accept() | Heartbeat():
                return self._answer(sender, message, now_s)
            case Promise():
                led = self.leads
                proposals = self.proposer.take_promise(sender, message)
                if self.leads and not led:
                    self._answered_s = dict.fromkeys(self._others, now_s)
                return self._ask_all(proposals, now_s)
            case Accepted():
                if not self.learner.count(sender, message):
                    return []
                self.proposer.close(message.slot)
                return self._to_others(Chosen(message.slot, message.value))
            case Refused():
                if message.promised > self.proposer.ballot:
                    self.proposer.resign()
                return []
            case Alive():
                self._answered_s[sender] = now_s
                return [(sender, Chosen(*each)) for each in self.learner.since(message.first, _MOST_AT_ONCE)]
            case Chosen():
                self.learner.learn(message.slot, message.value)
                self.proposer.close(message.slot)
                return []

    def _answer(self, sender: int, request: Prepare | Accept | Heartbeat, now_s: float) -> Sent:
        """Return the answer; a request that is not refused is a sign of a leader, or of a node that may become it."""
        answer: Message
        if isinstance(request, Prepare):
            answer = self.acceptor.prepare(request)
        elif isinstance(request, Accept):
            answer = self.acceptor.accept(request)
        elif request.ballot < self.acceptor.promised:
            answer = Refused(self.acceptor.promised)
        else:
            answer = Alive(self.learner.first)
        if not isinstance(answer, Refused):
            self._wait(now_s)
            if request.ballot > self.proposer.ballot:
                self.proposer.resign()
        return [(sender, answer)]

    def _ask_all(self, proposals: Iterable[Accept], now_s: float) -> Sent:
        """Let this node's own acceptor vote, and return the requests to the others."""
        sent: Sent = []
        for proposal in proposals:
            if proposal.slot in self.learner.values:  # learned out of order, and so asked for in vain
                self.proposer.close(proposal.slot)
                continue
            sent += self._to_others(proposal)
            for _, vote in self.receive(self.number, proposal, now_s):
                sent += self.receive(self.number, vote, now_s)
        return sent

    def _to_others(self, message: Message) -> Sent:
        return [(node, message) for node in self._others]

    def _wait(self, now_s: float) -> None:
        self._stand_at_s = now_s + self._patience_s * (1 + self._rng.random())
