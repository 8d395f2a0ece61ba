"""The registry of exchanges by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.config.registry import Registry

if TYPE_CHECKING:
    from orchestray.trainers.core.exchange_params import ExchangeParams

_SYNC = "orchestray.trainers.sync"

EXCHANGES: Registry[ExchangeParams] = Registry(
    "strategy.exchange",
    {
        # An exchange without a class here has several, chosen by its keys in `factory` and the driver's engines.
        "allreduce": (f"{_SYNC}.allreduce.params:AllReduce", None),
        "parameter_server": (f"{_SYNC}.parameter_server:ParameterServer", None),
        "gossip": (f"{_SYNC}.local.params:Gossip", f"{_SYNC}.local.gossip:Gossip"),
        "averaging": (f"{_SYNC}.local.params:Averaging", f"{_SYNC}.local.averaging:Averaging"),
        "elastic_averaging": (f"{_SYNC}.local.params:ElasticAveraging", f"{_SYNC}.local.elastic:ElasticAveraging"),
        "independent": (f"{_SYNC}.local.params:Independent", f"{_SYNC}.local.independent:Independent"),
    },
    noun="an exchange",
    default="allreduce",
)
