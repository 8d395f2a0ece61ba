"""Monitoring of an endpoint: Prometheus metrics, and a stream of batches for pages."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from orchestray.serving.batching import BatcherStats, BatchListener
from orchestray.serving.batching.listener import SHED_OVERLOAD
from orchestray.serving.routing.registry import Registry

_MEMORY = 240
"""Number of batches that a page gets when it opens."""
_EVERY_S = 0.1
"""Period in seconds at which batches are sent together: nobody sees more, and a busy endpoint has thousands."""
_SILENCE_S = 15.0
"""Seconds without batches after which a comment is sent: proxies close connections that seem dead."""


class LiveBatches:
    """A memory of the last batches that streams new ones to its followers. It belongs to one event loop."""

    def __init__(self) -> None:
        self._last: deque[dict[str, Any]] = deque(maxlen=_MEMORY)
        self._followers: set[_Follower] = set()
        self._num_requests = 0
        self._num_shed = 0
        self._closed = False

    def batch(
        self,
        *,
        model: str,
        version: str,
        size: int,
        queue_s: Sequence[float],
        service_s: float,
        wait_s: float,
        failed: bool,
    ) -> None:
        """Publish a batch that has ended.

        Args:
            model, version: model version that ran it.
            size: number of its requests.
            queue_s: seconds that each request had waited.
            service_s: seconds that the batch took.
            wait_s: wait that the policy chose last.
            failed: True if the batch failed as a whole.
        """
        self._num_requests += size
        waited_s = sum(queue_s) / len(queue_s) if queue_s else 0.0
        line = {
            "time_s": time.time(),
            "model": model,
            "version": version,
            "size": size,
            "queue_ms": round(waited_s * 1e3, 3),
            "service_ms": round(service_s * 1e3, 3),
            "latency_ms": round((waited_s + service_s) * 1e3, 3),
            "wait_ms": round(wait_s * 1e3, 3),
            "failed": failed,
        }
        self._last.append(line)
        for follower in self._followers:
            follower.add(line)

    def shed(self) -> None:
        """Publish that a request was refused."""
        self._num_shed += 1
        for follower in self._followers:
            follower.changed.set()

    def close(self) -> None:
        """End every stream when the endpoint stops, since they do not end by themselves."""
        self._closed = True
        for follower in self._followers:
            follower.changed.set()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the stream of one page: first the remembered batches, then new ones."""
        follower = _Follower(self._last)
        self._followers.add(follower)
        try:
            while not self._closed:
                yield self._event(follower.take())
                while not self._closed:
                    try:
                        await asyncio.wait_for(follower.changed.wait(), _SILENCE_S)
                        break
                    except TimeoutError:
                        yield b": nothing\n\n"
                if not self._closed:
                    await asyncio.sleep(_EVERY_S)
        finally:
            self._followers.discard(follower)

    def _event(self, batches: list[dict[str, Any]]) -> bytes:
        state = {"batches": batches, "time_s": time.time(), "requests": self._num_requests, "shed": self._num_shed}
        return b"event: batches\ndata: " + orjson.dumps(state) + b"\n\n"


class _Follower:
    """The batches that one page has not received yet."""

    def __init__(self, seen: deque[dict[str, Any]]) -> None:
        self._lines = deque(seen, maxlen=_MEMORY)
        self.changed = asyncio.Event()

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        self.changed.set()

    def take(self) -> list[dict[str, Any]]:
        self.changed.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines


_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_MODEL = ("model", "version")
_REPLICA = (*_MODEL, "replica")


class Monitor:
    """The counters of one HTTP front. It belongs to one event loop."""

    def __init__(self) -> None:
        self.live = LiveBatches()
        self.on_answer: Callable[[str, str, int, float], None] | None = None
        """Called with the arguments of `answered` for requests that reached a model, while new versions are watched."""
        self.on_each: Callable[[str, int, float], None] | None = None
        """Called with the method, the status and the seconds of every request."""
        self._watched: Registry | None = None
        self._counters: dict[tuple[str, str, int], tuple[Counter, Histogram | None]] = {}
        self._shed_counters: dict[tuple[str, str], Counter] = {}
        self.registry = CollectorRegistry()
        to = self.registry
        self._requests = Counter("orchestray_requests", "Requests answered", (*_MODEL, "status"), registry=to)
        self._request_s = Histogram(
            "orchestray_request_seconds",
            "From a request's first byte to its answer",
            _MODEL,
            buckets=_SECONDS,
            registry=to,
        )
        self.queue_s = Histogram(
            "orchestray_queue_seconds", "What a request waited for its batch", _MODEL, buckets=_SECONDS, registry=to
        )
        self.service_s = Histogram(
            "orchestray_service_seconds", "What a batch took", _MODEL, buckets=_SECONDS, registry=to
        )
        self.batch_size = Histogram("orchestray_batch_size", "Requests in a batch", _MODEL, buckets=_SIZES, registry=to)
        self.wait_s = Gauge(
            "orchestray_wait_seconds", "The wait in force: how long a batch may fill", _MODEL, registry=to
        )
        self.shed = Counter("orchestray_shed", "Requests that were not run", (*_MODEL, "reason"), registry=to)
        self.batch_errors = Counter("orchestray_batch_errors", "Batches that failed as a whole", _MODEL, registry=to)
        self.rollbacks = Counter("orchestray_rollbacks", "Changes taken back for this version", _MODEL, registry=to)
        self.runner_failures = Counter("orchestray_runner_failures", "Replicas that hung or died", _MODEL, registry=to)

    def listener(self, model: str, version: str) -> BatchListener:
        """Return the listener for the batcher of a version, so that its batches are counted here."""
        return _Listener(self, model, version)

    def answered(self, model: str, version: str, status: int, seconds: float, *, method: str = "POST") -> None:
        """Count an answered request; the names are empty if it reached no model."""
        if self.on_each is not None:
            self.on_each(method, status, seconds)
        key = (model, version, status)
        if key not in self._counters:  # a lookup by labels takes longer than counting
            request_s = self._request_s.labels(model, version) if model else None
            self._counters[key] = (self._requests.labels(model, version, str(status)), request_s)
        requests, request_s = self._counters[key]
        requests.inc()
        if request_s is not None:
            request_s.observe(seconds)
            if self.on_answer is not None:
                self.on_answer(model, version, status, seconds)

    def shed_early(self, model: str, version: str) -> None:
        """Count a request that was refused before any batcher; the names are empty if it reached no model."""
        key = (model, version)
        if key not in self._shed_counters:
            self._shed_counters[key] = self.shed.labels(*key, SHED_OVERLOAD)
        self._shed_counters[key].inc()
        self.live.shed()

    def watch(self, models: Registry) -> None:
        """Also report the state of these models' batchers at every scrape; repeated calls for them have no effect."""
        if self._watched is not models:
            self._watched = models
            self.registry.register(_Batchers(models))

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Listener(BatchListener):
    """The counters of one batcher, looked up once because this is called for each batch."""

    def __init__(self, monitor: Monitor, model: str, version: str) -> None:
        names = (model, version)
        self._monitor, self._model, self._version = monitor, model, version
        self._queue_s = monitor.queue_s.labels(*names)
        self._service_s = monitor.service_s.labels(*names)
        self._batch_size = monitor.batch_size.labels(*names)
        self._wait_s = monitor.wait_s.labels(*names)
        self._errors = monitor.batch_errors.labels(*names)
        self._failures = monitor.runner_failures.labels(*names)
        self._shed: dict[str, Counter] = {}
        self._last_wait_s = 0.0
        self._queued_s: dict[str, deque[Sequence[float]]] = defaultdict(deque)
        """Maps a runner to the waiting times of its batches, in the order in which it runs them."""

    def batch_started(self, runner: str, queue_s: Sequence[float]) -> None:
        self._batch_size.observe(len(queue_s))
        for seconds in queue_s:
            self._queue_s.observe(seconds)
        self._queued_s[runner].append(queue_s)

    def batch_finished(self, runner: str, num_items: int, service_s: float, error: BaseException | None) -> None:
        begun = self._queued_s.get(runner)
        queue_s = begun.popleft() if begun else ()
        if not begun:
            self._queued_s.pop(runner, None)
        self._service_s.observe(service_s)
        if error is not None:
            self._errors.inc()
        self._monitor.live.batch(
            model=self._model,
            version=self._version,
            size=num_items,
            queue_s=queue_s,
            service_s=service_s,
            wait_s=self._last_wait_s,
            failed=error is not None,
        )

    def batch_taken_back(self, runner: str, num_items: int) -> None:
        begun = self._queued_s[runner]
        if begun:
            begun.pop()
        if not begun:
            del self._queued_s[runner]

    def shed(self, reason: str) -> None:
        counter = self._shed.get(reason)
        if counter is None:
            counter = self._shed[reason] = self._monitor.shed.labels(self._model, self._version, reason)
        counter.inc()
        self._monitor.live.shed()

    def waiting(self, wait_s: float) -> None:
        self._last_wait_s = wait_s
        self._wait_s.set(wait_s)

    def runner_failed(self, runner: str, error: BaseException) -> None:
        self._failures.inc()


class OfModels(Collector):
    """A collector of the state of every version at the time of the scrape.

    Args:
        models: models that are read at every scrape.
    """

    def __init__(self, models: Registry) -> None:
        self.models = models

    def describe(self) -> Iterator[Metric]:
        """Return no metrics beforehand, as the models may not exist yet."""
        return iter(())


class _Batchers(OfModels):
    """A collector of the state of every version's batcher."""

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("orchestray_queue_length", "Requests that wait", labels=_MODEL)
        in_flight = GaugeMetricFamily("orchestray_in_flight", "Requests in batches that run", labels=_MODEL)
        replicas = GaugeMetricFamily("orchestray_replicas", "Replicas that take batches", labels=_MODEL)
        base = GaugeMetricFamily("orchestray_service_base_seconds", "What a batch costs at any size", labels=_MODEL)
        each = GaugeMetricFamily("orchestray_service_request_seconds", "What each request adds", labels=_MODEL)
        start = GaugeMetricFamily("orchestray_cold_start_seconds", "Until a first replica comes", labels=_MODEL)
        batches = CounterMetricFamily("orchestray_replica_batches", "Batches a replica has run", labels=_REPLICA)
        samples = CounterMetricFamily("orchestray_replica_samples", "Samples in these batches", labels=_REPLICA)
        places = GaugeMetricFamily(
            "orchestray_replica_info",
            "1, for the node of the cluster and the process in which a replica computes",
            labels=(*_REPLICA, "node", "pid"),
        )
        for version in self.models.versions:
            names, stats = (version.name, version.version), version.batcher.stats
            queued.add_metric(names, stats.num_queued)
            in_flight.add_metric(names, stats.num_in_flight)
            replicas.add_metric(names, stats.num_runners)
            base.add_metric(names, stats.a_s)
            each.add_metric(names, stats.c_s)
            if stats.start_s is not None:
                start.add_metric(names, stats.start_s)
            for name, (num_batches, num_samples) in _by_replica(stats).items():
                batches.add_metric((*names, name), num_batches)
                samples.add_metric((*names, name), num_samples)
            for name, process in {one.name: one.process for one in stats.runners if one.process}.items():
                places.add_metric((*names, name, process.node, str(process.pid)), 1)
        yield from (queued, in_flight, replicas, base, each, start, batches, samples, places)


def _by_replica(stats: BatcherStats) -> dict[str, tuple[int, int]]:
    """Sum batches and samples by replica; a replica may be listed twice, if it returns before its end was noticed."""
    found: dict[str, tuple[int, int]] = {}
    for runner in stats.runners:
        num_batches, num_samples = found.get(runner.name, (0, 0))
        found[runner.name] = (num_batches + runner.num_batches, num_samples + runner.num_items)
    return found
