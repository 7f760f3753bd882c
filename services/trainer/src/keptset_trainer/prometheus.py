"""GET /metrics: where the training stands, read off the results on disk when it is asked for."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .spool import Spool


class StepCollector(Collector):
    """Gauges of the last trained step."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape."""
        trained = self.spool.look_for_results()
        queued = self.spool.next_step - 1 - trained
        yield GaugeMetricFamily("keptset_trainer_step", "Last trained step.", trained)
        yield GaugeMetricFamily("keptset_trainer_queue_length", "Accepted steps without a result.", queued)
        last = GaugeMetricFamily(
            "keptset_trainer_metric", "Metrics of the last trained step.", labels=["name"]
        )
        metrics = (self.spool.result(trained) or {}).get("metrics", {})
        for name, value in metrics.items():
            last.add_metric([name], value)
        yield last
        yield GaugeMetricFamily(
            "keptset_trainer_step_seconds",
            "Seconds of the last trained step.",
            metrics.get("seconds/train", 0.0),
        )


def registry_of(spool: Spool) -> CollectorRegistry:
    """A registry of its own, so that two apps in one process do not meet."""
    registry = CollectorRegistry()
    registry.register(StepCollector(spool))
    return registry
