"""Training by many simulated workers takes what the closed forms say, and carries what they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestray.platform.sim.network import Link
from orchestray.trainers.survey.simulated_training import (
    Load,
    gossip,
    gossip_s,
    parameter_server,
    parameter_server_s,
    ring,
    ring_s,
)

LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9)
Scheme = tuple[Callable[..., Any], Callable[..., float]]
SCHEMES: dict[str, Scheme] = {
    "parameter server": (parameter_server, parameter_server_s),
    "gossip": (gossip, gossip_s),
    "ring": (ring, ring_s),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("compute_s", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("num_workers", [2, 3, 16, 50])
def test_a_simulated_training_takes_its_closed_form(name: str, num_workers: int, compute_s: float) -> None:
    simulate, closed_form_s = SCHEMES[name]
    for num_steps, num_bytes in ((1, 10**6), (7, 10**6), (4, 10)):
        load = Load(num_workers, num_steps, num_bytes, compute_s)
        assert simulate(load, LINK).finish_s == pytest.approx(closed_form_s(load, LINK), rel=1e-9)


def test_a_server_of_one_worker_is_that_workers_round_trip() -> None:
    load = Load(num_workers=1, num_steps=5, num_bytes=10**6, compute_s=0.5)
    expected = 5 * (0.5 + 2 * (1e-3 + 1e-3))
    assert parameter_server(load, LINK).finish_s == pytest.approx(expected)
    assert parameter_server_s(load, LINK) == pytest.approx(expected)


def test_what_the_wires_carry_is_a_push_and_a_pull_or_one_message_or_twice_the_tensor_but_a_part() -> None:
    load = Load(num_workers=20, num_steps=6, num_bytes=1000)
    server, gossiped, around = (simulate(load, LINK) for simulate, _ in SCHEMES.values())
    assert (server.num_messages, server.num_bytes) == (2 * 120, 2 * 120_000)
    assert (gossiped.num_messages, gossiped.num_bytes) == (120, 120_000)
    assert (around.num_messages, around.num_bytes) == (6 * 38 * 20, 6 * 38 * 1000)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_thousand_workers_take_the_closed_form_too(name: str) -> None:
    simulate, closed_form_s = SCHEMES[name]
    load = Load(num_workers=1000, num_steps=3, num_bytes=16_000_000, compute_s=0.1)
    found = simulate(load, LINK)
    assert found.finish_s == pytest.approx(closed_form_s(load, LINK), rel=1e-9)
