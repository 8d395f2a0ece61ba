"""Gangs of real processes: they meet, die, and are replaced."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest
import ray
from ray.air.execution.resources import ResourceRequest
from ray.util.placement_group import placement_group, remove_placement_group

from orchestray.platform.actors import gang as gang_module
from orchestray.platform.actors import placement as placement_module
from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.member import Identity
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import acquire, make_room, release
from orchestray.platform.actors.slot import Patience, beside
from orchestray.platform.actors.stacks import stacks_of
from orchestray.platform.errors import ClusterError, PlaceLostError, TrainingError
from orchestray.search.engine.tune_faults import SettledPlacementGroups
from support.hosted import Adder
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.actors.scale_up import Growth
    from orchestray.platform.cluster.cluster import Cluster


@contextmanager
def running(cluster: Cluster, size: int, *, spares: int = 0) -> Iterator[Gang]:
    """Yield a gang, of the processes of the test before where that was of the same shape."""
    gang = acquire(cluster, Shape(role="worker", size=size, spares=spares))
    try:
        gang.host("support.hosted:Adder", 1.0)
        gang.meet()
        yield gang
    except BaseException:
        gang.close()
        raise
    release(gang)


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


def test_members_meet_in_one_process_group(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        assert gang.gather(gang.call("total")) == [3.0, 3.0]


def test_a_gang_that_is_kept_forgets_the_callbacks_of_its_run(cluster: Cluster) -> None:
    def of_the_run(*_: object) -> None:
        raise AssertionError("the run is over")

    with running(cluster, 2) as gang:
        pass
    gang.while_waiting = gang.keep_stacks = of_the_run
    cluster.parked.remove(gang)
    release(gang)
    with running(cluster, 2) as again:
        assert again is gang
        again.while_waiting()
        again.keep_stacks("worker", 0, "")


def test_a_killed_member_is_replaced_and_the_others_keep_their_processes(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        before, generation = gang.gather(gang.call("pid")), gang.generation
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(MemberLostError) as lost:
            gang.gather(gang.call("wait"))
        assert set(lost.value.lost) == {1}
        gang.gather(gang.control("release")[:1])
        assert gang.replace(1) is False
        gang.meet()
        assert gang.gather(gang.call("total")) == [3.0, 3.0]
        after = gang.gather(gang.call("pid"))
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert gang.generation == generation + 1


def test_a_dead_member_is_lost_even_if_a_call_to_it_never_ends(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        os.kill(gang.gather(gang.call("pid"))[1], signal.SIGKILL)
        # Nothing can make Ray keep a dead process's call open, so it is one of another process, which lives.
        open_call = gang.call_one(0, "wait")
        assert gang.unheard({open_call: 1}) == {}
        with pytest.raises(MemberLostError) as lost:
            gang.gather_one(open_call, 1)
        assert set(lost.value.lost) == {1}
        assert gang.unheard({open_call: 0}) == {}
        gang.control("release")
        gang.replace(1)
        gang.meet()


def test_the_member_that_served_the_meeting_can_be_replaced_too(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        before = gang.gather(gang.call("pid"))
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(MemberLostError) as lost:
            gang.gather([gang.call("pid")[0]])
        assert set(lost.value.lost) == {0}
        gang.replace(0)
        gang.meet()
        assert gang.gather(gang.call("total")) == [3.0, 3.0]
        assert gang.gather(gang.call("pid"))[1] == before[1]


def test_a_member_that_gives_up_a_meeting_is_waited_for_by_nobody_and_the_next_one_is_whole(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        ray.get(beside(gang.slots[1].actor.abandon).remote(gang.generation + 1))
        with pytest.raises(MemberLostError) as lost:
            gang.meet()
        assert lost.value.lost == {}
        gang.meet()
        assert gang.gather(gang.call("total")) == [3.0, 3.0]


def test_a_member_that_never_starts_though_its_place_is_there_is_lost_and_can_be_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(cluster)
    gang = Gang(cluster, Shape(role="worker", size=1))
    try:
        gang.host("support.hosted:Adder", 1.0)
        place = gang.slots[0].place
        ray.kill(gang.slots[0].actor)
        sitting = (
            ray.remote(Adder).options(num_cpus=place.cpus, scheduling_strategy=place.strategy(cluster)).remote(1.0)
        )
        ray.get(sitting.pid.remote())  # on the CPU of the member
        gang.replace(0)
        with monkeypatch.context() as patch:
            patch.setattr(gang_module, "PLACEMENT_TIMEOUT_S", 0.5)
            patch.setattr(gang_module, "START_TIMEOUT_S", 0.5)
            with pytest.raises(MemberLostError) as lost:
                gang.host("support.hosted:Adder", 1.0)
        assert lost.value.lost == {0: "it did not start within 0.5 s"}
        ray.kill(sitting)
        gang.replace(0)
        gang.meet()
        assert gang.gather(gang.call("total")) == [1.0]
    finally:
        gang.close()


def test_a_member_that_is_stuck_is_killed_and_one_that_waits_for_it_is_not(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        gang.patience = Patience(stall_s=0.5)
        try:
            waiting, stuck = gang.call_one(0, "wait_for_others"), gang.call_one(1, "wait")
            with pytest.raises(MemberLostError) as lost:
                gang.gather_one(stuck, 1)
            assert re.fullmatch(r"it made no progress for \S+ s, and waited for no other process", lost.value.lost[1])
            assert not gang.is_deadlocked()
            gang.gather(gang.control("release")[:1])
            assert gang.gather_one(waiting, 0)
        finally:
            gang.patience = Patience()
        gang.replace(1)
        gang.meet()


def test_a_member_that_is_stopped_while_it_is_built_is_killed_too_but_later(cluster: Cluster) -> None:
    make_room(cluster)
    gang = Gang(cluster, Shape(role="worker", size=1))
    gang.patience = Patience(hang_s=0.2)
    try:
        gang.nodes()  # it has started; until then it has as long as a start may take
        with pytest.raises(MemberLostError) as lost:
            gang.host("support.hosted:StopsAsItIsBuilt")
        assert lost.value.lost == {0: "it did not answer for 1 s: it was stopped, or starved"}
    finally:
        gang.close()


def test_members_that_all_wait_for_each_other_are_deadlocked_and_alive(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        files: dict[int, str] = {}
        gang.patience, gang.keep_stacks = Patience(stall_s=0.5), lambda _role, rank, text: files.update({rank: text})
        try:
            waiting = gang.call("wait_for_others")
            deadline_s = time.monotonic() + PATIENCE_S
            while not gang.is_deadlocked() and time.monotonic() < deadline_s:
                gang.check_places()
            assert gang.is_deadlocked()
            gang.save_stacks([0, 1])
            assert all("wait_for_others (" in files[rank] for rank in (0, 1))
            gang.gather(gang.control("release"))
            assert gang.gather(waiting) == [True, True]
            gang.meet()
            assert not gang.is_deadlocked(), "what was before the meeting is forgotten"
        finally:
            gang.patience, gang.keep_stacks = Patience(), lambda *_: None


def test_stacks_are_read_on_the_node_of_the_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.util.get_node_ip_address()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "elsewhere")
    text, none = stacks_of([Identity(os.getpid(), here), Identity(os.getpid(), "nowhere")])
    assert "test_stacks_are_read_on_the_node_of_the_process (" in text
    assert none.startswith("The stacks could not be read: ")


def test_more_members_than_cores_share_them_with_a_warning(cluster: Cluster) -> None:
    make_room(cluster)
    said: list[str] = []
    gang = Gang(cluster, Shape(role="worker", size=4), said.append)
    try:
        gang.host("support.hosted:Adder", 0.0)
        gang.meet()
        assert gang.gather(gang.call("total")) == [6.0] * 4
        assert gang.gather(gang.call("threads")) == [1] * 4
    finally:
        gang.close()
    assert len(said) == 1
    assert said[0].startswith("4 workers of 1 CPU(s) share the")


def test_a_warm_spare_takes_the_place_of_a_lost_member(cluster: Cluster) -> None:
    with running(cluster, 1, spares=1) as gang:
        spare_pid = ray.get(gang.spares[0].identifying).pid
        os.kill(gang.gather(gang.call("pid"))[0], signal.SIGKILL)
        with pytest.raises(MemberLostError):
            gang.gather(gang.call("pid"))
        assert gang.replace(0) is True
        gang.meet()
        assert gang.gather(gang.call("pid")) == [spare_pid]
        assert [(role, rank) for role, rank, _ in gang.identify()] == [("worker", 0)]
        gang.refill_spares()
        assert ray.get(gang.spares[0].identifying).pid != spare_pid
        assert [(role, rank) for role, rank, _ in gang.identify()] == [("worker", 0), ("spare", 0)]


def test_a_spare_that_dies_while_it_waits_is_replaced(cluster: Cluster) -> None:
    with running(cluster, 1, spares=1) as gang:
        spare = gang.spares[0]
        os.kill(ray.get(spare.identifying).pid, signal.SIGKILL)
        ray.wait([spare.end], timeout=PATIENCE_S)
        gang.refill_spares()
        assert len(gang.spares) == 1
        assert gang.spares[0] is not spare
        ray.get(gang.spares[0].identifying)
        assert len(gang.identify()) == 2


def test_one_that_dies_between_being_ready_and_being_adopted_is_started_again(cluster: Cluster) -> None:
    make_room(cluster)
    gang = Gang(cluster, Shape(role="worker", size=1))
    try:
        gang.host("support.hosted:Adder", 1.0)
        growth = gang.membership.begin_growth(1, "support.hosted:Adder", 1.0)
        ready(growth)
        (dead,) = growth.slots
        os.kill(ray.get(dead.identifying).pid, signal.SIGKILL)
        ray.wait([dead.end], timeout=PATIENCE_S)
        assert not growth.is_ready()
        ready(growth)
        gang.membership.adopt()
        gang.meet()
        assert gang.gather(gang.call("total")) == [3.0] * 2
    finally:
        gang.close()


def ready(growth: Growth) -> None:
    while not growth.is_ready():
        for slot in growth.slots:
            ray.wait([slot.hosting], timeout=PATIENCE_S)


def test_the_reserve_becomes_a_member_in_the_place_of_a_lost_one(cluster: Cluster) -> None:
    with running(cluster, 1) as gang:
        gang.keep_reserve()
        gang.keep_reserve()  # there is one
        [slot] = dict(gang._by_role())["reserve"]
        reserve_pid = ray.get(slot.identifying).pid
        assert [(role, rank) for role, rank, _ in gang.identify()] == [("worker", 0), ("reserve", 0)]
        os.kill(gang.gather(gang.call("pid"))[0], signal.SIGKILL)
        with pytest.raises(MemberLostError):
            gang.gather(gang.call("pid"))
        assert gang.replace(0) is False
        gang.meet()
        assert gang.gather(gang.call("pid")) == [reserve_pid]
        assert [(role, rank) for role, rank, _ in gang.identify()] == [("worker", 0)]


def test_an_exception_in_a_member_is_raised_with_its_type_and_text(cluster: Cluster) -> None:
    with running(cluster, 1) as gang, pytest.raises(TrainingError, match="the loss is a banana"):
        gang.gather(gang.call("fail"))


def test_what_cannot_be_built_says_why(cluster: Cluster) -> None:
    gang = Gang(cluster, Shape(role="worker", size=1))
    try:
        with pytest.raises(TrainingError, match="it cannot be built"):
            gang.host("support.hosted:Broken")
    finally:
        gang.close()


def test_more_gpus_than_there_are_is_refused_with_what_the_cluster_has(cluster: Cluster) -> None:
    with pytest.raises(ClusterError) as refused:
        Gang(cluster, Shape(role="worker", size=2, gpus_per_member=1))
    cores = ray.cluster_resources()["CPU"]
    assert str(refused.value) == (
        "The cluster cannot place 2 worker(s) with 1 CPU and 1 GPU each: that is 2 GPU, and it has 1 node(s) with "
        f"{cores:g} CPU, 0 GPU in all. Ask for fewer workers (strategy.network) or less for each (resources)."
    )


def test_what_finds_no_place_in_time_says_what_is_free(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    make_room(cluster)
    monkeypatch.setattr(placement_module, "PLACEMENT_TIMEOUT_S", 1.0)
    everything = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert everything.wait(PATIENCE_S)
    try:
        with pytest.raises(ClusterError, match=r"could not place 1 worker.* within 1 s: .* of which 0 CPU"):
            Gang(cluster, Shape(role="worker", size=1))
    finally:
        remove_placement_group(everything)


def test_closing_a_gang_ends_its_processes(cluster: Cluster) -> None:
    with running(cluster, 2) as gang:
        processes = [psutil.Process(pid) for pid in gang.gather(gang.call("pid"))]
    make_room(cluster)  # closes it
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_released_gang_serves_the_next_of_its_shape_with_the_same_processes(cluster: Cluster) -> None:
    shape = Shape(role="worker", size=1)
    first = acquire(cluster, shape)
    first.host("support.hosted:Adder", 1.0)
    pids = first.gather(first.call("pid"))
    release(first)
    second = acquire(cluster, shape)
    try:
        second.host("support.hosted:Adder", 5.0)
        second.meet()
        assert second.gather(second.call("pid")) == pids
        assert second.gather(second.call("total")) == [5.0]
    finally:
        second.close()


def test_a_gang_in_a_room_that_has_lost_its_place_says_so_and_does_not_wait_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "PLACEMENT_TIMEOUT_S", 0.5)
    room = placement_group([{"CPU": 1e6}])  # as one whose machine is gone: no node has what it asks for
    gang = Gang(replace(cluster, owned=False, room=room, parked=[]), Shape(role="worker", size=2))
    try:
        with pytest.raises(PlaceLostError, match=r"A machine with places of 2 worker\(s\) is gone.* start a machine"):
            gang.meet()
    finally:
        gang.close()
        remove_placement_group(room)


def test_places_that_are_not_wanted_any_more_as_soon_as_they_are_asked_for_are_there_for_others(
    cluster: Cluster,
) -> None:
    """Ask Ray for places and give them up at once: of some of these Ray itself loses track."""
    make_room(cluster)
    resources = SettledPlacementGroups()
    pair = ResourceRequest([{"CPU": 1}, {"CPU": 1}])
    for _ in range(100):
        resources.request_resources(pair)
        resources.cancel_resource_request(pair)
        placement_module.remove([placement_group([{"CPU": 1}, {"CPU": 1}])])
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    assert group.wait(PATIENCE_S)
    remove_placement_group(group)
