"""The metrics of a server as Prometheus text at `/metrics`.

Counters and histograms only grow; Prometheus takes differences and computes quantiles from the
buckets. The bounds of two neighbouring buckets differ by a factor of about 1.4.
"""

import bisect
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recapp.processes.process_memory import resident_bytes

SECONDS = [
    round(base * 10.0**power, 6)
    for power in (-4, -3, -2, -1, 0)
    for base in (1, 1.4, 2, 2.8, 4, 5.6, 7.5)
]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Histogram:
    """Count each value in the bucket of the smallest bound that is not below the value.

    Args:
        bounds: The rising bounds; a value above the last bound counts in the total.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        """Yield the lines of the histogram.

        Args:
            name: The name of the metric.
            labels: The labels of the metric, as text of a Prometheus line.
        """
        separator = "," if labels else ""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, itertools.accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{{labels}{separator}le="{bound}"}} {count}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self._sum:.9g}"
        yield f"{name}_count{braces} {sum(self._counts)}"


@dataclass
class Counts:
    """The counters of a server since its start; the event loop and the worker increment them."""

    started: float = field(default_factory=time.time)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    reloads: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    dropped: int = 0  # requests whose client disconnected before the answer
    request_seconds: dict[str, Histogram] = field(default_factory=dict)
    model_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    batch_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count the answer to a request.

        Args:
            route: The kind of route: `infer`, `arrow`, `rows` or `other`.
            status: The HTTP status.
            seconds: The time from the first byte of the request to the answer.
        """
        with self._lock:
            self.requests[route, status] += 1
            if route != "other" and status == 200:
                held = self.request_seconds.setdefault(route, Histogram(SECONDS))
                held.add(seconds)

    def batch(self, rows: int, seconds: float) -> None:
        """Count a computed batch."""
        with self._lock:
            self.rows += rows
            self.batch_rows.add(rows)
            self.model_seconds.add(seconds)

    def text(self, model: Mapping[str, str], gauges: Mapping[str, float]) -> str:
        """Return all metrics as text.

        Args:
            model: The labels of the model in service.
            gauges: The gauges at this moment, by name.
        """
        with self._lock:
            return "\n".join(self._lines(model, gauges)) + "\n"

    def _lines(self, model: Mapping[str, str], gauges: Mapping[str, float]) -> Iterator[str]:
        yield from _head("recapp_requests_total", "counter", "Answers, by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'recapp_requests_total{{route="{route}",code="{status}"}} {count}'
        yield from _head("recapp_rows_total", "counter", "Rows that the model has scored.")
        yield f"recapp_rows_total {self.rows}"
        yield from _head("recapp_dropped_total", "counter", "Requests whose client went away.")
        yield f"recapp_dropped_total {self.dropped}"
        yield from _head("recapp_reloads_total", "counter", "Models that were loaded, by result.")
        for result in ("loaded", "refused"):
            yield f'recapp_reloads_total{{result="{result}"}} {self.reloads[result]}'
        yield from _head(
            "recapp_request_seconds", "histogram", "Seconds of answered requests, by route."
        )
        for route, histogram in sorted(self.request_seconds.items()):
            yield from histogram.lines("recapp_request_seconds", f'route="{route}"')
        yield from _head("recapp_model_seconds", "histogram", "Seconds of the model, by batch.")
        yield from self.model_seconds.lines("recapp_model_seconds")
        yield from _head("recapp_batch_rows", "histogram", "Rows of a batch.")
        yield from self.batch_rows.lines("recapp_batch_rows")
        yield from _head("recapp_model_info", "gauge", "The model in service.")
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in model.items())
        yield f"recapp_model_info{{{labels}}} 1"
        for name, value in gauges.items():
            yield from _head(f"recapp_{name}", "gauge", name.replace("_", " ") + ".")
            yield f"recapp_{name} {value:g}"
        yield from _head("process_start_time_seconds", "gauge", "When the server started.")
        yield f"process_start_time_seconds {self.started:.3f}"
        if (memory := resident_bytes()) is not None:
            yield from _head("process_resident_memory_bytes", "gauge", "Memory of the process.")
            yield f"process_resident_memory_bytes {memory}"


def _head(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
