"""The metrics in the text formats that Prometheus reads at `/memd/metrics`.

Rule: imported by the first request for them only: prometheus_client is a twelfth of all imports. Every answer has a
registry of its own, as there may be several daemons in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from memd.telemetry.metrics import Count, Distribution, Gauge, Metrics


def encode(metrics: Metrics, gauges: Iterable[Gauge], accept: str) -> tuple[bytes, str]:
    """Return everything in the text format that an `Accept` header asks for, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics, gauges))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class _Families(Collector):
    """The metrics of one daemon in the library's types."""

    def __init__(self, metrics: Metrics, gauges: Iterable[Gauge]) -> None:
        self._metrics = metrics
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry."""
        for part in vars(self._metrics).values():
            if isinstance(part, Count):
                yield _counter(part)
            elif isinstance(part, Distribution):
                yield _histogram(part)
        for gauge in self._gauges:
            family = GaugeMetricFamily(gauge.name, gauge.about, labels=[gauge.label] if gauge.label else [])
            for value, number in gauge.numbers.items():
                family.add_metric([value] if gauge.label else [], float(number))
            yield family


def _counter(count: Count) -> Metric:
    family = CounterMetricFamily(count.name, count.about, labels=count.labels)
    for values, number in count.counts.items():
        family.add_metric(values, number)
    return family


def _histogram(distribution: Distribution) -> Metric:
    family = HistogramMetricFamily(distribution.name, distribution.about, labels=distribution.labels)
    names = [*map(floatToGoString, distribution.bounds), "+Inf"]
    for value, seen in distribution.seen.items():
        buckets = list(zip(names, map(float, accumulate(seen)), strict=True))
        family.add_metric([value] if distribution.labels else [], buckets, distribution.sums[value])
    return family
