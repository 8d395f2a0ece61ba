"""Two ends of a channel in one process, and a way to run a program at each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from orchestray.platform.channel import Channel, SimulatedNetwork
from support.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
Program = Callable[[Channel], Any]


@dataclass
class Pair:
    """Two ends in this process. `kind` names the backend."""

    kind: str
    left: Channel
    right: Channel
    network: SimulatedNetwork | None = None

    def run(self, left: Program, right: Program) -> tuple[Any, Any]:
        """Runs a program at each end, at the same time; returns what they return, raises what one of them raises."""
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
