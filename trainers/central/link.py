"""A worker's connection to one shard: requests in order, kept until they are answered, and sent again if need be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestray.platform.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.channel.blocks import SharedBlock
from orchestray.trainers.central.messages import ANSWER, REQUEST, TENSORS, ServerError, num_bytes_of, result, start


@dataclass(eq=False)
class Asked:
    """A request under way."""

    link: Link
    request: Mapping[str, Any]
    sent: Sequence[Tensor]
    """Must not change until it is answered."""
    into: Sequence[Tensor] | None
    always: bool
    """Whether the answer brings tensors for `into` in any case: then they come without anybody waiting for them."""
    answer: Mapping[str, Any] | None = None
    tensors: Sequence[Tensor] = ()
    handles: list[Handle[None]] = field(default_factory=list)
    header: Handle[Message] | None = None
    payload: Handle[Message] | None = None

    def wait(self) -> Mapping[str, Any]:
        """The answer.

        Raises:
            ServerError: the server could not do it, and says why.
            ChannelClosedError: the server is lost, and nobody takes its place.
        """
        while self.answer is None:
            self.link.finish_first()
        if "error" in self.answer:
            raise ServerError(str(self.answer["error"]))
        return self.answer

    def done(self) -> bool:
        """Whether `wait` would return, or raise, soon."""
        return self.answer is not None or (self.header is not None and self.header.done())


class Link:
    """See the module."""

    def __init__(
        self,
        shard: int,
        channel: Channel,
        hello: Mapping[str, Any],
        *,
        replace: Callable[[int, Exception], Channel] | None,
        block: SharedBlock | None = None,
    ) -> None:
        self._shard = shard
        self._channel = channel
        self._block = block
        self._hello = hello
        self._replace = replace
        self._unanswered: deque[Asked] = deque()
        self._bytes_of_earlier = 0
        with suppress(ChannelClosedError):  # the first request finds out
            self._offer()

    def hello(self, *, anew: bool) -> dict[str, Any]:
        """The request that says who is there."""
        return {"hello": {**self._hello, "anew": anew}}

    def ask(
        self,
        request: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        into: Sequence[Tensor] | None = None,
        always: bool = True,
    ) -> Asked:
        """Send a request; answers come in the order of the requests."""
        asked = Asked(self, request, tensors, into, always)
        self._unanswered.append(asked)
        try:
            self._start(asked)
        except ChannelClosedError as error:
            self._recover(error)
        return asked

    def finish_first(self) -> None:
        """Wait for the answer to the oldest request."""
        asked = self._unanswered[0]
        try:
            self._finish(asked)
        except ChannelClosedError as error:
            self._recover(error)
            return
        self._unanswered.popleft()

    def reconnect(self, channel: Channel) -> None:
        """Go on over another channel, sending again what was not answered."""
        self._bytes_of_earlier += self._channel.bytes_sent
        self._channel.close()
        self._channel = channel
        self._offer()
        greeting = Asked(self, self.hello(anew=False), (), None, always=True)
        anew = [asked for asked in self._unanswered if "hello" not in asked.request]
        for asked in self._unanswered:
            if "hello" in asked.request:
                greeting = asked
        self._unanswered = deque([greeting, *anew])
        for asked in self._unanswered:
            self._start(asked)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_of_earlier + self._channel.bytes_sent

    @property
    def bytes_moved(self) -> int:
        """Sent and received over the present channel, and sent over those before."""
        return self.bytes_sent + self._channel.bytes_received

    def close(self) -> None:
        self._channel.close()

    def _offer(self) -> None:
        if self._block is not None:
            self._channel.offer(self._block)

    def _start(self, asked: Asked) -> None:
        # The receives come first: an answer that is large is on its way while the worker computes.
        channel, request = self._channel, asked.request
        places = [channel.lend(tensor) for tensor in asked.into or ()] if "pull" in request else []
        is_placed = bool(places) and None not in places
        if is_placed:
            request = {**request, "pull": {**request["pull"], "place": places}}
        asked.handles = start(channel, REQUEST, request, asked.sent)
        asked.header = channel.irecv(tag=ANSWER)
        asked.payload = None
        if asked.into is not None and asked.always and not is_placed:
            asked.payload = self._channel.irecv(into=asked.into, tag=TENSORS)

    def _finish(self, asked: Asked) -> None:
        assert asked.header is not None
        header = result(asked.header)
        if header.meta.get("placed"):
            assert asked.into is not None
            asked.tensors = asked.into
            if "found" in header.meta:
                asked.tensors = [self._channel.borrow(header.meta["found"]), *asked.into[1:]]
            self._channel.count_lent(received_bytes=num_bytes_of(asked.into))
        elif header.meta.get("tensors"):
            payload = asked.payload or self._channel.irecv(into=asked.into, tag=TENSORS)
            asked.tensors = result(payload).tensors
        elif asked.payload is not None:
            asked.payload.cancel()  # the answer is an error
        for handle in asked.handles:
            handle.future.result()
        asked.answer = header.meta

    def _recover(self, error: ChannelClosedError) -> None:
        """Another server in place of the lost one, if there is one; else the error goes on."""
        failure: ChannelClosedError = error
        while self._replace is not None:
            channel = self._replace(self._shard, failure)  # raises where nobody takes its place
            try:
                self.reconnect(channel)
            except ChannelClosedError as again:
                failure = again
            else:
                return
        raise failure
