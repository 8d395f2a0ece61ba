"""The messages of parameter servers, as bytes and back."""

from __future__ import annotations

import math

import pytest

from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.assignments import Compute, Deposit, Finish, Save, Validate, Wait
from orchestray.trainers.ps.protocol.requests import (
    Answer,
    Asking,
    AskingOf,
    Change,
    Entry,
    Header,
    Hello,
    Origin,
    Part,
    Pull,
    Push,
    Report,
    ReportOf,
    Request,
    Snapshot,
    State,
    Stop,
    Traffic,
    Validated,
)

COMPUTE = Compute(7, 2, 0, 1, 0, 2, ((0, 3), (6, 8)), 8, 5, 2, 1, copy=True)
ORDERS = (COMPUTE, Validate(8, 2, 0, 3), Save(9, 2), Deposit(10, 2), Finish("left"), Wait(drain=True))
PUSH = Push(origin=Origin(3, (Part(2, 0, 5, 8), Part(2, 1, 3, 8)), 1), encoding="runs", pieces=3, unused=("a.b",))
MESSAGES = [
    Request(),
    Request(push=PUSH, acknowledge=(Report(7, -0.5),), next=Asking((8,), wait=True, more=4), pull=Pull(2, 1, -1)),
    Request(hello=Hello(-1, is_new=False), tally=Traffic(5, 0, ((3, 0.25),), ("it is late",)), snapshot=Snapshot(4)),
    Request(deposit=(), validated=Validated(8, {"loss": 1.5}), saved=0, deposited=0, residual=True, run_state=True),
    Request(change=Change(1, owes=True), acknowledge_for=(ReportOf(3, Report(7, 0.5, 1, 2)),), refresh=0),
    Request(asks=(AskingOf(3, Asking((), wait=False)),), relay=(Entry(worker=3, leave=True),)),
    Entry(worker=3, took_s=(None, 0.5), acknowledge=(Report(7, 0.5, 1, 2), Report(8, 0.5, 1, 2)), advance=2),
    *(Entry(stop=Stop("until", validate=True), resize=2, dismiss=True), Entry(hand_over=("residual",))),
    *(Answer(order=order, orders=(None, order), more=(COMPUTE,)) for order in ORDERS),
    Answer(error="no", missing=(Part(2, 0, 5, 8),), counts_for=(True, False), relayed=(Answer(saved=True),)),
    Answer(found=["float32", [3], 1, 0, 64], placed=True, run_state='{"loss": NaN}', names=("values",)),
    State('{"shard": {}}', ("values",)),
]


@pytest.mark.parametrize("sections", MESSAGES, ids=lambda sections: type(sections).__name__.lower())
def test_what_is_sent_is_what_arrives(sections: Request | Answer | Entry | State) -> None:
    header = Header(sections, 2, (["float32", [3], 0, 1, 64], None))
    assert Header.decode(type(sections), header.encode()) == header


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_arrives_as_it_is(value: float) -> None:
    sent = Entry(acknowledge=(Report(7, value, 1, 2),))
    (report,) = Header.decode(Entry, Header(sent).encode()).sections.acknowledge
    assert repr(report.loss_sum) == repr(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"pushh":1},0,[]]', r"\(0\.pushh: Unexpected keyword argument\)"),
        (b'[{"pull":{"newer":1}},0,[]]', r"\(0\.pull\.newer: Unexpected keyword argument\)"),
        (b'[{"push":{"origin":{"worker":0,"parts":[],"read_version":"now"}}},0,[]]', r"push\.origin\.read_version"),
        (b'{"push":1}', "Input should be a valid array"),
        (b"", "must have the same version of orchestray"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_a_sentence(content: bytes, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Header.decode(Request, content)


def test_an_order_of_an_unknown_kind_is_refused_too() -> None:
    with pytest.raises(TrainingError, match="cannot be understood"):
        Header.decode(Answer, b'[{"order":{"kind":"reign"}},0,[]]')


def test_a_server_s_log_and_copies_get_the_sections_that_change_it_and_no_others() -> None:
    request = Request(hello=Hello(1, is_new=True), push=PUSH, pull=Pull(), tally=Traffic(1), snapshot=Snapshot())
    assert request.changes == {"hello": request.hello, "push": PUSH}
    assert Request(deposit=()).changes == {"deposit": ()}
    assert Request(pull=Pull()).changes == {}
