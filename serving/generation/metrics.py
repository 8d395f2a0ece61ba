"""Prometheus metrics of the engines of an endpoint, read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orchestray.serving.http.monitor import OfModels

if TYPE_CHECKING:
    from orchestray.serving.generation.engine import EngineStats

_Value = Callable[["EngineStats"], float]
_MODEL = ("model", "version")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
_READ = "Tokens read: of prompts, and again where an answer outgrows the context"
_COUNTS: dict[tuple[str, str], _Value] = {
    ("orchestray_generated_tokens", "Tokens generated"): lambda stats: stats.num_tokens,
    ("orchestray_read_tokens", _READ): lambda stats: stats.num_read,
    ("orchestray_generation_steps", "Steps of the model that generates"): lambda stats: stats.num_steps,
}
_GAUGES: dict[tuple[str, str], _Value] = {
    ("orchestray_generating", "Requests that are answered token by token"): lambda stats: stats.num_running,
    ("orchestray_generation_queue_length", "Requests that wait for that"): lambda stats: stats.num_waiting,
    ("orchestray_kv_cache_used_ratio", "Part of the memory of keys and values"): lambda stats: stats.cache_used,
    ("orchestray_kv_cache_bytes", "Memory of keys and values; 0: not known"): lambda stats: stats.cache_bytes,
}


def times_of_an_engine() -> tuple[Histogram, Histogram]:
    """Return histograms of an engine: from a request to its first token, and from a token to the next."""
    first = Histogram(
        "orchestray_first_token_seconds", "From a request to its first token", registry=None, buckets=_SECONDS
    )
    between = Histogram(
        "orchestray_token_seconds", "From a token of an answer to the next", registry=None, buckets=_SECONDS
    )
    return first, between


class GenerationMetrics(OfModels):
    """A collector of tokens, requests, memory and times of every version that generates text; empty if none does."""

    def collect(self) -> Iterator[Metric]:
        found = [
            ((version.name, version.version), version.generator.stats)
            for version in self.models.versions
            if version.generator is not None
        ]
        if not found:
            return
        for kind, values in ((CounterMetricFamily, _COUNTS), (GaugeMetricFamily, _GAUGES)):
            for (name, text), value in values.items():
                family = kind(name, text, labels=_MODEL)
                for names, stats in found:
                    family.add_metric(names, value(stats))
                yield family
        for times in ("first_token", "between_tokens"):
            yield from _labelled([(names, getattr(stats, times)) for names, stats in found])


def _labelled(histograms: list[tuple[tuple[str, str], Histogram]]) -> Iterator[Metric]:
    """Yield the metric of several histograms of one name, with the model's labels."""
    (whole,) = histograms[0][1].collect()
    whole.samples = [
        sample._replace(labels={**dict(zip(_MODEL, names, strict=True)), **sample.labels})
        for names, histogram in histograms
        for metric in histogram.collect()
        for sample in metric.samples
    ]
    yield whole
