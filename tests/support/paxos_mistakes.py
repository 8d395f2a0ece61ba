"""Mistakes in the roles of Paxos, each of which some order of messages and crashes must show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestray.trainers.survey.consensus import node
from orchestray.trainers.survey.consensus.messages import NO_BALLOT, Accepted, Ballot, Value
from orchestray.trainers.survey.consensus.roles import Acceptor, Disk, Learner, Proposer

Mistake = Callable[[pytest.MonkeyPatch], None]


def forgets_its_promise_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    begin = Acceptor.__init__

    def forget(self: Acceptor, disk: Disk) -> None:
        begin(self, disk)
        disk.promised = NO_BALLOT

    patch.setattr(Acceptor, "__init__", forget)


def forgets_its_votes_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    begin = Acceptor.__init__

    def forget(self: Acceptor, disk: Disk) -> None:
        begin(self, disk)
        disk.votes.clear()

    patch.setattr(Acceptor, "__init__", forget)


def keeps_no_promise(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Disk, ballot: Ballot) -> None:
        """Write nothing."""

    patch.setattr(Disk, "write_promise", forget)


def ignores_accepted_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Proposer, "_values_found", lambda self: {})


def takes_the_value_of_the_lowest_ballot(patch: pytest.MonkeyPatch) -> None:
    def lowest(self: Proposer) -> dict[int, Value]:
        votes = [each for promise in self._promises.values() for each in promise.votes]
        return {slot: vote.value for slot, vote in sorted(votes, key=lambda each: each[1].ballot, reverse=True)}

    patch.setattr(Proposer, "_values_found", lowest)


def takes_promises_after_it_has_resigned(patch: pytest.MonkeyPatch) -> None:
    resign = Proposer.resign

    def stay(self: Proposer) -> None:
        stands = self._stands or self.leads
        resign(self)
        self._stands = stands

    patch.setattr(Proposer, "resign", stay)


def has_quorums_of_less_than_a_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node, "majority", lambda num_nodes: num_nodes // 2)


def counts_votes_of_different_ballots_together(patch: pytest.MonkeyPatch) -> None:
    count = Learner.count

    def together(self: Learner, sender: int, vote: Accepted) -> bool:
        return count(self, sender, Accepted(NO_BALLOT, vote.slot, vote.value))

    patch.setattr(Learner, "count", together)
