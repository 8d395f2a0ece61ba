"""Leaf servers between workers and shards: the flat server's results with fewer messages, whatever is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.platform.comm.channel import FaultScript
from orchestray.platform.comm.channel.base import ChannelClosedError
from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.assignments import Compute, Finish, Order, Save, Validate
from orchestray.trainers.ps.protocol.requests import Answer, Asking, AskingOf, Change, Entry, Hello, Report, ReportOf
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import LocalCopy
from orchestray.trainers.ps.variants.hierarchy.significance_filter import pack, threshold
from support.central import Plan, Servers, Worker, run_all, train_central, train_plain
from support.leaves import Tree, root_machine, train_tree

OPTIMIZERS: list[dict[str, Any]] = [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}]


def steps_of(tree: Tree) -> list[int]:
    return [event["step"] for event in tree.events if event["event"] == "step"]


# -- synchronous and stale ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "leaves", "shards"), [(1, 1, 1), (4, 2, 1), (5, 2, 2)])
def test_a_synchronous_hierarchy_is_the_flat_server(workers: int, leaves: int, shards: int) -> None:
    plan = Plan("synchronous", num_workers=workers, shards=shards, optimizer={"type": "adam"})
    found = train_tree(plan, leaves)
    flat, losses, _ = train_central(plan)
    assert float((found.values - flat).abs().max()) <= 1e-12
    assert found.losses == pytest.approx(losses, rel=0, abs=1e-12)


@pytest.mark.parametrize(("workers", "leaves"), [(6, 3)])
def test_a_root_is_pushed_to_once_a_leaf_and_batch_not_once_a_worker(workers: int, leaves: int) -> None:
    plan = Plan("synchronous", num_workers=workers, shards=2, batch_size=10)  # every batch has a share for each
    tree = Tree(plan, leaves)
    connected = [tree.connect(tree.leaves[number % leaves], number) for number in range(workers)]
    for worker in connected:
        worker.client.hello()
    run_all([lambda worker=worker: worker.go_on(worker.client.next()) for worker in connected])
    assert [leaf.upstream.num_pushes for leaf in tree.leaves] == [plan.steps] * leaves
    tree.close()


def test_a_batch_with_fewer_shares_than_workers_is_done_by_those_that_have_one() -> None:
    plan = Plan("synchronous", num_workers=6, batch_size=21, steps=4)  # each epoch ends with a batch of 19
    small = Plan("synchronous", num_workers=6, batch_size=38, steps=4)  # and here with one of 2
    for chosen in (plan, small):
        found = train_tree(chosen, 2)
        assert float((found.values - train_plain(chosen)[0]).abs().max()) <= 1e-12


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_never_exceeds_the_bound_through_leaves(bound: int) -> None:
    plan = Plan("stale", staleness=bound, num_workers=4, shards=2, steps=10)
    found = train_tree(plan, 2)
    coordinator = found.tree.machines[0].lead
    assert max(coordinator.progress.staleness) <= bound
    assert sum(coordinator.progress.staleness.values()) == 4 * 10
    if bound == 0:
        assert float((found.values - train_plain(plan)[0]).abs().max()) <= 1e-12


def test_running_statistics_go_through_leaves() -> None:
    for consistency in ("synchronous", "asynchronous"):
        plan = Plan(consistency, batch_norm=True)
        found = train_tree(plan, 1)
        values, _, model = train_plain(plan)
        assert float((found.values - values).abs().max()) <= 1e-12
        buffers = found.tree.machines[0].shard.buffers
        assert buffers is not None
        means = torch.cat([b.reshape(-1) for b in model.buffers() if b.is_floating_point()])
        assert float((buffers.floats - means).abs().max()) <= 1e-12


def test_compressed_gradients_reach_the_shards_through_leaves() -> None:
    plan = Plan("synchronous", compression={"type": "onebit"}, steps=10, lr=0.01)
    flat = train_central(plan)[0]
    assert float((flat - train_central(Plan("synchronous", steps=10, lr=0.01))[0]).abs().max()) > 1e-3
    assert float((train_tree(plan, 1).values - flat).abs().max()) <= 1e-12


# -- compute groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (4, 2)])
def test_one_compute_group_is_synchronous_training(workers: int, shards: int) -> None:
    plan = Plan(num_workers=workers, shards=shards, optimizer={"type": "adam"}, steps=12)
    tree = Tree(plan, 1, compute_groups=True)
    (group,) = joined(tree)
    run_all([lambda worker=worker: worker.go_on(worker.client.next()) for worker in group])
    wanted, losses, _ = train_plain(Plan("synchronous", optimizer={"type": "adam"}, steps=12))
    assert float((tree.values() - wanted).abs().max()) <= 1e-12
    assert tree.losses() == pytest.approx(losses, rel=0, abs=1e-12)
    assert set(tree.machines[0].lead.progress.staleness) == {0}
    tree.close()


@pytest.mark.parametrize(("num_groups", "size"), [(2, 2), (4, 1)])
def test_compute_groups_update_once_from_the_same_weights_and_are_as_stale_as_there_are_others(
    num_groups: int, size: int
) -> None:
    plan = Plan(num_workers=num_groups * size, steps=12, lr=0.02, optimizer={"type": "sgd"})
    tree = Tree(plan, num_groups, compute_groups=True)
    groups, num_updates = joined(tree), plan.steps * num_groups
    for versions in take_turns(groups):
        assert len(versions) == size
        assert len(set(versions)) == 1
    assert tree.machines[0].shard.version == num_updates
    assert [leaf.upstream.num_pushes for leaf in tree.leaves] == [plan.steps] * num_groups
    progress = tree.machines[0].lead.progress
    first = sum(range(num_groups))  # the groups begin together, so the first updates are less stale
    total = sum(stale * count for stale, count in progress.staleness.items())
    assert total == size * (first + (num_updates - num_groups) * (num_groups - 1))
    pieces = sorted(
        (o.step, *piece) for group in groups for worker in group for o in worker.applied for piece in o.pieces
    )
    assert len(pieces) == len(set(pieces)) == plan.num_workers * plan.steps
    tree.close()


def test_compute_groups_of_one_worker_are_plain_asynchronous_ones() -> None:
    plan = Plan(num_workers=3, lr=0.02)
    tree, flat = Tree(plan, 3, compute_groups=True), Servers(plan)
    plain = [Worker(plan, number, flat.channels(number)) for number in range(3)]
    for worker in plain:
        worker.client.hello()
    take_turns(joined(tree))
    take_turns([[worker] for worker in plain])
    assert float((tree.values() - flat.values()).abs().max()) <= 1e-12
    tree.close()
    flat.close()


def test_a_compute_group_goes_on_without_a_lost_worker_whose_share_another_computes() -> None:
    plan = Plan(num_workers=2, steps=5, optimizer={"type": "sgd"})
    tree = Tree(plan, 1, compute_groups=True)
    ((one, other),) = joined(tree)
    orders = [one.client.next(), other.client.next()]
    assert all(isinstance(order, Compute) for order in orders)
    run_all([lambda: one.do(orders[0]), other.client.close])
    one.go_on(one.client.next())
    assert sorted(order.step for order in one.applied) == sorted([*range(1, 6), *range(1, 6)])
    tree.close()


def joined(tree: Tree) -> list[list[Worker]]:
    """Return the workers of each leaf of a tree, all of which have joined."""
    size = tree.plan.num_workers // len(tree.leaves)
    numbers = [[leaf * size + at for at in range(size)] for leaf in range(len(tree.leaves))]
    groups = [
        [tree.connect(leaf, number) for number in members] for leaf, members in zip(tree.leaves, numbers, strict=True)
    ]
    for group in groups:
        for worker in group:
            worker.client.hello()
    return groups


def take_turns(groups: list[list[Worker]]) -> list[list[int]]:
    """Train in turns: a group's workers push, and take the next order. Return the versions that each round read."""
    orders: dict[Worker, Order] = {}
    rounds = []

    def take(worker: Worker) -> None:
        while isinstance(order := worker.client.next(wait=False), Validate | Save):
            worker.do(order)
        orders[worker] = order
        if isinstance(order, Compute):
            worker.client.pull()

    for group in groups:
        run_all([lambda worker=worker: take(worker) for worker in group])
    while not all(isinstance(order, Finish) for order in orders.values()):
        for group in groups:
            due = [worker for worker in group if isinstance(orders[worker], Compute)]
            if due:
                rounds.append([min(worker.client.versions) for worker in due])
            run_all([lambda worker=worker: give(worker, orders[worker]) for worker in due])
            run_all([lambda worker=worker: take(worker) for worker in group])
    return rounds


def give(worker: Worker, order: Order) -> None:
    """Compute a share with the parameters that the worker has, and push it."""
    assert isinstance(order, Compute)
    loss_sum, push = worker.compute(order)
    assert worker.client.push([order], worker.flat.gradient, loss_sums=[loss_sum], **push).counts
    worker.applied.append(order)


# -- asynchronous ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: str(o["type"]))
@pytest.mark.parametrize("shards", [1, 2])
def test_one_asynchronous_worker_under_a_leaf_is_plain_training(shards: int, optimizer: dict[str, Any]) -> None:
    plan = Plan("asynchronous", shards=shards, optimizer=optimizer)
    found = train_tree(plan, 1)
    wanted, losses, _ = train_plain(plan)
    assert float((found.values - wanted).abs().max()) <= 1e-12
    assert found.losses == pytest.approx(losses, rel=0, abs=1e-12)


@pytest.mark.parametrize("significance", [0.0, 0.01, 0.5])
def test_every_sample_is_used_once_and_all_leaves_end_with_the_shards_values(significance: float) -> None:
    plan = Plan("asynchronous", num_workers=4, shards=2, steps=10, lr=0.01, optimizer={"type": "sgd"})
    found = train_tree(plan, 2, significance=significance)
    pieces = sorted((o.step, *piece) for worker in found.workers for o in worker.applied for piece in o.pieces)
    assert len(pieces) == len(set(pieces)) == 4 * 10
    for leaf in found.tree.leaves:
        assert isinstance(leaf.copy, LocalCopy)
        assert not leaf.copy.residual.owes
    # A leaf that finishes last may not have heard of another's last change; those it has are bit for bit.
    leaf = found.tree.leaves[0]
    assert leaf.upstream.versions[0] <= found.tree.servers[0].version


def test_the_shards_moved_by_the_sum_of_all_gradients_however_much_was_kept_back_meanwhile() -> None:
    for significance in (0.0, 0.3):
        plan = Plan("asynchronous", num_workers=4, steps=6, lr=0.03125, optimizer={"type": "sgd"})
        tree = Tree(plan, 2, significance=significance)
        before = tree.values()
        sent: list[torch.Tensor] = []
        workers = [tree.connect(tree.leaves[number % 2], number) for number in range(4)]

        def work(worker: Worker, sent: list[torch.Tensor] = sent) -> None:
            worker.client.hello()
            while not isinstance(order := worker.client.next(), Finish):
                if not isinstance(order, Compute):
                    worker.do(order)
                    continue
                worker.client.pull()
                loss_sum, push = worker.compute(order)
                sent.append(worker.flat.gradient.clone())
                assert worker.client.push([order], worker.flat.gradient, loss_sums=[loss_sum], **push).counts

        run_all([lambda worker=worker: work(worker) for worker in workers])
        moved = (before - tree.values()) / 0.03125
        assert float((moved - torch.stack(sent).sum(0)).abs().max()) <= 1e-10
        tree.close()


def test_what_a_leaf_keeps_back_is_insignificant_after_every_push() -> None:
    plan = Plan("asynchronous", num_workers=2, steps=8, lr=0.02, optimizer={"type": "sgd"})
    tree = Tree(plan, 2, significance=0.2)
    workers = [tree.connect(leaf, number) for number, leaf in enumerate(tree.leaves)]
    kept = 0
    for worker in workers:
        worker.client.hello()
    while True:
        orders = [worker.client.next(wait=False) for worker in workers]
        computes = [(w, o) for w, o in zip(workers, orders, strict=True) if isinstance(o, Compute)]
        for worker, order in computes:
            worker.do(order)
        for leaf in tree.leaves:
            assert isinstance(leaf.copy, LocalCopy)
            pending, values = leaf.copy.residual.pending, leaf.copy.shard.values
            assert bool((pending.abs() <= threshold(values, 0.2) * 1.5).all())  # others' changes move the value too
            kept += leaf.copy.residual.owes
        if not computes:
            break
    assert kept
    run_all([lambda w=w, o=o: w.go_on(o) for w, o in zip(workers, orders, strict=True)])
    assert not any(leaf.copy.residual.owes for leaf in tree.leaves if isinstance(leaf.copy, LocalCopy))
    tree.close()


def test_a_higher_threshold_sends_fewer_bytes_across() -> None:
    sent = []
    for significance in (0.0, 0.05, 0.5):
        plan = Plan("asynchronous", num_workers=4, steps=12, lr=0.01, optimizer={"type": "sgd"})
        tree = train_tree(plan, 2, significance=significance).tree
        crossed = sum(c.bytes_sent + c.bytes_received for leaf in tree.leaves for c in leaf.channels)
        sent.append(crossed / sum(leaf.upstream.bytes_dense for leaf in tree.leaves))
    assert sent[0] > sent[1] > sent[2]
    assert sent[2] < 0.4


# -- who is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consistency", "end"),
    [("synchronous", "left"), ("asynchronous", "left"), ("stale", "right")],
)
def test_a_worker_cut_off_at_any_message_leaves_the_others_going_and_its_share_is_done_by_another(
    consistency: str, end: str
) -> None:
    from orchestray.platform.comm.channel import thread_pair
    from support.central import spawn

    plan = Plan(consistency, staleness=1, num_workers=3, steps=2, batch_size=12)
    wanted = train_plain(plan)[0]
    cuts = 0
    for message in range(9):
        tree = Tree(plan, 2)
        ours, theirs = thread_pair("worker 0", "leaf", **{f"{end}_faults": FaultScript().fail_at(message)})
        tree.threads.append(spawn(lambda tree=tree, theirs=theirs: tree.leaves[0].server.serve(theirs)))
        lost = Worker(plan, 0, [ours])
        others = [tree.connect(tree.leaves[number % 2], number) for number in (1, 2)]

        was_cut, *ends = run_all([lost.run_until_cut, *(other.run for other in others)])
        assert all(isinstance(one, Finish) for one in ends)
        cuts += was_cut
        assert steps_of(tree) == [1, 2]
        assert tree.machines[0].lead.progress.num_pushes == 6
        if consistency == "synchronous":
            assert float((tree.values() - wanted).abs().max()) <= 1e-12
        tree.close()
    assert cuts >= 4


def hello(worker: int) -> Entry:
    return Entry(worker=worker, hello=Hello(worker, is_new=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_change_that_is_sent_again_is_applied_once_also_by_a_copy_that_has_taken_over(sparse: bool) -> None:
    plan = Plan("asynchronous", shards=2)
    machine, copy = root_machine(plan, 1), root_machine(plan, 1)
    num = machine.shard.values.numel()
    places = torch.tensor([1, 3]) if sparse else torch.arange(num)
    tensors = pack(places, torch.full((len(places),), 0.25, dtype=torch.float64), num)
    machine.apply(hello(-1))
    machine.apply(Entry(worker=-1, change=Change(1, owes=False)), tensors)
    wanted = machine.shard.values.clone()
    state, held = machine.state()
    copy.load_state(state, {name: tensor.clone() for name, tensor in held.items()})
    for one in (machine, copy):
        one.apply(Entry(worker=-1, change=Change(1, owes=False)), tensors)
        assert torch.equal(one.shard.values, wanted)
        one.apply(Entry(worker=-1, change=Change(2, owes=False)), tensors)
        assert not torch.equal(one.shard.values, wanted)
        one.apply(Entry(worker=-1, leave=True))
        with pytest.raises(TrainingError, match="given up"):  # it was on its way when its leaf died
            one.apply(Entry(worker=-1, change=Change(3, owes=False)), tensors)


def test_nothing_is_saved_once_a_leaf_is_lost_until_it_begins_again() -> None:
    lead = root_machine(Plan("asynchronous", num_workers=2, steps=1), 0)
    for worker, leaf in enumerate((-1, -2)):
        lead.apply(hello(leaf))
        lead.apply(Entry(worker=leaf, relay=(hello(worker),)))
    asks = Entry(worker=-2, asks=(AskingOf(1, Asking((), wait=False)),))
    while isinstance(order := lead.apply(asks).orders[0], Compute):
        lead.apply(Entry(worker=-2, acknowledge_for=(ReportOf(1, Report(order.order_id, 0.0, 0, 0)),)))
    assert lead.lead.at_barrier
    lead.apply(Entry(worker=-1, leave=True))
    assert lead.apply(asks) == Answer(orders=(None,))
    lead.apply(hello(-1))
    assert lead.apply(asks).orders != (None,)


def test_a_worker_that_has_come_back_by_another_leaf_is_not_taken_for_lost_by_its_old_one() -> None:
    lead = root_machine(Plan("asynchronous"), 0)
    for leaf in (-1, -2):
        lead.apply(hello(leaf))
        lead.apply(Entry(worker=leaf, relay=(hello(0),)))
    lead.apply(Entry(worker=-1, relay=(Entry(worker=0, leave=True),)))
    assert lead.lead.workers == [0]
    lead.apply(Entry(worker=-2, relay=(Entry(worker=0, leave=True),)))
    assert lead.lead.workers == []


def test_a_leaf_whose_shards_are_gone_closes_and_its_workers_see_it() -> None:
    plan = Plan("synchronous", num_workers=2)
    tree = Tree(plan, 1)
    worker = tree.connect(tree.leaves[0], 0)
    worker.client.hello()
    for server in tree.servers:
        server.close()
    with pytest.raises(ChannelClosedError):
        worker.go_on(worker.client.next())
    tree.close()
    assert isinstance(tree.leaves[0].error[0], ChannelClosedError)


def test_validation_and_checkpoint_see_all_that_leaves_kept_back() -> None:
    plan = Plan(
        "asynchronous",
        num_workers=4,
        steps=4,
        lr=0.01,
        optimizer={"type": "sgd"},
        coordinator={"validate_every_steps": 2, "checkpoint_every_steps": 2},
    )
    found = train_tree(plan, 2, significance=0.5)
    saves = [save for worker in found.workers for save in worker.saves]
    assert len(saves) == 2
    assert torch.equal(saves[-1][0]["values"], found.values) or torch.equal(saves[0][0]["values"], found.values)
    assert len([event for event in found.tree.events if event["event"] == "validated"]) == 2
