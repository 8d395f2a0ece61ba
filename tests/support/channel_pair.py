"""Two ends of a channel in one process, and a way to run a program at each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from orchestray.platform.comm.channel import Channel, GlooChannel
from orchestray.platform.comm.channel.gloo import address_towards, rendezvous
from orchestray.platform.sim.network import SimulatedNetwork
from support.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
Program = Callable[[Channel], Any]


def connect_gloo(
    host: str, port: int, prefix: str, rank: int, *, name: str, connect_timeout_s: float = TIMEOUT_S, **options: Any
) -> GlooChannel:
    """Connect one end of a pair that meets at the TCPStore served at `host`:`port`, on one machine as well."""
    store = rendezvous(host, port, prefix, name=name, timeout_s=connect_timeout_s)
    local_host = address_towards(host, port)
    return GlooChannel(store, rank, name=name, connect_timeout_s=connect_timeout_s, local_host=local_host, **options)


@dataclass
class Pair:
    """Two ends in this process. `kind` names the backend."""

    kind: str
    left: Channel
    right: Channel
    network: SimulatedNetwork | None = None

    def run(self, left: Program, right: Program) -> tuple[Any, Any]:
        """Run a program at each end, at the same time; return both results, or raise the error of either."""
        if self.network is not None:
            replicas = [
                self.network.start("left", lambda: left(self.left)),
                self.network.start("right", lambda: right(self.right)),
            ]
            self.network.run()
            return replicas[0].result, replicas[1].result
        with ThreadPoolExecutor(2) as pool:
            futures = pool.submit(left, self.left), pool.submit(right, self.right)
            return futures[0].result(TIMEOUT_S), futures[1].result(TIMEOUT_S)
