"""Workers under parameter servers, as threads: what comes out is what one process would have come to."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from orchestray.platform.comm.channel import Channel, ChannelClosedError, FaultScript, GlooChannel
from orchestray.trainers.ps.protocol.assignments import Compute, Finish, Order
from orchestray.trainers.ps.protocol.messages import ANSWER, REQUEST, ServerError
from orchestray.trainers.ps.protocol.requests import Answer, Entry, Header, Origin, Part, Push
from orchestray.trainers.ps.server.state_machine import Machine
from support.central import JOIN_S, Plan, Schedule, Servers, Worker, run_all, spawn, train_central, train_plain

torch.set_num_threads(1)

_SOON_S = 20.0
"""Time for what takes milliseconds, unless it waits for what will never come."""
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd", "momentum": 0.9},
    {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"type": "adam"},
    {"type": "adamw"},
    {"type": "adagrad"},
    {"type": "rmsprop", "momentum": 0.5},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_a_synchronous_parameter_server_is_the_single_process(optimizer: dict[str, Any]) -> None:
    schedule = {"type": "cosine", "warmup_steps": 2}
    plan = Plan("synchronous", num_workers=3, shards=3, optimizer=optimizer, schedule=schedule)
    values, losses, _ = train_central(plan)
    wanted, wanted_losses, _ = train_plain(plan)
    assert float((values - wanted).abs().max()) <= 1e-12
    assert losses == pytest.approx(wanted_losses, rel=0, abs=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_an_asynchronous_server_with_one_worker_is_plain_training_bit_for_bit(optimizer: dict[str, Any]) -> None:
    wanted, wanted_losses, _ = train_plain(Plan(optimizer=optimizer))
    for shards in (1, 2, 5):
        values, losses, workers = train_central(Plan("asynchronous", shards=shards, optimizer=optimizer))
        assert torch.equal(values, wanted)
        assert losses == wanted_losses
        assert {result.staleness for result in workers[0].results} == {0}


@pytest.mark.parametrize("consistency", ["synchronous", "stale"])
def test_many_shards_are_one_shard_bit_for_bit(consistency: str) -> None:
    adam = {"type": "adam"}
    one, *others = (train_central(Plan(consistency, shards=shards, optimizer=adam))[0] for shards in (1, 2, 3, 5))
    assert all(torch.equal(one, other) for other in others)


def test_stale_training_with_a_bound_of_zero_is_synchronous_bit_for_bit_and_the_single_process() -> None:
    plan = Plan("stale", staleness=0, num_workers=3, shards=2)
    values, losses, _ = train_central(plan)
    assert torch.equal(values, train_central(replace(plan, consistency="synchronous"))[0])
    wanted, wanted_losses, _ = train_plain(plan)
    assert float((values - wanted).abs().max()) <= 1e-12
    assert losses == pytest.approx(wanted_losses, rel=0, abs=1e-12)


def test_every_sample_of_every_epoch_is_used_once_whatever_the_consistency() -> None:
    for consistency in ("asynchronous", "stale", "synchronous"):
        plan = Plan(consistency, staleness=1, num_workers=3, shards=2, steps=8)
        _, _, workers = train_central(plan)
        pieces = sorted((o.epoch, *piece) for worker in workers for o in worker.applied for piece in o.pieces)
        positions = [(epoch, position) for epoch, start, stop in pieces for position in range(start, stop)]
        assert positions == [(epoch, position) for epoch in (0, 1) for position in range(40)]


# How a worker leaves does not depend on the consistency; a client of one shard asks for its orders on another way.
@pytest.mark.parametrize(
    ("consistency", "shards", "end"),
    [
        ("synchronous", 2, "left_faults"),
        ("asynchronous", 2, "right_faults"),
        ("stale", 2, "right_faults"),
        ("synchronous", 1, "right_faults"),
        ("asynchronous", 1, "left_faults"),
    ],
)
def test_a_worker_cut_off_at_any_message_leaves_the_others_going_and_its_share_is_done_by_another(
    consistency: str, shards: int, end: str
) -> None:
    plan = Plan(consistency, staleness=1, num_workers=2, shards=shards, steps=3, batch_size=10)
    wanted = train_plain(plan)[0]
    cuts = 0
    for shard in range(shards):
        for message in range(10):
            servers = Servers(plan)
            channels = servers.channels(0)
            channels[shard].close()
            channels[shard] = servers.channel(shard, 0, **{end: FaultScript().fail_at(message)})
            lost, other = Worker(plan, 0, channels), Worker(plan, 1, servers.channels(1))

            was_cut, finish = run_all([lost.run_until_cut, other.run])
            assert isinstance(finish, Finish)
            cuts += was_cut
            assert [event["step"] for event in servers.events if event["event"] == "step"] == [1, 2, 3]
            if consistency == "synchronous":
                assert float((servers.values() - wanted).abs().max()) <= 1e-12
            for machine in servers.machines:
                machine.shard.advance(3)
                assert machine.shard.version == (6 if consistency == "asynchronous" else 3)
            other.client.close()
            servers.close()
    assert cuts >= 5 * shards


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_never_exceeds_the_bound_also_with_a_straggler(bound: int, seed: int) -> None:
    plan = Plan("stale", staleness=bound, num_workers=4, shards=2, steps=9)
    staleness = Schedule(plan, seed, straggler=0).run()
    assert max(staleness) <= bound
    assert sum(staleness) > 0 or bound == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_sum_of_what_was_applied_is_the_sum_of_what_was_sent(seed: int) -> None:
    plan = Plan("asynchronous", num_workers=3, shards=2, steps=9, optimizer={"type": "sgd"}, lr=0.03125)
    schedule = Schedule(plan, seed, straggler=1)
    before = schedule.servers.values()
    staleness = schedule.run()
    assert max(staleness) >= 2
    moved = (before - schedule.after) / 0.03125
    assert float((moved - torch.stack(schedule.sent).sum(0)).abs().max()) <= 1e-12


def test_a_sparse_push_is_the_dense_one_and_as_long_as_its_places_and_values() -> None:
    """Push gradients with a value in each twenty places: a place, as the gap before it, is a byte beside the value."""
    for optimizer in ({"type": "sgd"}, {"type": "adam"}):
        found, pairs, num_values = [], 0, 0
        for compression in (None, {"type": "threshold", "threshold": 1e-30, "error_feedback": False}):
            plan = Plan("asynchronous", shards=3, optimizer=optimizer, steps=5, compression=compression)
            servers = Servers(plan)
            worker = Worker(plan, 0, servers.channels(0))
            worker.client.hello()
            pairs = num_values = pushed_bytes = 0
            while isinstance(order := worker.client.next(), Compute):
                worker.client.pull()
                worker.compute(order)
                gradient = worker.flat.gradient
                few = torch.zeros_like(gradient)
                few[order.step :: 20] = gradient[order.step :: 20]
                pairs, num_values = pairs + int(few.count_nonzero()), num_values + len(few)
                had = worker.client.bytes_sent
                worker.client.push([order], few, loss_sums=[0.0])
                pushed_bytes += worker.client.bytes_sent - had
            found.append((servers.values(), pushed_bytes))
            servers.close()
        (dense, dense_bytes), (sparse, sparse_bytes) = found
        assert torch.equal(dense, sparse)
        assert 0 < pairs <= num_values / 20 + 5
        assert dense_bytes == 8 * num_values
        header = 8
        assert sparse_bytes == plan.steps * plan.shards * header + (8 + 1) * pairs  # of float32 it would be 4 + 1


@pytest.mark.parametrize("compression", [None, {"type": "onebit"}])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_gradients_pushed_parameter_by_parameter_are_the_flat_one(
    monkeypatch: pytest.MonkeyPatch, compression: Any, piece_bytes: int
) -> None:
    monkeypatch.setattr("orchestray.trainers.ps.protocol.encoding._PIECE_BYTES", piece_bytes)
    found = []
    for apart in (False, True):
        plan = Plan("asynchronous", shards=3, compression=compression, batch_norm=True)
        servers = Servers(plan)
        worker = Worker(plan, 0, servers.channels(0))
        worker.client.hello()
        while isinstance(order := worker.client.next(), Compute):
            worker.client.pull()
            loss_sum, push = worker.compute(order)
            pushed = worker.flat.gradients if apart else worker.flat.gradient
            worker.client.push([order], pushed, loss_sums=[loss_sum], **push)
        found.append(servers.values())
        servers.close()
    assert torch.equal(found[0], found[1])


def test_a_sparse_pull_is_the_whole_one_and_as_long_as_its_places_and_values() -> None:
    """Pull after each push of few values, from three shards, one of which has so few that it sends them all."""
    found = []
    for is_sparse in (False, True):
        plan = Plan(
            "asynchronous",
            shards=3,
            steps=6,
            optimizer={"type": "sgd"},
            compression={"type": "topk", "ratio": 0.1},
            shard={"notes_changes": is_sparse},
        )
        servers = Servers(plan)
        worker = Worker(plan, 0, servers.channels(0), pulls_changes=is_sparse)
        client, pulled, received = worker.client, list[torch.Tensor](), list[int]()
        client.hello()
        while isinstance(order := client.next(), Compute):
            had = client.bytes_moved - client.bytes_sent
            client.pull()
            pulled.append(client.values.clone())
            received.append(client.bytes_moved - client.bytes_sent - had)
            worker.compute(order)
            client.push([order], worker.flat.gradient, loss_sums=[0.0])
        found.append((pulled, received))
        bounds = client._partition.bounds
        servers.close()
    (whole, whole_bytes), (sparse, sparse_bytes) = found
    assert all(torch.equal(one, two) for one, two in zip(whole, sparse, strict=True))
    assert set(whole_bytes) == {whole[0].nbytes}
    expected = [whole[0].nbytes]  # the first pull is of all
    for before, after in itertools.pairwise(whole):
        changed = before != after
        lengths = [(int(changed[first:last].sum()) * (4 + 8), (last - first) * 8) for first, last in bounds]
        assert any(pairs < dense for pairs, dense in lengths)
        expected.append(sum(min(both) for both in lengths))
    assert sparse_bytes == expected
    assert sum(sparse_bytes) < 0.5 * sum(whole_bytes)


@pytest.mark.parametrize("compression", [{"type": "topk", "ratio": 0.2}, {"type": "float16"}, {"type": "onebit"}])
def test_compressed_pushes_lose_nothing_but_the_residual_and_are_as_long_as_their_messages(
    compression: dict[str, Any],
) -> None:
    chosen = {**compression, "error_feedback": True}
    plan = Plan("asynchronous", shards=2, optimizer={"type": "sgd"}, lr=0.125, compression=chosen)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    before, sent, counted, length = servers.values(), torch.zeros_like(servers.values()), 0, 0
    worker.client.hello()
    while isinstance(order := worker.client.next(), Compute):
        worker.client.pull()
        worker.compute(order)
        sent += worker.flat.gradient
        had = worker.client.bytes_sent
        worker.client.push([order], worker.flat.gradient, loss_sums=[0.0])
        counted += worker.client.bytes_sent - had
        length += sum(compressor.message_bytes or 0 for compressor in worker.client.encoder.compressors)
    residual = torch.cat([compressor.state()["residual"] for compressor in worker.client.encoder.compressors])
    assert float(((before - servers.values()) / 0.125 + residual - sent).abs().max()) <= 1e-12
    assert counted == length or not length
    assert counted == worker.client.encoder.bytes_dense - worker.client.encoder.bytes_saved
    assert 0 < counted < worker.client.encoder.bytes_dense / 2
    assert worker.client.encoder.bytes_dense == plan.steps * sent.nbytes
    servers.close()


def test_running_statistics_are_averaged_by_samples_and_counted_by_the_largest() -> None:
    alone = train_plain(Plan(batch_norm=True))[2]
    plan = Plan("asynchronous", batch_norm=True)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    worker.run()
    worker.client.pull()
    worker.buffers.write_to(worker.model)
    for name, buffer in alone.named_buffers():
        assert torch.allclose(dict(worker.model.named_buffers())[name].double(), buffer.double(), rtol=0, atol=1e-12)
    servers.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_the_statistics_of_several_workers_do_not_depend_on_who_is_first(shards: int) -> None:
    found = []
    for _ in range(3):
        servers = Servers(Plan("synchronous", num_workers=3, shards=shards, batch_norm=True, steps=4, batch_size=10))
        workers = [Worker(servers.plan, number, servers.channels(number)) for number in range(3)]
        run_all([worker.run for worker in workers])
        found.append(servers.servers[0].snapshot(4))
        servers.close()
    assert all(torch.equal(state["buffers/floats"], found[0]["buffers/floats"]) for state in found)
    assert all(torch.equal(state["values"], found[0]["values"]) for state in found)
    assert int(found[0]["buffers/integers"].max()) == 4


def test_validation_and_checkpoint_stop_everybody_and_are_done_once() -> None:
    coordinator = {"validate_every_steps": 3, "checkpoint_every_steps": 3}
    plan = Plan("asynchronous", num_workers=3, shards=2, coordinator=coordinator, steps=6)
    servers = Servers(plan)
    workers = [Worker(plan, number, servers.channels(number)) for number in range(3)]
    run_all([worker.run for worker in workers])
    means = [event["means"] for event in servers.events if event["event"] == "validated"]
    assert means == [{"loss": 1.0}, {"loss": 1.0}]
    saves = [save for worker in workers for save in worker.saves]
    assert len(saves) == 2
    assert {shard["values"].numel() for shard in saves[0]} == {384, 385}
    servers.close()


def test_a_run_ends_where_its_validation_says_so() -> None:
    plan = Plan("synchronous", num_workers=2, coordinator={"validate_every_steps": 2}, steps=50)
    machine = plan.machine(0)
    until = Machine(machine.shard, machine.coordinator, is_reached=lambda means: means["loss"] <= 1.0)
    servers = Servers(plan, [until])
    workers = [Worker(plan, number, servers.channels(number)) for number in range(2)]
    assert run_all([worker.run for worker in workers]) == [Finish("until"), Finish("until")]
    assert servers.machines[0].shard.version == 2
    servers.close()


def test_workers_join_and_leave_during_a_run_and_every_step_is_done_once() -> None:
    plan = Plan("asynchronous", num_workers=2, shards=2, steps=12)
    servers = Servers(plan)
    first, second, third = (Worker(plan, number, servers.channels(number)) for number in range(3))
    first.run(until=lambda order: isinstance(order, Compute) and order.step == 3)
    first.client.close()  # with an order it has not computed
    half_way = second.run(until=lambda order: isinstance(order, Compute) and order.step == 6)
    run_all([third.run, lambda: second.go_on(half_way)])
    assert [event["step"] for event in servers.events if event["event"] == "step"] == list(range(1, 13))
    servers.close()


def test_a_push_under_way_overlaps_the_next_share_and_adds_one_to_its_staleness() -> None:
    plan = Plan("asynchronous", shards=2, coordinator={"lookahead": 2}, steps=8)
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    client, staged = worker.client, torch.empty_like(worker.flat.values)
    client.hello()
    client.pull()
    orders: list[Order] = [client.next(), client.next(wait=False)]
    flight, results = None, []
    while isinstance(order := orders.pop(0), Compute):
        loss_sum, push = worker.compute(order)
        read, gradient = list(client.versions), worker.flat.gradient.clone()
        if flight is not None:
            results.append(flight.wait())
            worker.flat.values.copy_(staged)
            orders += [results[-1].order]
        flight = client.start_push(
            [order], gradient, loss_sums=[loss_sum], versions=read, pull_into=staged, next_order=False, **push
        )
        if not orders or not isinstance(orders[0], Compute):
            results.append(flight.wait())
            flight = None
            orders = [client.next()]
    assert {result.staleness for result in results} == {0, 1}
    assert servers.servers[0].version == servers.servers[1].version == 8
    servers.close()


def test_shares_pushed_together_are_one_update_and_come_apart_where_one_of_them_was_there() -> None:
    plan = Plan("asynchronous", num_workers=2, shards=2, steps=4, coordinator={"lookahead": 2})
    servers = Servers(plan)
    worker = Worker(plan, 0, servers.channels(0))
    client = worker.client
    client.hello()
    orders = [client.next(), client.next()]
    # A worker that was lost had pushed the first of them to the second shard alone.
    stray = Origin(7, (Part(orders[0].step, orders[0].share, orders[0].num_samples, orders[0].batch_samples),), 0)
    values = servers.machines[1].shard.values
    servers.servers[1].change(Entry(worker=7, push=Push(origin=stray)), [torch.ones_like(values)])
    client.pull()
    done = client.push(orders, torch.ones_like(client.values), loss_sums=[0.0, 0.0])
    assert (done.counts, done.recompute) == (False, tuple(order.order_id for order in orders))
    assert client.holding == [order.order_id for order in orders]
    for order in orders:
        client.pull()
        assert client.push([order], torch.ones_like(client.values), loss_sums=[0.0]).counts
    assert client.holding == []
    assert [machine.shard.version for machine in servers.machines] == [1, 2]
    together = [client.next(), client.next()]
    assert client.push(together, torch.ones_like(client.values), loss_sums=[0.0, 0.0]).counts
    assert [machine.shard.version for machine in servers.machines] == [2, 3]
    servers.close()


def test_a_message_that_is_not_understood_is_answered_with_the_reason_and_ends_the_connection() -> None:
    servers = Servers(Plan("asynchronous"))
    channel = servers.channel(0, 0)
    channel.send([], tag=REQUEST, meta={"push": {"origin": [0, [], 0]}})
    answer = Header.decode(Answer, channel.recv(tag=ANSWER).content).sections
    assert answer.error is not None
    assert answer.error.endswith("all processes of a run must have the same version of orchestray.")
    with pytest.raises(ChannelClosedError):
        channel.recv()
    servers.close()


def over_gloo(servers: Servers, shard: int, worker: int) -> Channel:
    """Return a worker's end of a real connection."""
    store = HashStore()

    def serve() -> None:
        servers.servers[shard].serve(GlooChannel(store, 0, name=f"shard {shard}", peer=f"worker {worker}"))

    servers.threads.append(spawn(serve))
    return GlooChannel(store, 1, name=f"worker {worker}", peer=f"shard {shard}")


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_real_connections_carry_the_same_and_one_that_ends_disturbs_nobody(consistency: str) -> None:
    plan = Plan(consistency, num_workers=2, shards=2, steps=5)
    servers = Servers(plan)
    lost, other = (
        Worker(plan, number, [over_gloo(servers, shard, number) for shard in range(2)]) for number in range(2)
    )
    lost.run(until=lambda order: isinstance(order, Compute) and order.step == 3)
    going = spawn(other.run)
    lost.client.close()  # with an order, and while the other waits for it in a synchronous run
    going.join(JOIN_S)
    assert not going.is_alive()
    assert [event["step"] for event in servers.events if event["event"] == "step"] == [1, 2, 3, 4, 5]
    if consistency == "synchronous":
        assert float((servers.values() - train_plain(plan)[0]).abs().max()) <= 1e-12
    other.client.close()
    servers.close()


def test_what_a_slow_recorder_writes_keeps_no_other_worker_waiting_and_stays_in_order() -> None:
    servers, heard = Servers(Plan("asynchronous", num_workers=2, steps=6)), list[int]()
    is_writing, may_go_on = threading.Event(), threading.Event()

    def record(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            is_writing.set()
            assert may_go_on.wait(JOIN_S)
            heard.append(event["step"])

    servers.servers[0].events.listener = record
    slow, other = (Worker(servers.plan, number, servers.channels(number)) for number in range(2))
    first = spawn(slow.run)
    assert is_writing.wait(JOIN_S)
    second = spawn(lambda: other.run(until=lambda _: len(other.applied) == 4))
    second.join(_SOON_S)
    assert not second.is_alive()
    assert heard == []
    may_go_on.set()
    other.client.close()  # what it holds is handed to the first
    first.join(JOIN_S)
    servers.servers[0].events.deliver(wait=True)
    assert heard == list(range(1, 7))
    servers.close()


def test_the_state_of_a_run_in_a_checkpoint_has_every_event_before_it_also_if_another_thread_records_it() -> None:
    servers, heard = Servers(Plan("asynchronous")), list[str]()
    lead = servers.servers[0]
    is_writing, is_asked = threading.Event(), threading.Event()

    def record(event: dict[str, Any]) -> None:
        is_writing.set()
        assert is_asked.wait(_SOON_S)
        heard.append(event["event"])

    def state() -> dict[str, Any]:
        is_asked.set()
        return {"heard": list(heard)}

    lead.events.listener, lead.run_state = record, state
    worker = Worker(servers.plan, 0, servers.channels(0))
    worker.client.hello()
    lead.events.put({"event": "before"})
    recording = spawn(lead.events.deliver)
    assert is_writing.wait(_SOON_S)
    threading.Timer(0.1, is_asked.set).start()
    worker.client.snapshot()
    assert worker.client.run_state == {"heard": ["before"]}
    recording.join(_SOON_S)
    worker.client.close()
    servers.close()


def test_an_error_of_a_server_is_told_in_its_own_words() -> None:
    plan = Plan("synchronous")
    servers = Servers(plan)
    client = Worker(plan, 0, servers.channels(0)).client
    client.hello()
    order = client.next()
    assert isinstance(order, Compute)
    orders = [order, replace(order, step=order.step + 1)]
    with pytest.raises(ServerError, match=r"push_every: a push is of one batch's shares; set it to 1"):
        client.push(orders, torch.ones_like(client.values), loss_sums=[0.0, 0.0], pull_into=client.values)
    assert client.push([order], torch.ones_like(client.values), loss_sums=[0.0]).counts
    servers.close()
