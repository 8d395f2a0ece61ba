"""Workers killed at the awkward moments: a run goes on, to the same bits as one in which nobody was."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import orchestray
from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.pool import make_room
from orchestray.trainers.driver.engines import driver
from support.held_task import held
from support.slow_digits import slowly
from support.under_way import UnderWay, assert_same_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestray.platform.cluster.cluster import Cluster

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
LONG = ["train.epochs=5", "task.hidden=[16]", "checkpoint.every_steps=50"]


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an uninterrupted run of two workers."""
    return orchestray.train(DIGITS, overrides=LONG, runs_dir=tmp_path_factory.mktemp("whole"), name="whole").path


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function for the path of an uninterrupted run with validations that nobody holds."""
    runs = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda kind: orchestray.train(held(runs, kind), runs_dir=runs, name=kind).path)


@pytest.mark.parametrize(("batch_norm", "rank"), [("synchronized", 0), ("local", 1)])
def test_sigkill_during_a_validation_changes_no_bit_of_a_model_with_batch_normalisation(
    undisturbed: Callable[[str], Path], tmp_path: Path, batch_norm: str, rank: int
) -> None:
    config = held(tmp_path, batch_norm)
    whole = undisturbed(batch_norm)
    (tmp_path / "hold").touch()
    running = UnderWay(config, tmp_path, name="disturbed")
    running.until("both in the validation", lambda: len(list(tmp_path.glob("held-*"))) == 2)
    running.kill(rank)
    (tmp_path / "hold").unlink()
    running.finish()
    assert_same_run(whole, running.path)
    assert running.result()["restarts"] == 1
    assert [event["rank"] for event in running.events("worker_lost")] == [rank]


def test_a_stopped_worker_is_replaced_once_it_has_been_silent_for_the_time_allowed(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    rank = 0  # the one that opens the next meeting, saves and reports
    config = held(tmp_path, "synchronized")
    (tmp_path / "hold").touch()
    running = UnderWay(config, tmp_path, ["hang_timeout_s=1.5"], name="stopped")
    running.until("both in the validation", lambda: len(list(tmp_path.glob("held-*"))) == 2)
    running.stop(rank)
    (tmp_path / "hold").unlink()
    running.finish()
    assert_same_run(undisturbed("synchronized"), running.path)
    (lost,) = running.events("worker_lost")
    assert (lost["rank"], lost["cause"]) == (rank, "it did not answer for 1.5 s: it was stopped, or starved")
    assert "held_task.py" in (running.path / lost["stacks"]).read_text()
    assert 0 < running.result()["goodput"] < 0.9


def test_a_worker_that_answers_but_is_stuck_in_a_batch_is_replaced_and_its_stacks_say_where(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "stick").touch()
    patience = ["stall_timeout_s=1.5", "report_hang_s=0.5"]
    running = UnderWay(held(tmp_path, "synchronized"), tmp_path, patience, name="stuck")
    running.finish()
    assert_same_run(undisturbed("synchronized"), running.path)
    (lost,) = running.events("worker_lost")
    assert lost["cause"].startswith("it made no progress for ")
    reported = {f"worker {lost['rank']}": "working", f"worker {1 - lost['rank']}": "waiting"}
    assert reported in [event["processes"] for event in running.events("no_progress")]
    assert "_stick (" in (running.path / lost["stacks"]).read_text()
    assert running.result()["restarts"] == 1


def test_under_servers_the_stuck_worker_is_replaced_and_not_the_one_that_waits_for_its_share(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "stick").touch()
    servers = {"network": {"data": 2}, "exchange": {"type": "parameter_server"}}
    running = UnderWay(
        {**held(tmp_path, "local"), "strategy": servers}, tmp_path, ["stall_timeout_s=1.5"], name="stuck"
    )
    running.finish()
    (lost,) = running.events("worker_lost")
    assert "_stick (" in (running.path / lost["stacks"]).read_text()
    assert running.steps() == 12


def test_death_of_an_idle_spare_is_noticed_and_a_later_loss_survived(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    config = held(tmp_path, "synchronized")
    whole = undisturbed("synchronized")
    (tmp_path / "hold").touch()
    running = UnderWay(config, tmp_path, ["resources.spares=1"], name="spare")
    running.until("work under way, and the spare", lambda: list(tmp_path.glob("held-*")) and running.actors("spare"))
    dead = running.kill(0, "spare")
    running.until("actors.json without the dead", lambda: dead not in running.actors("spare").values())
    running.kill(0)
    (tmp_path / "hold").unlink()
    running.finish()
    assert_same_run(whole, running.path)
    assert [event["rank"] for event in running.events("worker_lost")] == [0]
    assert running.result()["restarts"] == 1


def test_rank_0_that_dies_with_its_work_done_costs_no_restart_and_no_metric_line(
    whole: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(cluster)
    monkeypatch.setattr(driver, "HOST", "support.held_task:DiesWithItsWorkDone")
    running = UnderWay(DIGITS, tmp_path, LONG, name="done")
    running.finish()
    assert_same_run(whole, running.path)
    assert (running.result()["status"], running.result()["restarts"]) == ("succeeded", 0)


def test_rank_0_killed_before_the_run_is_announced_is_replaced_as_any_other(
    whole: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "HOST", "support.dying_hosts:ReplicaKilledBeforeTheRun")
    running = UnderWay(DIGITS, tmp_path, LONG, name="early")
    running.finish()
    assert_same_run(whole, running.path)
    assert [event["rank"] for event in running.events("worker_lost")] == [0]
    assert len(running.events("started")) == 1


def test_a_dead_rank_0_is_asked_nothing_while_the_others_come_to_notice(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    control_one, call_one, identify = Gang.control_one, Gang.call_one, Gang.identify

    def control(gang: Gang, rank: int, method: str, *arguments: Any) -> Any:
        told.append(method)
        return control_one(gang, rank, method, *arguments)

    def call(gang: Gang, rank: int, method: str, *arguments: Any) -> Any:
        told.append(method)
        return call_one(gang, rank, method, *arguments)

    def look(gang: Gang) -> Any:
        told.append("look")
        return identify(gang)

    for name, seen in (("control_one", control), ("call_one", call), ("identify", look)):
        monkeypatch.setattr(Gang, name, seen)
    (tmp_path / "hold").touch()
    running = UnderWay(held(tmp_path, "local"), tmp_path, name="held")
    running.until("both in the validation", lambda: len(list(tmp_path.glob("held-*"))) == 2)
    running.kill(0)
    running.until("the others told", lambda: "abort" in told)
    told_at = told.index("abort")
    running.until("several looks", lambda: told[told_at:].count("look") >= 3)
    (tmp_path / "hold").unlink()
    running.finish()
    since = told[told_at:]
    assert "drain" not in since[: since.index("train")]
    assert running.result()["restarts"] == 1


def test_a_survivor_killed_while_the_other_is_being_replaced_leaves_the_checkpoint_to_go_on_from(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    slowed, slow = slowly(tmp_path, quick=50)  # up to the checkpoint
    running = UnderWay(DIGITS, tmp_path, [*LONG, *slowed], name="both")
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    running.kill(0)
    running.until("the loss noticed", lambda: running.events("worker_lost"))
    running.kill(1)
    slow.unlink()
    running.finish()
    assert_same_run(whole, running.path)
    assert {event["rank"] for event in running.events("worker_lost")} == {0, 1}
    assert running.result()["restarts"] == 2
