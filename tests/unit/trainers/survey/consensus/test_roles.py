"""Acceptors, proposers and learners, each alone."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.consensus.messages import (
    NO_BALLOT,
    NO_VALUE,
    Accept,
    Accepted,
    Ballot,
    Prepare,
    Promise,
    Refused,
    Vote,
)
from orchestray.trainers.survey.consensus.roles import Acceptor, Disk, Learner, Proposer, majority

LOW, HIGH = Ballot(1, 2), Ballot(2, 0)


def promise(ballot: Ballot, **votes: tuple[Ballot, str]) -> Promise:
    """Return a promise with votes by slot, as `s3=(ballot, value)`."""
    return Promise(ballot, tuple((int(slot[1:]), Vote(*vote)) for slot, vote in votes.items()))


@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_two_majorities_share_a_node_and_smaller_sets_need_not(num_nodes: int) -> None:
    assert 2 * majority(num_nodes) > num_nodes >= 2 * (majority(num_nodes) - 1)


def test_an_acceptor_refuses_ballots_below_its_promise_also_in_a_new_process_on_the_same_disk() -> None:
    disk = Disk()
    assert Acceptor(disk).prepare(Prepare(HIGH, 0)) == Promise(HIGH, ())
    for acceptor in (Acceptor(disk), Acceptor(disk)):
        assert acceptor.prepare(Prepare(LOW, 0)) == Refused(HIGH)
        assert acceptor.accept(Accept(LOW, 0, "a")) == Refused(HIGH)
    assert Acceptor(disk).accept(Accept(HIGH, 0, "b")) == Accepted(HIGH, 0, "b")


def test_a_vote_is_a_promise_of_its_ballot() -> None:
    acceptor = Acceptor(Disk())
    acceptor.accept(Accept(HIGH, 0, "a"))
    assert acceptor.prepare(Prepare(LOW, 0)) == Refused(HIGH)


def test_a_promise_has_the_votes_from_the_slot_of_interest_on_also_in_a_new_process() -> None:
    disk = Disk()
    for slot in (3, 1, 2):
        Acceptor(disk).accept(Accept(LOW, slot, f"of {slot}"))
    found = Acceptor(disk).prepare(Prepare(HIGH, 2))
    assert found == promise(HIGH, s2=(LOW, "of 2"), s3=(LOW, "of 3"))


def test_a_leader_proposes_the_value_of_the_highest_ballot_and_fills_slots_that_nobody_voted_in() -> None:
    proposer = Proposer(0, quorum=2)
    ballot = proposer.prepare(Ballot(4, 1), first=5).ballot
    assert ballot > Ballot(4, 1)
    assert proposer.take_promise(0, promise(ballot, s5=(HIGH, "new"), s7=(LOW, "one"))) == []
    found = proposer.take_promise(1, promise(ballot, s5=(LOW, "old")))
    assert found == [Accept(ballot, 5, "new"), Accept(ballot, 6, NO_VALUE), Accept(ballot, 7, "one")]
    assert proposer.propose("next") == Accept(ballot, 8, "next")


def test_a_promise_that_comes_twice_counts_once() -> None:
    proposer = Proposer(0, quorum=2)
    ballot = proposer.prepare(NO_BALLOT, first=0).ballot
    for _ in range(3):
        proposer.take_promise(1, promise(ballot))
    assert not proposer.leads
    proposer.take_promise(2, promise(ballot))
    assert proposer.leads


def test_promises_that_come_after_a_proposer_has_resigned_make_no_leader() -> None:
    proposer = Proposer(0, quorum=2)
    ballot = proposer.prepare(NO_BALLOT, first=0).ballot
    proposer.take_promise(0, promise(ballot))
    proposer.resign()
    assert proposer.take_promise(1, promise(ballot)) == proposer.take_promise(2, promise(ballot)) == []
    assert not proposer.leads


def test_a_proposer_never_uses_a_ballot_twice_also_in_a_new_process_on_the_same_disk() -> None:
    disk, used = Disk(), list[Ballot]()
    for _ in range(3):
        proposer = Proposer(1, quorum=2)
        for _ in range(2):
            request = proposer.prepare(Acceptor(disk).promised, first=0)
            Acceptor(disk).prepare(request)
            used.append(request.ballot)
    assert used == sorted(set(used))


def test_a_value_is_chosen_by_the_votes_of_a_majority_in_one_ballot() -> None:
    learner = Learner(quorum=2)
    assert not learner.count(0, Accepted(LOW, 0, "a"))
    assert not learner.count(0, Accepted(LOW, 0, "a"))
    assert not learner.count(1, Accepted(HIGH, 0, "b"))
    assert learner.count(2, Accepted(HIGH, 0, "b"))
    assert not learner.count(0, Accepted(HIGH, 0, "b"))
    assert (learner.values, learner.first) == ({0: "b"}, 1)


def test_values_are_known_without_a_gap_up_to_the_first_that_is_not() -> None:
    learner = Learner(quorum=2)
    for slot in (2, 0, 3):
        learner.learn(slot, f"of {slot}")
    assert (learner.first, list(learner.since(0, 9))) == (1, [(0, "of 0")])
    learner.learn(1, "of 1")
    assert (learner.first, list(learner.since(1, 2))) == (4, [(1, "of 1"), (2, "of 2")])
