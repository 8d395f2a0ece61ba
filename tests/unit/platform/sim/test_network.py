"""The simulated network against the closed forms of the alpha-beta model, exactly and deterministically."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.comm.channel import Channel, ChannelClosedError, ChannelTimeoutError
from orchestray.platform.sim.network import Link, SimulatedNetwork, lockstep_round

ALPHA_S, BANDWIDTH = 1e-3, 1e6
LINK = Link(latency_s=ALPHA_S, bandwidth_bytes_per_s=BANDWIDTH)
Steps = Generator[Any, Any, Any]


def weightless(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def start_pair(
    network: SimulatedNetwork, sender: Callable[[Any], Steps], receiver: Callable[[Any], Steps]
) -> tuple[Any, Any]:
    here, there = network.pair("sender", "receiver")

    def send() -> Steps:
        return (yield from sender(here))

    def receive() -> Steps:
        return (yield from receiver(there))

    return network.start("sender", send), network.start("receiver", receive)


def ring_all_reduce(network: SimulatedNetwork, num_ranks: int, num_bytes: int) -> float:
    """Run two times (P - 1) rounds of one P-th; return the finish time."""
    pairs = [network.pair(str(rank), str((rank + 1) % num_ranks)) for rank in range(num_ranks)]

    def program(rank: int) -> Callable[[], Steps]:
        to_next, from_previous = pairs[rank][0], pairs[rank - 1][1]

        def steps() -> Steps:
            for _ in range(2 * (num_ranks - 1)):
                yield to_next.isend(weightless(num_bytes // num_ranks)), from_previous.irecv()

        return steps

    for rank in range(num_ranks):
        network.start(str(rank), program(rank))
    return network.run()


def parameter_server(network: SimulatedNetwork, num_workers: int, num_steps: int, num_bytes: int) -> float:
    """Let each worker push and then pull, `num_steps` times, with one server; return the finish time."""

    def worker(end: Any) -> Callable[[], Steps]:
        def steps() -> Steps:
            for _ in range(num_steps):
                yield end.isend(weightless(num_bytes), tag="push")
                yield end.irecv(tag="pull")

        return steps

    def serve(end: Any) -> Callable[[], Steps]:
        def steps() -> Steps:
            for _ in range(num_steps):
                yield end.irecv(tag="push")
                yield end.isend(weightless(num_bytes), tag="pull")

        return steps

    for rank in range(num_workers):
        here, there = network.pair(f"worker/{rank}", "server")
        network.start(f"worker/{rank}", worker(here))
        network.start("server", serve(there))
    return network.run()


def test_a_message_takes_latency_plus_bytes_over_bandwidth() -> None:
    network = SimulatedNetwork(LINK)

    def send(end: Any) -> Steps:
        yield end.isend(weightless(5000))
        return network.now_s

    def receive(end: Any) -> Steps:
        yield end.irecv()
        return network.now_s

    sender, receiver = start_pair(network, send, receive)
    assert network.run() == pytest.approx(ALPHA_S + 5e-3)
    assert sender.result == pytest.approx(5e-3), "a send is done when the last byte has left"
    assert receiver.result == pytest.approx(ALPHA_S + 5e-3)


def test_a_link_carries_one_message_at_a_time() -> None:
    network = SimulatedNetwork(LINK)

    def send(end: Any) -> Steps:
        yield [end.isend(weightless(1000)) for _ in range(4)]

    def receive(end: Any) -> Steps:
        times = []
        for _ in range(4):
            yield end.irecv()
            times.append(network.now_s)
        return times

    _, receiver = start_pair(network, send, receive)
    network.run()
    assert receiver.result == pytest.approx([ALPHA_S + k * 1e-3 for k in (1, 2, 3, 4)])
    assert network.traffic["sender", "receiver"].busy_s == pytest.approx(4e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ring_all_reduce_takes_its_closed_form_and_carries_its_formula(num_ranks: int) -> None:
    network, num_bytes = SimulatedNetwork(LINK), 24_000
    rounds, part = 2 * (num_ranks - 1), num_bytes // num_ranks
    assert ring_all_reduce(network, num_ranks, num_bytes) == pytest.approx(rounds * (ALPHA_S + part / BANDWIDTH))
    carried = [traffic.num_bytes for traffic in network.traffic.values() if traffic.num_bytes]
    assert carried == [rounds * part] * num_ranks


def test_with_unit_latency_the_finish_time_counts_rounds() -> None:
    assert ring_all_reduce(SimulatedNetwork(Link(latency_s=1)), 8, 800) == 14


def test_lockstep_rounds_equal_the_simulation() -> None:
    num_ranks, num_bytes = 5, 10_000
    ready_s = np.zeros(num_ranks)
    previous = np.arange(num_ranks) - 1
    for _ in range(2 * (num_ranks - 1)):
        ready_s = lockstep_round(ready_s, previous, num_bytes / num_ranks, LINK)
    assert ready_s.max() == pytest.approx(ring_all_reduce(SimulatedNetwork(LINK), num_ranks, num_bytes))


def test_with_node_ports_a_server_takes_in_one_worker_at_a_time() -> None:
    workers, num_bytes = 10, 2000
    transfer_s = num_bytes / BANDWIDTH
    alone_s = 2 * (ALPHA_S + transfer_s)
    assert parameter_server(SimulatedNetwork(LINK), workers, 1, num_bytes) == pytest.approx(alone_s)
    shared_s = parameter_server(SimulatedNetwork(LINK, ports="node"), workers, 1, num_bytes)
    # The pushes queue for the server's port in; the pulls overlap with them but for the last.
    assert shared_s == pytest.approx(2 * ALPHA_S + (workers + 1) * transfer_s)


def test_links_may_differ() -> None:
    def link(sender: str, receiver: str) -> Link:
        return Link(latency_s=7) if (sender, receiver) == ("receiver", "sender") else Link(latency_s=1)

    network = SimulatedNetwork(link)

    def ping(end: Any) -> Steps:
        yield end.isend(weightless(1))
        yield end.irecv()

    def pong(end: Any) -> Steps:
        yield end.irecv()
        yield end.isend(weightless(1))

    start_pair(network, ping, pong)
    assert network.run() == 8


def lossy_run(seed: int, link: Link) -> tuple[list[float], SimulatedNetwork]:
    network = SimulatedNetwork(link, seed=seed)

    def send(end: Any) -> Steps:
        yield [end.isend(torch.tensor(float(i))) for i in range(200)]
        end.close()

    def receive(end: Any) -> Steps:
        got = []
        while True:
            try:
                got.append(float((yield end.irecv()).tensor))
            except ChannelClosedError:
                return got

    _, receiver = start_pair(network, send, receive)
    network.run()
    return receiver.result, network


def test_loss_without_retransmission_loses_the_same_messages_for_the_same_seed() -> None:
    link = Link(latency_s=1, loss=0.3)
    first, network = lossy_run(1, link)
    assert first == lossy_run(1, link)[0] != lossy_run(2, link)[0]
    traffic = network.traffic["sender", "receiver"]
    assert len(first) + traffic.num_lost == traffic.num_messages == 200
    assert 30 < traffic.num_lost < 90  # 60 expected, 4.6 sigma


def test_loss_with_retransmission_loses_nothing_keeps_the_order_and_costs_time() -> None:
    got, network = lossy_run(1, Link(latency_s=1, loss=0.3, retransmit_s=5))
    assert got == [float(i) for i in range(200)]
    traffic = network.traffic["sender", "receiver"]
    assert traffic.num_messages == 200 + traffic.num_lost
    assert network.now_s >= 6


def test_a_small_message_does_not_overtake_a_large_one_that_was_lost_at_first() -> None:
    network = SimulatedNetwork(Link(latency_s=1, bandwidth_bytes_per_s=100, loss=0.5, retransmit_s=50))
    sizes = [1000, 1] * 20

    def send(end: Any) -> Steps:
        yield [end.isend(weightless(size)) for size in sizes]

    def receive(end: Any) -> Steps:
        messages = yield [end.irecv() for _ in sizes]
        return [message.tensor.numel() for message in messages]

    _, receiver = start_pair(network, send, receive)
    network.run()
    assert network.traffic["sender", "receiver"].num_lost > 0
    assert receiver.result == sizes


def test_functions_in_threads_and_generators_take_the_same_virtual_time() -> None:
    def as_generators() -> float:
        network = SimulatedNetwork(LINK)

        def ping(end: Any) -> Steps:
            for _ in range(3):
                yield network.sleep(0.25)
                yield end.isend(weightless(100))
                yield end.irecv()

        def pong(end: Any) -> Steps:
            for _ in range(3):
                yield end.irecv()
                yield end.isend(weightless(700))

        start_pair(network, ping, pong)
        return network.run()

    def as_functions() -> float:
        network = SimulatedNetwork(LINK)
        here, there = network.pair("sender", "receiver")

        def ping() -> None:
            for _ in range(3):
                network.sleep(0.25).wait()
                here.send(weightless(100))
                here.recv()

        def pong() -> None:
            for _ in range(3):
                there.recv()
                there.send(weightless(700))

        network.start("sender", ping)
        network.start("receiver", pong)
        return network.run()

    assert as_generators() == as_functions() == pytest.approx(3 * (0.25 + 2 * ALPHA_S + 8e-4))


def test_timeouts_are_virtual() -> None:
    network = SimulatedNetwork(Link(latency_s=3600))

    def send(end: Any) -> Steps:
        yield end.isend(torch.ones(1))

    def receive(end: Any) -> Steps:
        handle = end.irecv()
        with pytest.raises(
            ChannelTimeoutError, match="receiver waited for sender to send a message: nothing within 60 s"
        ):
            yield handle.within(60)
        assert network.now_s == 60
        message = yield handle
        return float(message.tensor)

    _, receiver = start_pair(network, send, receive)
    assert network.run() == 3600
    assert receiver.result == 1


def test_replicas_that_wait_for_each_other_get_an_error_and_no_hang() -> None:
    network = SimulatedNetwork(LINK)
    here, there = network.pair("a", "b")
    network.start("a", here.recv)

    def generator() -> Steps:
        yield there.irecv(tag="reply")

    network.start("b", generator)
    with pytest.raises(ChannelTimeoutError, match="a waited for b to send a message: nothing is under way any more"):
        network.run()


def test_a_killed_replica_closes_its_channels_behind_what_it_had_sent() -> None:
    network = SimulatedNetwork(Link(latency_s=10))

    def dying(end: Any) -> Steps:
        for _ in range(100):
            yield end.isend(torch.ones(1))
            yield network.sleep(1)

    def survivor(end: Any) -> Steps:
        num_received = 0
        while True:
            try:
                yield end.irecv()
            except ChannelClosedError as error:
                return num_received, network.now_s, str(error)
            num_received += 1

    victim, receiver = start_pair(network, dying, survivor)
    network.kill("sender", at_s=4.5)
    network.run()
    assert victim.killed
    assert victim.finished_s == 4.5
    assert receiver.result == (
        *(5, 14.5),
        "the channel of receiver to sender is closed: the peer closed it or died",
    )


def test_a_killed_function_ends_its_thread() -> None:
    network = SimulatedNetwork(LINK)
    here, there = network.pair("a", "b")
    network.start("a", here.recv)

    def survivor(end: Channel) -> str:
        with pytest.raises(ChannelClosedError):
            end.recv()
        return "survived"

    other = network.start("b", lambda: survivor(there))
    network.kill("a", at_s=1)
    network.run()
    assert other.result == "survived"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica ")]


def test_an_error_in_a_replica_reaches_its_peers_and_the_caller_of_run() -> None:
    network = SimulatedNetwork(LINK)

    def failing(end: Any) -> Steps:
        yield network.sleep(1)
        raise ZeroDivisionError("in a replica")

    def peer(end: Any) -> Steps:
        with pytest.raises(ChannelClosedError):
            yield end.irecv()
        return "told"

    _, receiver = start_pair(network, failing, peer)
    with pytest.raises(ZeroDivisionError, match="in a replica"):
        network.run()
    assert receiver.result == "told"


def test_waiting_outside_a_replica_or_inside_a_generator_says_what_to_do() -> None:
    network = SimulatedNetwork(LINK)
    here, _ = network.pair("a", "b")
    with pytest.raises(RuntimeError, match="a generator yields its handles"):
        here.recv()

    def wrong() -> Steps:
        yield 3

    network.start("a", wrong)
    with pytest.raises(TypeError, match="yields the handles it waits for, got 3"):
        network.run()


@pytest.mark.parametrize("wrong", [{"latency_s": -1}, {"bandwidth_bytes_per_s": 0}, {"loss": 1.0}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a link has"):
        Link(**wrong)


def test_a_thousand_workers_and_a_server_take_their_closed_form() -> None:
    workers, steps, num_bytes = 1000, 3, 16_000_000  # 16 GB of gradients a step, none of them in memory
    link = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e10)
    finish_s = parameter_server(SimulatedNetwork(link, ports="node"), workers, steps, num_bytes)
    # The server's port in is busy from the first push to the last; before it a latency, after it the last worker's
    # pull.
    assert finish_s == pytest.approx(2e-3 + (steps * workers + 1) * num_bytes / 1e10)
    assert math.isfinite(finish_s)
