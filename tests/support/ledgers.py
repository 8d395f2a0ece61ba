"""Ledgers of a few workers, asked and answered by hand."""

from __future__ import annotations

from typing import Any

from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.orders import Ack, Compute
from orchestray.trainers.central.plan import LedgerSettings


def settings(**options: Any) -> LedgerSettings:
    given: dict[str, Any] = {
        "num_samples": 21,
        "num_validation_samples": 7,
        "batch_size": 8,
        "num_shares": 3,
        **options,
    }
    if "total_steps" not in given:
        given.setdefault("epochs", 2)
    return LedgerSettings(**given)


def ledger(num_workers: int, **options: Any) -> Ledger:
    made = Ledger(settings(**options))
    for worker in range(num_workers):
        made.join(worker)
    return made


def compute(ledger: Ledger, worker: int) -> Compute:
    order = ledger.next(worker)
    assert isinstance(order, Compute), order
    return order


def done(ledger: Ledger, worker: int, order: Compute, **options: Any) -> Ack:
    assert ledger.claim(worker, order.order_id)
    return ledger.acknowledge(
        worker,
        order.order_id,
        order.num_samples / order.batch_samples,
        **{"read_version": order.min_version, **options},
    )
