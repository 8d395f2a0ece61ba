"""Usage of processes, as the driver of a run with servers gathers it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.driver.servers.usage import add_usage, usage_of, usage_of_the_living


class AnsweringGang:
    """Members with given answers; None: the member hosts nothing; a text: it has died of it."""

    def __init__(self, *answers: dict[str, Any] | str | None) -> None:
        self.slots = answers

    def control_one(self, rank: int, method: str) -> dict[str, Any] | str | None:
        assert method == "usage"
        return self.slots[rank]

    def gather_one(self, reference: dict[str, Any] | str | None, rank: int) -> dict[str, Any] | None:
        if isinstance(reference, str):
            raise MemberLostError({rank: reference})
        return reference

    def gather(self, references: list[dict[str, Any] | str | None]) -> list[dict[str, Any] | None]:
        return [self.gather_one(reference, rank) for rank, reference in enumerate(references)]


def gang_of(*answers: dict[str, Any] | str | None) -> Gang:
    return cast("Gang", AnsweringGang(*answers))


def test_a_leaf_that_dies_when_all_is_done_ends_no_run() -> None:
    # Its death, after the model was written, was the run's: there was nothing it was still wanted for but its numbers.
    gang = gang_of({"memory": 1}, "killed by SIGKILL", None, {"memory": 4})
    lost: list[tuple[Gang, int, str]] = []
    assert usage_of_the_living(gang, lambda *loss: lost.append(loss)) == [
        {"memory": 1, "rank": 0},
        {"memory": 4, "rank": 3},
    ]
    assert lost == [(gang, 1, "killed by SIGKILL")]


def test_of_processes_that_are_needed_a_loss_is_raised_and_one_that_hosts_nothing_is_left_out() -> None:
    assert usage_of(gang_of({"memory": 1}, None)) == [{"memory": 1, "rank": 0}]
    with pytest.raises(MemberLostError):
        usage_of(gang_of({"memory": 1}, "killed by SIGKILL"))


def test_the_outcome_has_the_bytes_of_all_and_what_each_worker_did() -> None:
    outcome = Outcome(
        ended="finished", step=3, epochs=1.0, final={}, bytes_sent=100, bytes_dense=150, samples=1, training_s=1.0
    )
    workers = [{"rank": 0, "memory": 5, "bytes": 10, "saved_bytes": 7, "replica": 0, "shares": 2, "samples": 9}]
    add_usage(outcome, workers, [{"rank": 0, "memory": 6, "bytes": 20}], bytes_reported=25)
    assert (outcome.bytes_sent, outcome.bytes_dense) == (130, 187)
    assert outcome.memory == [5, 6]
    assert outcome.summary["workers"] == [{"replica": 0, "shares": 2, "samples": 9}]


def test_what_a_killed_server_had_counted_is_known_from_the_lines_of_the_run() -> None:
    outcome = Outcome(
        ended="finished", step=3, epochs=1.0, final={}, bytes_sent=0, bytes_dense=0, samples=1, training_s=1.0
    )
    add_usage(outcome, [{"memory": 5, "saved_bytes": 7}], [{"memory": 6, "bytes": 20}], bytes_reported=300)
    assert (outcome.bytes_sent, outcome.bytes_dense) == (300, 307)


def test_the_outcome_has_the_bytes_between_the_groups_where_there_are_leaf_servers() -> None:
    outcome = Outcome(
        ended="finished", step=3, epochs=1.0, final={}, bytes_sent=0, bytes_dense=0, samples=1, training_s=1.0
    )
    leaves = [{"memory": 1, "bytes": 2, "across_bytes": 30, "across_dense_bytes": 100 + leaf} for leaf in range(2)]
    add_usage(outcome, [], [{"memory": 6, "bytes": 60}, *leaves], bytes_reported=0)
    assert outcome.summary["bytes_across_groups"] == {"sent": 60, "dense": 201, "part": 0.298507}
    assert outcome.bytes_sent == 64  # what goes across is counted once, by the servers


def test_the_outcome_has_the_bytes_of_replication_where_servers_have_copies() -> None:
    outcome = Outcome(
        ended="finished", step=3, epochs=1.0, final={}, bytes_sent=0, bytes_dense=0, samples=1, training_s=1.0
    )
    servers = [{"memory": 1, "bytes": 20, "replicated_bytes": 8}, {"memory": 1, "bytes": 8}]
    add_usage(outcome, [], servers, bytes_reported=0)
    assert outcome.summary["bytes_replicated"] == 8
