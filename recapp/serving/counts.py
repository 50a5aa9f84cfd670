"""The metrics of a server, which Prometheus reads at `/metrics`.

The bounds of two neighbouring buckets of seconds differ by a factor of about 1.4.
"""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

SECONDS = [
    round(base * 10.0**power, 6)
    for power in (-4, -3, -2, -1, 0)
    for base in (1, 1.4, 2, 2.8, 4, 5.6, 7.5)
]
ROWS = [2**power for power in range(13)]


class Counts:
    """The metrics of a server since its start; the event loop and the worker change them.

    Attributes:
        reloads: The number of reloads, by result: `loaded` or `refused`.
        model: The name and the version of the model in service.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "recapp_requests", "Answers, by route and status.", ("route", "code"), registry=registry
        )
        self._request_seconds = Histogram(
            "recapp_request_seconds",
            "Seconds of answered requests, by route.",
            ("route",),
            registry=registry,
            buckets=SECONDS,
        )
        self._rows = Histogram(
            "recapp_batch_rows", "Rows of a batch.", registry=registry, buckets=ROWS
        )
        self._model_seconds = Histogram(
            "recapp_model_seconds",
            "Seconds of the model, by batch.",
            registry=registry,
            buckets=SECONDS,
        )
        self.reloads = Counter(
            "recapp_reloads", "Models that were loaded, by result.", ("result",), registry=registry
        )
        self.model = Info("recapp_model", "The model in service.", registry=registry)
        ProcessCollector(registry=registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge.

        Args:
            name: The name of the metric, without `recapp_`.
            text: The help text of the metric.
            value: Returns the value at the moment of a reading.
        """
        Gauge(f"recapp_{name}", text, registry=self._registry).set_function(value)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count the answer to a request.

        Args:
            route: The last part of the path: `infer` or `infer_rows`.
            status: The HTTP status.
            seconds: The time from the first byte of the request to the answer.
        """
        self._requests.labels(route, status).inc()
        if status == 200:
            self._request_seconds.labels(route).observe(seconds)

    def batch(self, rows: int, seconds: float) -> None:
        """Count a computed batch."""
        self._rows.observe(rows)
        self._model_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self._registry)
