"""Every order of the messages of a few proposers for one slot: a model of Paxos, checked state by state.

A message that has been sent stays in the network for ever. So each may be late, come twice, out of order, or never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from orchestray.trainers.survey.consensus.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Ballot,
    Prepare,
    Promise,
    Value,
    Vote,
)
from orchestray.trainers.survey.consensus.roles import Acceptor, Disk, Proposer, majority
from support.paxos_mistakes import (
    Mistake,
    ignores_accepted_values,
    keeps_no_promise,
    takes_the_value_of_the_lowest_ballot,
)

BALLOTS = [Ballot(1, 0), Ballot(1, 1), Ballot(2, 0), Ballot(2, 1)]


class Station(NamedTuple):
    """An acceptor's disk, and what it has sent."""

    promised: Ballot = NO_BALLOT
    vote: Vote | None = None
    promises: frozenset[Promise] = frozenset()
    accepted: frozenset[Accepted] = frozenset()

    def after(self, request: Prepare | Accept) -> Station:
        """Return the acceptor after a request."""
        disk = Disk()
        disk.promised, disk.votes = self.promised, {} if self.vote is None else {0: self.vote}
        acceptor = Acceptor(disk)
        answer = acceptor.prepare(request) if isinstance(request, Prepare) else acceptor.accept(request)
        return Station(
            disk.promised,
            disk.votes.get(0),
            self.promises | {answer} if isinstance(answer, Promise) else self.promises,
            self.accepted | {answer} if isinstance(answer, Accepted) else self.accepted,
        )

    def without_promises_of(self, ballot: Ballot) -> Station:
        """Return the acceptor without promises that nobody waits for any more."""
        return self._replace(promises=frozenset(each for each in self.promises if each.ballot != ballot))


class World(NamedTuple):
    """A state of the model; acceptors that change places make the same one."""

    acceptors: tuple[Station, ...]
    proposals: frozenset[Accept] = frozenset()

    def chosen(self, quorum: int) -> set[Value]:
        """Return the values that as many acceptors have accepted in one ballot."""
        votes = Counter(vote for acceptor in self.acceptors for vote in acceptor.accepted)
        return {vote.value for vote, number in votes.items() if number >= quorum}

    def following(self, ballots: list[Ballot], quorum: int) -> Iterator[World]:
        """Yield the states after each message that may arrive next."""
        proposed = {proposal.ballot for proposal in self.proposals}
        waiting = [ballot for ballot in ballots if ballot not in proposed]
        requests = [*(Prepare(ballot, 0) for ballot in ballots), *self.proposals]
        for number, acceptor in enumerate(self.acceptors):
            others = self.acceptors[:number] + self.acceptors[number + 1 :]
            for request in requests:
                after = acceptor.after(request)
                if request.ballot in proposed:
                    after = after.without_promises_of(request.ballot)
                yield World(sorted_by_hash((*others, after)), self.proposals)
        for ballot in waiting:
            rest = sorted_by_hash(acceptor.without_promises_of(ballot) for acceptor in self.acceptors)
            for proposal in self.proposals_of(ballot, quorum):
                yield World(rest, self.proposals | {proposal})

    def proposals_of(self, ballot: Ballot, quorum: int) -> set[Accept]:
        """Return what a proposer may propose, by the promises that come to it first."""
        promises = [
            (number, promise)
            for number, acceptor in enumerate(self.acceptors)
            for promise in acceptor.promises
            if promise.ballot == ballot
        ]
        proposals = set()
        for first in combinations(promises, quorum):
            proposer = Proposer(ballot.node, quorum)
            proposer.prepare(Ballot(ballot.round - 1, 0), first=0)
            found = [accept for sender, promise in first for accept in proposer.take_promise(sender, promise)]
            if proposer.leads:
                proposals.add(found[0] if found else proposer.propose(f"value of {ballot}"))
        return proposals


def sorted_by_hash(acceptors: Iterator[Station] | tuple[Station, ...]) -> tuple[Station, ...]:
    return tuple(sorted(acceptors, key=hash))


def reachable(num_acceptors: int, ballots: list[Ballot], quorum: int) -> Iterator[World]:
    """Yield every state that can be reached, once."""
    first = World((Station(),) * num_acceptors)
    seen, left = {first}, [first]
    while left:
        world = left.pop()
        yield world
        new = set(world.following(ballots, quorum)) - seen
        seen |= new
        left += new


def sizes(num_acceptors: int, num_ballots: int, num_states: int, *, is_slow: bool = False) -> Any:
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(
        num_acceptors, num_ballots, num_states, marks=marks, id=f"{num_acceptors} acceptors, {num_ballots} ballots"
    )


@pytest.mark.parametrize(
    ("num_acceptors", "num_ballots", "num_states"),
    [
        sizes(3, 2, 146),
        sizes(3, 3, 2218),
        sizes(4, 3, 6492),
        sizes(5, 2, 680),
        sizes(3, 4, 36_426, is_slow=True),
        sizes(5, 3, 30_610, is_slow=True),
    ],
)
def test_in_no_state_that_can_be_reached_are_two_values_chosen(
    num_acceptors: int, num_ballots: int, num_states: int
) -> None:
    quorum, ballots = majority(num_acceptors), BALLOTS[:num_ballots]
    found = [world.chosen(quorum) for world in reachable(num_acceptors, ballots, quorum)]
    assert max(map(len, found)) == 1
    assert len(set().union(*found)) == num_ballots  # each proposer's value in some of them
    assert len(found) == num_states  # a model that reaches less proves less


@pytest.mark.parametrize(
    "mistake",
    [keeps_no_promise, ignores_accepted_values, takes_the_value_of_the_lowest_ballot],
    ids=lambda mistake: mistake.__name__,
)
def test_with_a_mistake_two_values_are_chosen_in_some_state(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert any(len(world.chosen(2)) == 2 for world in reachable(3, BALLOTS[:3], 2))


@pytest.mark.parametrize("num_acceptors", [3, 4, 5])
def test_with_a_smaller_quorum_of_promises_two_values_are_chosen_in_some_state(num_acceptors: int) -> None:
    quorum = majority(num_acceptors)
    worlds = reachable(num_acceptors, BALLOTS[:2], num_acceptors - quorum)
    assert any(len(world.chosen(quorum)) == 2 for world in worlds)
