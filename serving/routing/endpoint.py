"""The versions of a model behind one name: which of them answers a request, and which get a copy of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from orchestray.serving.batching import Batcher, BatchingError
from orchestray.serving.models.codec import Codec
from orchestray.serving.models.errors import UnknownModelError
from orchestray.serving.models.signature import Output, Sample, Signature

if TYPE_CHECKING:
    from orchestray.serving.generation.engine import Engine

_log = logging.getLogger("orchestray.serving")

Close: TypeAlias = Callable[[], Awaitable[None]]


class ModelVersion:
    """One version of a model, with its batcher.

    Args:
        signature: inputs and outputs of the model.
        batcher: answers its requests; the creator of this version adds the runners.
        close: releases the resources of the runners, when the last request is answered.
    """

    def __init__(self, signature: Signature, batcher: Batcher[Sample, Output], close: Close | None = None) -> None:
        self.signature = signature
        self.name, self.version = signature.name, signature.version
        self.batcher = batcher
        self.codec = Codec(signature)
        """Form of its requests and answers: that of the signature, or the task's own."""
        self.generator: Engine | None = None
        """Engine that generates text with it, if any; ends with the version."""
        self.generator_lacking: str | None = None
        """Reason why a text model does not generate text here, in a sentence."""
        self.start_s: float | None = None
        """Seconds that loading and warm-up took."""
        self.replaced_in_s: float | None = None
        """Seconds that its successor needs to load, if it was ended to make room for it; None: it answers."""
        self.rests = False
        """True if it has no runner without requests (scaling to zero)."""
        self._close = close

    @property
    def is_deserted(self) -> bool:
        """True if its runners are gone and not replaced in the usual time, so that requests would wait in vain."""
        return self.batcher.is_deserted and not self.rests

    async def predict(self, sample: Sample, *, priority: int = 0, deadline_s: float | None = None) -> Output:
        """Return the answer to one sample; errors are those of `Batcher.submit`."""
        return await self.batcher.put(sample, priority=priority, deadline_s=deadline_s)

    async def close(self, *, drain: bool = True) -> None:
        """Answer waiting requests (`drain`), or fail them; then release the runners.

        May be called again without `drain` while it drains: waiting requests then fail, and both calls return.
        """
        try:
            if self.generator is not None:
                await self.generator.close(drain=drain)
        finally:
            try:
                await self.batcher.close(drain=drain)
            finally:
                close, self._close = self._close, None
                if close is not None:
                    await close()


@dataclass(frozen=True)
class Share:
    """The share of one version in its model's requests."""

    version: ModelVersion
    traffic: float = 100.0
    """Per cent of the requests; 0: only those that name the version."""
    shadow: bool = False
    """True if it gets a copy of every request that another version answers, and its answers are discarded."""


class Endpoint:
    """A model under its name, which picks a version for each request.

    Requests are dealt out in exact proportion, not drawn: of any 100 requests a version with 5 per cent gets 5.
    """

    def __init__(self, name: str, shares: Sequence[Share]) -> None:
        self.name = name
        self._copies: set[asyncio.Future[Output]] = set()
        self.set_shares(shares)

    def set_shares(self, shares: Sequence[Share]) -> None:
        """Change the shares of the versions, for every request from now on.

        Raises:
            ValueError: no version would answer.
        """
        if not any(share.traffic > 0 and not share.shadow for share in shares):
            raise ValueError(f"no version of {self.name} gets traffic")
        self.shares = tuple(shares)
        self.versions = [share.version for share in shares]
        """All versions, including shadows and those without traffic."""
        self._answering = [share for share in shares if share.traffic > 0 and not share.shadow]
        self.answering = [share.version for share in self._answering]
        """Versions that answer requests which name no version."""
        self._copied_to = {version: self._shadows_of(version) for version in self.versions}
        self._credit = [0.0] * len(self._answering)

    def _shadows_of(self, version: ModelVersion) -> list[ModelVersion]:
        """Return the shadows that accept the version's requests."""
        shadows = [share.version for share in self.shares if share.shadow and share.version is not version]
        return [shadow for shadow in shadows if shadow.signature.takes_samples_of(version.signature)]

    @property
    def uncopied(self) -> list[str]:
        """Clauses about each shadow that cannot get copies of the requests of a version with traffic."""
        shadows = [share.version for share in self.shares if share.shadow]
        return [
            f"{self.name} version {shadow.version}, a shadow, gets no copies of what version {share.version.version} "
            f"is asked, because it takes other inputs: {_taken(shadow)}, not {_taken(share.version)}"
            for shadow in shadows
            for share in self._answering
            if shadow not in self._copied_to[share.version]
        ]

    @property
    def main(self) -> ModelVersion:
        """Version with the most traffic, whose signature is shown as the model's."""
        return max(self._answering, key=lambda share: share.traffic).version

    @property
    def signature(self) -> Signature:
        """Signature of the main version."""
        return self.main.signature

    def pick(self, version: str | int | None = None) -> ModelVersion:
        """Return the version that answers the next request: the named one, or the one whose turn it is.

        Args:
            version: its number, also as a text, as requests have it; None: by the traffic.

        Raises:
            UnknownModelError: the version does not exist.
        """
        if version is not None:
            for each in self.versions:
                if each.version == str(version):
                    return each
            there = ", ".join(each.version for each in self.versions)
            raise UnknownModelError(f"There is no version {version} of the model {self.name}; there is {there}.")
        if len(self.answering) == 1:
            return self.answering[0]
        total = 0.0
        for index, share in enumerate(self._answering):
            self._credit[index] += share.traffic
            total += share.traffic
        turn = max(range(len(self._credit)), key=self._credit.__getitem__)
        self._credit[turn] -= total
        return self.answering[turn]

    def predict(
        self,
        sample: Sample,
        *,
        version: str | int | ModelVersion | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> asyncio.Future[Output]:
        """Return the answer to one sample, which is to be awaited.

        Args:
            sample: result of `Signature.parse`.
            version: version that answers (its number, or the result of `pick`); None: by the traffic.
            priority, deadline_s: see `Batcher.submit`.

        Raises:
            UnknownModelError: the version does not exist.
            BatchingError, ModelError: see `Batcher.submit`.
        """
        chosen = version if isinstance(version, ModelVersion) else self.pick(version)
        answer = chosen.batcher.put(sample, priority=priority, deadline_s=deadline_s)
        for shadow in self._copied_to.get(chosen, ()):  # none if it is gone by now
            self._copy(shadow, sample)
        return answer

    def _copy(self, shadow: ModelVersion, sample: Sample) -> None:
        """Send a copy to a shadow, after everything else that it has to do; the answer is discarded."""
        with contextlib.suppress(BatchingError):
            copy = shadow.batcher.put(shadow.signature.as_taken(sample), priority=-1)
            self._copies.add(copy)
            copy.add_done_callback(self._forget)

    def _forget(self, copy: asyncio.Future[Output]) -> None:
        self._copies.discard(copy)
        if not copy.cancelled() and (error := copy.exception()) is not None:
            _log.info("a shadow of %s failed: %s", self.name, error)


def _taken(version: ModelVersion) -> str:
    return ", ".join(f"{spec.name} ({spec})" for spec in version.signature.inputs)
