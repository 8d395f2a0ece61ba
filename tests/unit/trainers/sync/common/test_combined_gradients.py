"""Common behaviour of all schemes that combine whole gradients at every step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients
from orchestray.trainers.sync.factory import make_exchange
from support.lockstep import Holder, gradient
from support.threads import make_gloo_threads

SCHEMES: dict[str, dict[str, Any]] = {
    "chunked": {"compression": {"type": "qsgd"}},
    "merged": {"compression": {"type": "topk", "ratio": 0.1}},
    "powersgd": {"compression": {"type": "powersgd"}},
    "gathered": {"aggregation": {"type": "median", "byzantine": 1}},
    "factored": {"factors": "always"},
    "stored": {"factors": "auto", "store_shards": 3},
}


@pytest.mark.parametrize("leaves_in_step", [1, 2])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_lost_replica_is_seen_by_all_others(scheme: str, leaves_in_step: int) -> None:
    size = 4
    members = make_gloo_threads(size)
    seen: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        model, exchange = Holder(), make_exchange(**SCHEMES[scheme])
        try:
            exchange.attach(model, members[rank])
            for step in (1, 2, 3):
                exchange.before_step(step)
                for parameter, value in zip(model.parameters(), gradient(rank, step), strict=True):
                    parameter.grad = value
                assert isinstance(exchange, CombinedGradients)
                exchange.fraction = 1 / size
                if (rank, step) == (2, leaves_in_step):
                    members[rank].abort()
                    return
                exchange.finish([1.0])
        except BaseException as error:  # noqa: BLE001 - looked at below
            seen[rank] = error
            members[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for member in members:
        member.close()
    assert [type(error) for error in seen] == [PeerLostError, PeerLostError, type(None), PeerLostError]


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_lone_replica_sends_nothing_and_keeps_its_gradients_as_they_are(scheme: str) -> None:
    model, exchange = Holder(), make_exchange(**SCHEMES[scheme])
    exchange.attach(model, SoloCollective())
    exchange.before_step(1)
    for parameter, value in zip(model.parameters(), gradient(0, 1), strict=True):
        parameter.grad = value
    assert exchange.finish([2.0]) == [2.0]
    assert all(torch.equal(a, b) for a, b in zip(exchange.gradients(), gradient(0, 1), strict=True) if a is not None)
    assert exchange.bytes_saved == 0
    assert exchange.state() == exchange.wanted() == {}


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_misuse_is_refused_with_a_sentence(scheme: str) -> None:
    exchange = make_exchange(**SCHEMES[scheme])
    with pytest.raises(TrainingError, match="not attached"):
        exchange.finish([])
    with pytest.raises(ValueError, match="At most 8"):
        exchange.finish([0.0] * (MAX_EXTRAS + 1))
    exchange.attach(Holder(), SoloCollective())
    exchange.detach()
    assert exchange.bytes_saved == 0
