"""The rules by which a data centre's workers may read, or wait."""

from __future__ import annotations

from math import inf

import pytest
import torch

from orchestray.platform.sim.network import Link
from orchestray.trainers.survey.data_centres.centre import FULL_SYNCHRONISATION, DataCentre, Rules, most_ahead
from orchestray.trainers.survey.data_centres.outbox import Barrier, Message, MirrorClock, Outbox, Update


def centre(rules: Rules, num_workers: int = 1) -> tuple[DataCentre, list[Message]]:
    """Return data centre 0 of two, of four parameters, and what it sends."""
    sent: list[Message] = []
    values = torch.ones(4, dtype=torch.float64)
    return DataCentre(0, values.clone(), rules, {1: Outbox(values, sent.append)}, num_workers), sent


def at(*places: int) -> torch.Tensor:
    return torch.tensor(places)


def amounts(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_reader_of_an_announced_parameter_waits_until_its_update_arrives_and_readers_of_others_do_not() -> None:
    here, _ = centre(Rules(0.1))
    here.receive(1, Barrier(at(2), 4))
    assert here.blocked_by(0, at(0, 2)) == "barrier"
    assert here.blocked_by(0, at(0, 1, 3)) is None
    here.receive(1, Update(at(1), amounts(0.5), 12))  # of another parameter: nothing changes
    assert here.blocked_by(0, at(2)) == "barrier"
    here.receive(1, Update(at(2), amounts(0.5), 12))
    assert here.blocked_by(0, at(2)) is None
    assert here.values.tolist() == [1.0, 1.5, 1.5, 1.0]


def test_under_full_synchronisation_a_reader_of_any_parameter_waits() -> None:
    here, _ = centre(FULL_SYNCHRONISATION)
    here.receive(1, Barrier(at(2), 4))
    assert here.blocked_by(0, at(0)) == "barrier"


def test_a_worker_waits_while_it_is_as_far_ahead_as_the_bound_of_the_slowest_data_centre() -> None:
    here, _ = centre(Rules(0.1, most_ahead=2))
    here.update(0, at(0), amounts(0.5))
    assert here.blocked_by(0, at(0)) is None
    here.update(0, at(0), amounts(0.5))
    assert here.blocked_by(0, at(0)) == "clock"
    here.receive(1, MirrorClock(1))
    assert here.blocked_by(0, at(0)) is None


def test_a_clock_is_complete_and_sent_once_all_workers_have_completed_it() -> None:
    here, sent = centre(Rules(0.1, most_ahead=1), num_workers=2)
    here.update(0, at(0), amounts(0.01))
    assert here.clock == 0
    assert here.blocked_by(0, at(0)) == "clock"  # of its own data centre
    here.update(1, at(0), amounts(0.01))
    assert here.clock == 1
    assert sent == [MirrorClock(1)]


def test_insignificant_changes_are_read_here_and_cross_once_they_add_up_to_the_threshold() -> None:
    here, sent = centre(Rules(0.1, falls=False))
    for number in range(1, 3):
        here.update(0, at(1), amounts(0.04))
        assert here.values[1] == pytest.approx(1 + 0.04 * number)
    assert not any(isinstance(message, Update) for message in sent)
    here.update(0, at(1), amounts(0.04))
    assert float(here.residual.pending.abs().max()) == 0.0


def test_the_threshold_falls_with_the_root_of_the_clock() -> None:
    here, _ = centre(Rules(0.1))
    for _ in range(16):
        here.update(0, at(0), amounts(0.0))
    here.update(0, at(0, 1), amounts(0.02, 0.03))  # 0.1 / sqrt(17) is 0.024
    assert here.residual.pending.tolist() == pytest.approx([0.02, 0, 0, 0])


def test_the_bound_is_the_number_of_clocks_in_a_round_trip() -> None:
    assert most_ahead(Link(latency_s=0.02), 0.01) == 4
    assert most_ahead(Link(latency_s=0.021), 0.01) == 5
    assert most_ahead(Link(latency_s=0.0001), 0.01) == 1
    assert Rules(0.1).most_ahead == inf
