"""Prometheus metrics of the engines of an endpoint, read at every scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestray.serving.routing.registry import Registry

if TYPE_CHECKING:
    from orchestray.serving.generation.engine import EngineStats

_MODEL = ("model", "version")


class GenerationMetrics(Collector):
    """A collector of tokens, requests, memory and times of every version that generates text; empty if none does.

    Args:
        models: models that are read at every scrape.
    """

    def __init__(self, models: Registry) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        """Return no metrics beforehand, as the models may not exist yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        engines = [(version, version.generator) for version in self._models.versions if version.generator is not None]
        if not engines:
            return
        found = [((version.name, version.version), engine.stats) for version, engine in engines]
        yield from _counts(found)
        yield from _gauges(found)
        first = HistogramMetricFamily(
            "orchestray_first_token_seconds", "From a request to its first token", labels=_MODEL
        )
        between = HistogramMetricFamily(
            "orchestray_token_seconds", "From a token of an answer to the next", labels=_MODEL
        )
        for names, stats in found:
            first.add_metric(names, stats.first_token.buckets(), stats.first_token.sum_s)
            between.add_metric(names, stats.between_tokens.buckets(), stats.between_tokens.sum_s)
        yield from (first, between)


_Found: TypeAlias = "list[tuple[tuple[str, str], EngineStats]]"


def _counts(found: _Found) -> Iterator[Metric]:
    tokens = CounterMetricFamily("orchestray_generated_tokens", "Tokens generated", labels=_MODEL)
    prompts = CounterMetricFamily(
        "orchestray_read_tokens",
        "Tokens read: of prompts, and again where an answer outgrows the context",
        labels=_MODEL,
    )
    steps = CounterMetricFamily("orchestray_generation_steps", "Steps of the model that generates", labels=_MODEL)
    for names, stats in found:
        tokens.add_metric(names, stats.num_tokens)
        prompts.add_metric(names, stats.num_read)
        steps.add_metric(names, stats.num_steps)
    yield from (tokens, prompts, steps)


def _gauges(found: _Found) -> Iterator[Metric]:
    running = GaugeMetricFamily("orchestray_generating", "Requests that are answered token by token", labels=_MODEL)
    waiting = GaugeMetricFamily("orchestray_generation_queue_length", "Requests that wait for that", labels=_MODEL)
    used = GaugeMetricFamily("orchestray_kv_cache_used_ratio", "Part of the memory of keys and values", labels=_MODEL)
    size = GaugeMetricFamily("orchestray_kv_cache_bytes", "Memory of keys and values; 0: not known", labels=_MODEL)
    for names, stats in found:
        running.add_metric(names, stats.num_running)
        waiting.add_metric(names, stats.num_waiting)
        used.add_metric(names, 1 - stats.num_free_blocks / stats.num_blocks)
        size.add_metric(names, stats.cache_bytes)
    yield from (running, waiting, used, size)
