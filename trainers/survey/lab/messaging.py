"""Training by messages between the nodes of a network, with one sample under way and with several."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from orchestray.platform.cluster.cluster import connect, current
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.message_driven.network import Settings, trained_in_order
from orchestray.trainers.survey.message_driven.nodes import Loss, Pump
from orchestray.trainers.survey.message_driven.trees import drawn
from orchestray.trainers.survey.message_driven.workers import Trained, Training

_LAST = 100
"""Trees at the end whose loss is shown. No tree comes twice, so it is the loss on trees that were never seen."""


def message_driven(rounds: int = 0, num_trees: int = 400, active: Sequence[int] = (1, 8)) -> Exhibit:
    """Train a recursive network over Boolean expressions, each a tree of its own shape, by messages between actors.

    Args:
        rounds: unused: each setting trains once.
        num_trees: trees that each setting trains on, at least 100.
        active: trees under way at once, by setting; the first must be 1.
    """
    del rounds
    is_there = current() is not None
    cluster = connect()
    trees = drawn(num_trees, seed=0)
    try:
        runs = {settings: Training(trees, settings).result() for settings in map(Settings, active)}
    finally:
        if not is_there:
            cluster.close()
    plain = trained_in_order(trees, Settings())
    rows = [_row(settings, trained, float((trained.weights - plain).abs().max())) for settings, trained in runs.items()]
    columns = ["trees under way", "trees done", "updates", "messages between workers", "mean staleness"]
    columns += ["largest staleness", "its bound", f"loss of the last {_LAST}", "trees / s", "difference from SGD"]
    findings = _findings(rows, [*runs.values()][-1], num_trees)
    return Exhibit("message-driven", "A network over trees, trained by messages", columns, rows, findings)


def _row(settings: Settings, trained: Trained, difference: float) -> list[Any]:
    pump, loss, staleness = trained.nodes["pump"], trained.nodes["loss"], trained.staleness
    assert isinstance(pump, Pump)
    assert isinstance(loss, Loss)
    return [
        pump.most_active,
        len(loss.losses),
        sum(node.stepper.updates for node in trained.parameterised.values()),
        trained.num_sent,
        sum(updates * count for updates, count in staleness.items()) / staleness.total(),
        max(staleness),
        settings.most_stale,
        sum(loss.losses[tree] for tree in sorted(loss.losses)[-_LAST:]) / _LAST,
        len(loss.losses) / trained.seconds,
        difference,
    ]


def _findings(rows: Sequence[Sequence[Any]], last: Trained, num_trees: int) -> list[str]:
    done = "All" if all(row[1] == num_trees for row in rows) else "Not all"
    bounds = ", ".join(f"{row[5]} of {row[6]}" for row in rows)
    kept = "never above" if all(row[5] <= row[6] for row in rows) else "above"
    counts = ", ".join(f"{staleness}: {last.staleness[staleness]:,}" for staleness in sorted(last.staleness))
    return [
        f"{done} {num_trees} trees were done, and staleness is {kept} its bound: {bounds}.",
        f"With one tree under way the parameters differ from those of SGD by {rows[0][-1]:.1g} at most.",
        f"The loss ends at {', '.join(f'{row[7]:.2g}' for row in rows)}; that of a coin is {log(2):.2g}.",
        f"With {rows[-1][0]} under way trees are done {rows[-1][8] / rows[0][8]:.2g} times as fast as with one.",
        f"Messages by their staleness, with {rows[-1][0]} under way: {counts}.",
    ]
