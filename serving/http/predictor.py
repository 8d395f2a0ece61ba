"""The way from a sample to an answer: the choice of a version, the deadline, and a watch on the client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.requests import Request

from orchestray.serving.batching import BatcherClosedError
from orchestray.serving.http.problems import check_not_replaced, deserted, not_ready, wrong_input
from orchestray.serving.http.request_context import CONNECTION_KEY, Call, ClientWatch
from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.routing.endpoint import Endpoint, ModelVersion
from orchestray.serving.routing.registry import Registry

T = TypeVar("T")
MODEL_HEADER = "X-Model"
VERSION_HEADER = "X-Model-Version"
_MODEL_KEY, _VERSION_KEY = MODEL_HEADER.lower().encode(), VERSION_HEADER.lower().encode()
_MOST_SAMPLES = 1024


def most_samples(version: ModelVersion) -> int:
    """Return the most samples in one request: each is a request to the batcher, whose queue must hold them all."""
    return min(_MOST_SAMPLES, version.batcher.max_queue)


class Predictor:
    """A client of the models of a registry, for HTTP requests."""

    def __init__(self, models: Registry) -> None:
        self.models = models

    def choose(self, call: Call, name: str | None = None, version: str | None = None) -> tuple[Endpoint, ModelVersion]:
        """Return the model that a request names, or the first, and the version that will answer.

        Args:
            call: the request; the chosen version is recorded in it.
            name: name of the model; None: the first.
            version: version of the model; None: any, by share of the traffic.

        Raises:
            HttpProblem: 503, the endpoint is not ready, or the version has no replicas.
            UnknownModelError: the model or version does not exist.
        """
        if not self.models.ready:
            raise not_ready()
        endpoint = self.models.default if name is None else self.models[name]
        chosen = endpoint.pick(version)
        call.asked_version = version
        call.reaches(chosen)
        self.check_ready((chosen,))
        return endpoint, chosen

    def check_ready(self, versions: Iterable[ModelVersion] | None = None) -> None:
        """Check that these versions answer; default: those that answer requests without a version.

        Raises:
            HttpProblem: 503, they do not.
        """
        if not self.models.ready:
            raise not_ready()
        if versions is None:
            versions = [version for endpoint in self.models for version in endpoint.answering]
        versions = [*versions]
        check_not_replaced(versions)
        for version in versions:
            if version.is_deserted:
                raise deserted(version)

    @staticmethod
    def check_number(num_samples: int, version: ModelVersion) -> None:
        """Check the number of samples of one request to a version.

        Raises:
            HttpProblem: 422, none or too many.
        """
        most = most_samples(version)
        if not 1 <= num_samples <= most:
            raise wrong_input("inputs", f"1 to {most} samples in a request", f"{num_samples}")

    async def answer(
        self, request: Request, call: Call, endpoint: Endpoint, version: ModelVersion, samples: Sequence[Sample]
    ) -> tuple[list[Output], ModelVersion]:
        """Return the answers to the samples of one request, in order, and the one version that gave them all.

        If one sample fails, so does the request; it is cancelled if its client disconnects.

        Raises:
            BatchingError, ModelError: see `Endpoint.predict`.
        """
        priority, deadline_s = call.priority, call.deadline_s
        async with ClientWatch(call, request.receive, request.scope.get(CONNECTION_KEY)):
            if len(samples) == 1:
                output, version = await self._ask(call, endpoint, version, samples[0], priority, deadline_s)
                return [output], version
            while True:
                answers = await all_of(
                    self._ask(call, endpoint, version, sample, priority, deadline_s) for sample in samples
                )
                newer = [by for _, by in answers if by is not version]
                if all(by is answers[0][1] for _, by in answers):
                    return [output for output, _ in answers], answers[0][1]
                # The version was replaced while some samples waited. One request must not mix two networks, so the
                # version that has answered one sample gets all of them again.
                endpoint, version = self.models[endpoint.name], newer[0]

    async def _ask(
        self,
        call: Call,
        endpoint: Endpoint,
        version: ModelVersion,
        sample: Sample,
        priority: int,
        deadline_s: float | None,
    ) -> tuple[Output, ModelVersion]:
        """Ask a version, or its successor if it was replaced meanwhile and the successor reads requests in its way.

        Returns:
            the output, and the version that answered.

        Raises:
            UnknownModelError: the request names a version that is gone.
        """
        try:
            return await endpoint.predict(sample, version=version, priority=priority, deadline_s=deadline_s), version
        except BatcherClosedError:
            if not self.models.ready or endpoint.name not in self.models:
                raise
            now = self.models[endpoint.name]
            successor = now.pick(call.asked_version)
            check_not_replaced((successor,))
            if successor is version or not successor.signature.reads_like(version.signature):
                raise
            call.reaches(successor)
            return await now.predict(sample, version=successor, priority=priority, deadline_s=deadline_s), successor


async def all_of(awaited: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what each returns; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def named_by(request: Request, call: Call) -> tuple[str | None, str | None]:
    """Return the model and the version that a request names, by `?model=` and `?version=` or headers; None: none."""
    query = request.scope["query_string"]
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}
    name = asked.get("model") or _text(call.headers.get(_MODEL_KEY))
    version = asked.get("version") or _text(call.headers.get(_VERSION_KEY))
    return name, version


def named_in_path(request: Request) -> tuple[str, str | None]:
    """Return the model and the version that the path of a request names; None: no version."""
    parameters = request.path_params
    return parameters["name"], parameters.get("version")


def _text(value: bytes | None) -> Any:
    return None if value is None else value.decode("latin-1")
