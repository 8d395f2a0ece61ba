"""Training by messages between actors of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import ray

from orchestray.platform.errors import ClusterError, TrainingError
from orchestray.trainers.survey.lab.messaging import message_driven
from orchestray.trainers.survey.message_driven.network import Settings
from orchestray.trainers.survey.message_driven.trees import drawn
from orchestray.trainers.survey.message_driven.workers import PLACEMENT, Training

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


@pytest.mark.slow
def test_trees_of_any_shape_are_trained_by_messages_between_actors_with_bounded_staleness(
    cluster: Cluster,
) -> None:
    exhibit = message_driven(num_trees=120, active=(1, 8))
    rows: list[dict[str, Any]] = [dict(zip(exhibit.columns, row, strict=True)) for row in exhibit.rows]
    one, eight = rows
    assert [row["trees under way"] for row in rows] == [1, 8]
    assert [row["trees done"] for row in rows] == [120, 120]
    assert one["messages between workers"] == eight["messages between workers"] > 120
    assert one["difference from SGD"] < 1e-10
    assert eight["difference from SGD"] > 1e-4
    assert one["largest staleness"] == one["its bound"] == 0
    assert 0 < eight["largest staleness"] <= eight["its bound"] == 14
    assert exhibit.findings[0].startswith("All 120 trees were done, and staleness is never above its bound: 0 of 0, ")
    assert cluster.alive()


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_training_with_a_sentence_that_names_its_nodes(cluster: Cluster) -> None:
    training = Training(drawn(2000, seed=0), Settings(max_active=4))
    ray.kill(training.actors[1])
    with pytest.raises(ClusterError, match=r"^The worker with the nodes not, and, answer, loss died"):
        training.result()
    assert cluster.alive()


@pytest.mark.slow
def test_a_node_that_fails_ends_the_training_with_a_sentence(cluster: Cluster) -> None:
    training = Training(drawn(50, seed=0), Settings(), [*PLACEMENT[:2], ["or"]])
    with pytest.raises(TrainingError, match=r"^A node of the worker with pump, .* failed: 'xor'$"):
        training.result()
    assert cluster.alive()
