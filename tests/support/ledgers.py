"""Ledgers of a few workers, asked and answered by hand."""

from __future__ import annotations

from typing import Any

from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Ack, Compute
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings


def settings(**options: Any) -> CoordinatorSettings:
    given: dict[str, Any] = {
        "num_samples": 21,
        "num_validation_samples": 7,
        "batch_size": 8,
        "num_shares": 3,
        **options,
    }
    if "total_steps" not in given:
        given.setdefault("epochs", 2)
    return CoordinatorSettings(**given)


def coordinator(num_workers: int, **options: Any) -> Coordinator:
    made = Coordinator(settings(**options))
    for worker in range(num_workers):
        made.join(worker)
    return made


def compute(coordinator: Coordinator, worker: int) -> Compute:
    order = coordinator.next(worker)
    assert isinstance(order, Compute), order
    return order


def done(coordinator: Coordinator, worker: int, order: Compute, **options: Any) -> Ack:
    assert coordinator.claim(worker, order.order_id)
    return coordinator.acknowledge(
        worker,
        order.order_id,
        order.num_samples / order.batch_samples,
        **{"read_version": order.min_version, **options},
    )
