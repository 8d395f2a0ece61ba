"""A pipeline stage's connection to its servers.

It works like a worker's, but all stages push a share before the first stage acknowledges it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.buffers import BufferPush
from orchestray.trainers.ps.protocol.encoding import Gradient
from orchestray.trainers.ps.protocol.requests import Origin, Part, Push, Report, Request
from orchestray.trainers.ps.worker.client import ShardClient


class StageClient(ShardClient):
    """A client of a stage's own servers; that of the first stage is also the client of the lead."""

    @property
    def bytes_moved(self) -> int:
        """Number of bytes between this stage and its servers, both ways."""
        return sum(link.bytes_moved for link in self._links)

    def push_only(
        self, order: Compute, gradient: Gradient, unused: Sequence[str], buffers: BufferPush | None = None
    ) -> int:
        """Send the gradient of this stage's parameters to its servers; return its staleness at the first of them.

        Nothing is acknowledged: the first stage does that once all stages have pushed.

        Args:
            order: order of the share.
            gradient: gradient of this stage's parameters.
            unused: parameters that the share had no gradient for.
            buffers: changes that the share made to the stage's buffers, if it has any.
        """
        part = Part(order.step, order.share, order.num_samples, order.batch_samples)
        asked = []
        for shard, link in enumerate(self._links):
            encoding, tensors = self.encoder.encode(shard, gradient, order.step)
            push = Push(
                origin=Origin(self.worker, (part,), self.versions[shard]),
                encoding=encoding,
                pieces=len(tensors),
                unused=tuple(unused),
                orders=(order.order_id,),
            )
            if shard == 0 and buffers is not None:
                tensors += [buffers.floats, buffers.integers]
            asked.append(link.ask(Request(push=push), tensors))
        return self._all(asked)[0].staleness

    def acknowledge(self, order: Compute, loss_sum: float, staleness: int) -> bool:
        """Report to the lead that the servers of all stages have a share; return True if it counts.

        Args:
            order: order of the share.
            loss_sum: the share's part of the batch's mean loss.
            staleness: largest staleness at the stages' first servers.
        """
        read = self.versions[0]
        report = Report(order.order_id, loss_sum, read, read + staleness)
        answer = self._one(self._links[0].ask(Request(acknowledge=(report,), tally=self._tally())))
        self._drop([order.order_id])
        return answer.counts
