"""The three roles of Paxos: acceptors, proposers and learners, without clocks and networks.

Source: Lamport 2001, "Paxos made simple", section 2 (one value) and section 3 (many slots under one leader). A value is
chosen once a majority of the acceptors has accepted it in one ballot. Two majorities share an acceptor, so a later
ballot finds any value that may be chosen, and proposes it again.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.trainers.survey.consensus.messages import (
    NO_BALLOT,
    NO_VALUE,
    Accept,
    Accepted,
    Ballot,
    Prepare,
    Promise,
    Refused,
    Value,
    Vote,
)


def majority(num_nodes: int) -> int:
    """Return the size of the smallest sets of which any two share a node."""
    return num_nodes // 2 + 1


class Disk:
    """The part of an acceptor that outlives its process: its highest promise, and its vote for each slot."""

    def __init__(self) -> None:
        self.promised = NO_BALLOT
        self.votes: dict[int, Vote] = {}

    def write_promise(self, ballot: Ballot) -> None:
        """Keep a promise; it is durable when this returns."""
        self.promised = ballot

    def write_vote(self, slot: int, vote: Vote) -> None:
        """Keep a vote, which implies the promise of its ballot; both are durable when this returns."""
        self.promised = vote.ballot
        self.votes[slot] = vote


class Acceptor:
    """A node's vote. What it answers is on its disk before it answers."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def promised(self) -> Ballot:
        """Highest ballot that it has promised or accepted."""
        return self._disk.promised

    def prepare(self, request: Prepare) -> Promise | Refused:
        """Promise to accept nothing below the request's ballot, or refuse because of a higher promise."""
        if request.ballot < self.promised:
            return Refused(self.promised)
        self._disk.write_promise(request.ballot)
        votes = sorted((slot, vote) for slot, vote in self._disk.votes.items() if slot >= request.first)
        return Promise(request.ballot, tuple(votes))

    def accept(self, request: Accept) -> Accepted | Refused:
        """Accept a value, or refuse because of a higher promise."""
        if request.ballot < self.promised:
            return Refused(self.promised)
        self._disk.write_vote(request.slot, Vote(request.ballot, request.value))
        return Accepted(request.ballot, request.slot, request.value)


class Proposer:
    """A node's attempts to lead: a ballot that a majority has promised, and the proposals under it.

    Attributes:
        ballot: its latest ballot.
        leads: True if a majority has promised the ballot, and no higher one has been heard of.
        open: proposals of the ballot, by slot, that are not known to be chosen.
    """

    def __init__(self, node: int, quorum: int) -> None:
        """
        Args:
            node: number of this node.
            quorum: number of promises that make a leader.
        """
        self._node = node
        self._quorum = quorum
        self.ballot = NO_BALLOT
        self.leads = False
        self.open: dict[int, Accept] = {}
        self._stands = False
        self._first = 0
        self._next = 0
        self._promises: dict[int, Promise] = {}

    def prepare(self, above: Ballot, first: int) -> Prepare:
        """Begin a ballot; the node's own acceptor must promise it before any other hears of it.

        A process that is started again after a crash then never uses a ballot twice: its disk has the promise.

        Args:
            above: highest ballot that this node has promised.
            first: first slot of which the value is not known.
        """
        self.resign()
        self.ballot = Ballot(max(above.round, self.ballot.round) + 1, self._node)
        self._stands, self._first = True, first
        return Prepare(self.ballot, first)

    def take_promise(self, sender: int, promise: Promise) -> list[Accept]:
        """Count a promise; with those of a majority, lead and return the proposals that earlier ballots call for."""
        if promise.ballot != self.ballot or not self._stands:
            return []
        self._promises[sender] = promise
        if len(self._promises) < self._quorum:
            return []
        self.leads, self._stands = True, False
        found = self._values_found()
        self._next = max(found, default=self._first - 1) + 1
        return [self._open(slot, found.get(slot, NO_VALUE)) for slot in range(self._first, self._next)]

    def propose(self, value: Value) -> Accept:
        """Return the proposal of a value for the next slot; only a leader proposes."""
        assert self.leads
        self._next += 1
        return self._open(self._next - 1, value)

    def close(self, slot: int) -> None:
        """Forget a proposal whose slot has its value."""
        self.open.pop(slot, None)

    def resign(self) -> None:
        """Give up the ballot for good: a higher one has been heard of.

        Late promises would else make a leader that proposes other values under the same ballot.
        """
        self.leads = self._stands = False
        self.open = {}
        self._promises = {}

    def _values_found(self) -> dict[int, Value]:
        """Return for each slot the value of the highest ballot in the promises: no other one can be chosen."""
        newest: dict[int, Vote] = {}
        for promise in self._promises.values():
            for slot, vote in promise.votes:
                if slot not in newest or vote.ballot > newest[slot].ballot:
                    newest[slot] = vote
        return {slot: vote.value for slot, vote in newest.items()}

    def _open(self, slot: int, value: Value) -> Accept:
        self.open[slot] = Accept(self.ballot, slot, value)
        return self.open[slot]


class Learner:
    """The values that a node knows to be chosen.

    Attributes:
        values: the values, by slot.
        first: first slot without one.
    """

    def __init__(self, quorum: int) -> None:
        """
        Args:
            quorum: number of votes of one ballot that choose a value.
        """
        self._quorum = quorum
        self.values: dict[int, Value] = {}
        self.first = 0
        self._votes: dict[tuple[int, Ballot], set[int]] = {}

    def count(self, sender: int, vote: Accepted) -> bool:
        """Count a vote; return True if the value is chosen by it."""
        if vote.slot in self.values:
            return False
        voters = self._votes.setdefault((vote.slot, vote.ballot), set())
        voters.add(sender)
        if len(voters) < self._quorum:
            return False
        self.learn(vote.slot, vote.value)
        return True

    def learn(self, slot: int, value: Value) -> None:
        """Take a value that is chosen."""
        self.values.setdefault(slot, value)
        while self.first in self.values:
            self.first += 1

    def since(self, slot: int, most: int) -> Iterator[tuple[int, Value]]:
        """Yield slots and values from a slot on, `most` of them at most, up to the first that is not known."""
        for each in range(slot, min(self.first, slot + most)):
            yield each, self.values[each]
