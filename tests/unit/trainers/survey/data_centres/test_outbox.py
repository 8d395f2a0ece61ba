"""Messages from one data centre to another over a link that carries one at a time."""

from __future__ import annotations

import random

import torch

from orchestray.trainers.survey.data_centres.outbox import MOST_PLACES, Barrier, Message, MirrorClock, Outbox, Update

NUM = 200


def outbox(**options: bool) -> tuple[Outbox, list[Message]]:
    sent: list[Message] = []
    return Outbox(torch.zeros(NUM, dtype=torch.float64), sent.append, **options), sent


def send(box: Outbox, *places: int, amount: float = 1.0) -> None:
    box.send_changes(torch.tensor(places), torch.full((len(places),), amount, dtype=torch.float64))


def test_over_a_free_link_changes_go_at_once_without_a_barrier() -> None:
    box, sent = outbox()
    send(box, 3, 5)
    (update,) = sent
    assert isinstance(update, Update)
    assert update.places.tolist() == [3, 5]
    assert update.num_bytes == 2 * (4 + 8)


def test_while_the_link_is_busy_a_barrier_goes_ahead_of_values_that_came_before_it() -> None:
    box, sent = outbox()
    send(box, 1)
    send(box, *range(10, 10 + MOST_PLACES))
    send(box, 3)
    send(box, 3, 4, amount=2.0)  # the place that waits already is not announced twice, and its changes are added up
    for _ in range(9):
        box.freed()
    assert [type(message) for message in sent] == [Update, Barrier, Barrier, Barrier, Update, Update]
    assert [sent[number].places.tolist() for number in (2, 3)] == [[3], [4]]  # type: ignore[union-attr]
    last = sent[-1]
    assert isinstance(last, Update)
    assert (last.places.tolist(), last.change.tolist()) == ([3, 4], [3.0, 2.0])


def test_a_barrier_is_a_bit_for_each_parameter_where_indices_are_more() -> None:
    box, sent = outbox()
    send(box, *range(NUM))
    barrier = sent[0]
    assert isinstance(barrier, Barrier)
    assert barrier.num_bytes == NUM // 8 < sum(each.num_bytes for each in sent[1:]) + NUM * 8


def test_without_barriers_values_alone_are_sent() -> None:
    box, sent = outbox(announces=False)
    send(box, *range(NUM))
    send(box, 7)
    for _ in range(9):
        box.freed()
    assert {type(message) for message in sent} == {Update}


def test_when_a_clock_arrives_every_change_before_it_has_arrived_or_is_announced() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        box, sent = outbox()
        ahead = torch.zeros(NUM, dtype=torch.bool)
        made = torch.zeros(NUM, dtype=torch.float64)
        made_by_clock = [made.clone()]
        for clock in range(1, 30):
            places = sorted(dice.sample(range(NUM), dice.randrange(1, NUM)))
            send(box, *places)
            made[places] += 1
            made_by_clock.append(made.clone())
            box.send_clock(clock)
            for _ in range(dice.randrange(6)):
                box.freed()
        while len(box.waiting):
            box.freed()
        box.freed()
        arrived = torch.zeros(NUM, dtype=torch.float64)
        for message in sent:
            if isinstance(message, Barrier):
                ahead[message.places] = True
            elif isinstance(message, Update):
                arrived[message.places] += message.change
                ahead[message.places] = False
            else:
                assert isinstance(message, MirrorClock)
                assert bool((ahead | (arrived >= made_by_clock[message.clock])).all())
        assert torch.equal(arrived, made)
