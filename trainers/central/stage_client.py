"""A stage's end of its servers: as a worker's, but all stages push a share before the first acknowledges it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestray.trainers.central.applied import Part
from orchestray.trainers.central.buffers import BufferPush
from orchestray.trainers.central.client import ShardClient
from orchestray.trainers.central.encoding import Gradient
from orchestray.trainers.central.orders import Compute


class StageClient(ShardClient):
    """A stage's end of its own servers; that of the first stage is the lead's, too."""

    others_bytes = 0
    """On the first stage: what the other stages and their servers, and stages among themselves, have sent."""
    others_saved = 0
    """On the first stage: the bytes that the other stages' compressors saved."""
    others_errors: Sequence[float] = ()
    """On the first stage: the norms of what the other stages' compressors keep."""

    @property
    def bytes_moved(self) -> int:
        """Between this stage and its servers, both ways."""
        return sum(link.bytes_moved for link in self._links)

    @property
    def error(self) -> float:
        """The norm of what this stage's compressors keep."""
        return self.encoder.error

    def _moved_elsewhere(self) -> int:
        return super()._moved_elsewhere() + self.others_bytes

    def _saved_by_all(self) -> int:
        return super()._saved_by_all() + self.others_saved

    def _error(self) -> float:
        return float(math.hypot(self.error, *self.others_errors))

    def push_only(
        self, order: Compute, gradient: Gradient, unused: Sequence[str], buffers: BufferPush | None = None
    ) -> int:
        """Send the gradient of this stage's parameters to its servers; returns its staleness at the first.

        Nothing is acknowledged: that is for when all stages have come so far.
        """
        part = Part(order.step, order.share, order.num_samples, order.batch_samples).to_json()
        asked = []
        for shard, link in enumerate(self._links):
            encoding, tensors = self.encoder.encode(shard, gradient, order.step)
            origin = [self.worker, [part], self.versions[shard]]
            push = {"origin": origin, "unused": list(unused), "encoding": encoding, "pieces": len(tensors)}
            if shard == 0 and buffers is not None:
                tensors += [buffers.floats, buffers.integers]
            asked.append(link.ask({"push": {**push, "orders": [order.order_id]}}, tensors))
        return int(self._all(asked)[0].get("staleness", 0))

    def acknowledge(self, order: Compute, loss_sum: float, staleness: int) -> bool:
        """Tell the lead that the servers of all stages have a share; returns whether it counts."""
        read = self.versions[0]
        report = [order.order_id, loss_sum, read, read + staleness]
        answer = self._one(self._links[0].ask({"acknowledge": [report], **self._tally()}))
        self._drop([order.order_id])
        return bool(answer["counts"])
