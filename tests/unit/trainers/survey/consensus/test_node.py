"""Nodes that are handed each other's messages."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from orchestray.trainers.survey.consensus.messages import Accept, Accepted, Ballot, Chosen, Heartbeat, Prepare, Refused
from orchestray.trainers.survey.consensus.node import LOST_S, PATIENCE_S, Node, Sent
from orchestray.trainers.survey.consensus.roles import Disk

LATER_S = 2 * PATIENCE_S


class Group:
    """Some nodes, and a network that delivers at once and in order, but to nobody who is gone."""

    def __init__(self, num_nodes: int) -> None:
        self.nodes = {number: self.node(number, num_nodes) for number in range(num_nodes)}
        self.sent: Counter[type] = Counter()

    @staticmethod
    def node(number: int, num_nodes: int) -> Node:
        return Node(number, num_nodes, Disk(), 0.0, random.Random(number))

    def deliver(self, sender: int, sent: Sent, now_s: float) -> None:
        queue = [(sender, *each) for each in sent]
        while queue:
            come_from, receiver, message = queue.pop(0)
            self.sent[type(message)] += 1
            if receiver in self.nodes:
                answers = self.nodes[receiver].receive(come_from, message, now_s)
                queue += [(receiver, *each) for each in answers]

    def tick(self, number: int, now_s: float) -> None:
        self.deliver(number, self.nodes[number].tick(now_s), now_s)

    def propose(self, number: int, value: str, now_s: float) -> None:
        self.deliver(number, self.nodes[number].propose(value, now_s), now_s)


@pytest.mark.parametrize("num_nodes", [3, 5, 7])
def test_a_decision_under_one_leader_takes_three_messages_for_each_other_node(num_nodes: int) -> None:
    group = Group(num_nodes)
    group.tick(0, LATER_S)
    group.sent.clear()
    for value in "abc":
        group.propose(0, value, LATER_S)
    others = 3 * (num_nodes - 1)
    assert group.sent == {Accept: others, Accepted: others, Chosen: others}
    assert all(node.learner.values == dict(enumerate("abc")) for node in group.nodes.values())


def test_nobody_stands_before_its_patience_is_at_its_end() -> None:
    group = Group(3)
    group.tick(0, PATIENCE_S * 0.99)
    assert not group.sent
    group.tick(0, LATER_S)
    assert group.sent[Prepare] == 2
    group.tick(1, LATER_S + PATIENCE_S * 0.99)  # it has promised, and waits again
    assert group.sent[Prepare] == 2


def test_a_lone_node_of_three_never_leads() -> None:
    group = Group(3)
    del group.nodes[1], group.nodes[2]
    for step in range(1, 20):
        group.tick(0, step * LATER_S)
    assert not group.nodes[0].leads


def test_a_leader_that_is_lost_is_replaced_and_its_open_proposal_is_decided() -> None:
    group = Group(3)
    group.tick(0, LATER_S)
    sent = group.nodes[0].propose("half way", LATER_S)
    del group.nodes[0]
    group.deliver(0, [each for each in sent if each[0] == 1], LATER_S)  # node 2 does not get it
    assert group.nodes[1].learner.values == {}
    group.tick(2, 3 * LATER_S)
    assert group.nodes[2].leads
    assert group.nodes[2].learner.values == group.nodes[1].learner.values == {0: "half way"}


def test_a_leader_that_comes_back_is_refused_and_resigns() -> None:
    group = Group(3)
    group.tick(0, LATER_S)
    old = group.nodes.pop(0)
    group.tick(1, 3 * LATER_S)
    group.nodes[0] = old
    assert old.leads
    assert group.nodes[1].leads
    assert group.nodes[2].receive(0, Heartbeat(old.proposer.ballot), 3 * LATER_S) == [(0, Refused(Ballot(2, 1)))]
    group.tick(0, 3 * LATER_S)
    assert not old.leads
    assert group.nodes[1].leads


@pytest.mark.parametrize("kind", [Prepare, Accept, Heartbeat])
def test_a_leader_that_hears_of_a_higher_ballot_resigns(kind: type) -> None:
    group = Group(3)
    group.tick(0, LATER_S)
    ballot = Ballot(2, 1)
    requests = {Prepare: Prepare(ballot, 0), Accept: Accept(ballot, 0, "a"), Heartbeat: Heartbeat(ballot)}
    group.nodes[0].receive(1, requests[kind], LATER_S)
    assert not group.nodes[0].leads


def test_a_node_that_has_missed_decisions_gets_them_with_the_next_heartbeat() -> None:
    group = Group(3)
    group.tick(0, LATER_S)
    late = group.nodes.pop(2)
    for value in "abc":
        group.propose(0, value, LATER_S)
    group.nodes[2] = late
    group.tick(0, LATER_S)
    assert late.learner.values == dict(enumerate("abc"))


def test_a_leader_takes_those_for_lost_that_have_not_answered_for_a_while() -> None:
    group = Group(3)
    group.tick(0, LATER_S)
    assert group.nodes[0].alive(LATER_S) == [0, 1, 2]
    del group.nodes[1]
    group.tick(0, LATER_S + LOST_S)
    assert group.nodes[0].alive(LATER_S + LOST_S) == [0, 2]


def test_a_slot_that_was_learned_out_of_order_is_not_asked_for_again() -> None:
    group = Group(3)
    group.nodes[1].receive(2, Chosen(1, "known"), 0.0)
    for number in (1, 2):
        group.nodes[number].acceptor.accept(Accept(Ballot(1, 0), 1, "known"))
    group.tick(1, LATER_S)
    assert group.nodes[1].leads
    assert group.nodes[1].proposer.open == {}
