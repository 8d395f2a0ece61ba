"""A leaf server: the only server of its workers, and one of a few clients of the shards.

Workers use it like a lead that holds everything. It passes their requests on to the shards, where the coordinator is.
So each share is handed out once in the whole run, whichever worker computes it. The leaf saves messages of values:

- synchronous: the shares of a batch that its workers compute are summed into one push.
- stale, and with workers that repeat others' shares: what has arrived while the last push was in progress is summed.
- asynchronous, with compute groups: the gradients of all its workers, which compute with the same parameters, are
  summed into one push; see `leaf_copies.GroupCopy`.
- asynchronous otherwise: it moves its own copy at once, and passes on the change; see `leaf_copies.LocalCopy`.

One thread per worker receives and answers. One thread, `run`, does everything else, in the order of the requests.

Sources: Gupta et al. 2016 (Rudra), section 3.2; Hsieh et al. 2017 (Gaia), section 4; Hadjis et al. 2016 (Omnivore),
section 3 (compute groups).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.trainers.ps.protocol.encoding import GradientDecoder
from orchestray.trainers.ps.protocol.messages import ANSWER, RequestServer, finish, result, start, tensors_of
from orchestray.trainers.ps.protocol.requests import NOBODY, Header, Request
from orchestray.trainers.ps.variants.hierarchy.leaf_client import Upstream
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import BatchCopy, LocalCopy
from orchestray.trainers.ps.variants.hierarchy.leaf_requests import Asker, Requests


@dataclass(frozen=True)
class _Gone:
    worker: int
    channel: Channel


class LeafServer(RequestServer):
    """A leaf server. Each worker has a thread that calls `serve`; one more thread calls `run` for all of them."""

    def __init__(
        self,
        upstream: Upstream,
        copy: BatchCopy | LocalCopy,
        decoder: GradientDecoder,
        *,
        sums_whole_batches: bool = True,
    ) -> None:
        """
        Args:
            upstream: connection to the shards, after `hello`.
            copy: copy of the parameters.
            decoder: decoder of workers' gradients, for a single shard of all parameters.
            sums_whole_batches: True to wait for the shares of a batch that its other workers compute.
        """
        super().__init__()
        self._upstream = upstream
        self._copy = copy
        self._requests = Requests(upstream, copy, decoder, self._changed, sums_whole_batches=sums_whole_batches)
        self._inbox: deque[Asker | _Gone] = deque()
        self._heard: Handle[Message] | None = None

    # -- a worker's thread -------------------------------------------------------------------------------------------

    def _serve_one(self, channel: Channel, worker: int | None, header: Header[Request]) -> Handle[Message]:
        tensors = tensors_of(channel, header)
        asker, following = (
            Asker(NOBODY if worker is None else worker, header.sections, tensors, channel),
            channel.irecv(),
        )
        following.future.add_done_callback(self._wake)
        with self._changed:
            self._inbox.append(asker)
            self._changed.notify_all()
            self._changed.wait_for(lambda: asker.is_done or _has_failed(following) or self._closed)
            if not asker.is_done:
                asker.is_gone = True
                if not self._closed:
                    result(following)  # raises: the worker has died
                raise ChannelClosedError("the leaf server is closed")
        try:
            finish(start(channel, ANSWER, asker.answer, asker.reply))
        finally:
            if asker.lent:
                with self._changed:
                    self._copy.give_back(asker.reply)
        return following

    def _gone(self, worker: int | None, channel: Channel) -> None:
        if worker is not None:
            with self._changed:
                self._inbox.append(_Gone(worker, channel))
                self._changed.notify_all()

    # -- the thread that runs ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass on requests and answers until `close`. Blocks.

        Raises:
            ChannelClosedError: a shard's server is lost, and no other replaces it; the workers' channels are closed.
        """
        try:
            while self._turn():
                pass
        except ChannelClosedError:
            if not self._closed:
                raise
        finally:
            self.close()

    def close(self) -> None:
        """End every connection."""
        self._hang_up()
        self._upstream.close()

    def _turn(self) -> bool:
        self._listen()
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._closed or self._requests.has_landed)
            items = list(self._inbox)
            self._inbox.clear()
            if self._closed:
                return False
        self._requests.land()
        for item in items:
            if isinstance(item, _Gone):
                self._requests.lose(item.worker, item.channel)
            else:
                self._requests.take(item)
        self._requests.forward()
        self._requests.ask()
        return True

    def _listen(self) -> None:
        """Watch for the answer to the oldest request, also after it has been sent again to another server."""
        header = self._requests.answer_header
        if header is not None and header is not self._heard:
            self._heard = header
            header.future.add_done_callback(self._wake)


def _has_failed(handle: Handle[Message]) -> bool:
    return handle.done() and handle.future.exception() is not None
