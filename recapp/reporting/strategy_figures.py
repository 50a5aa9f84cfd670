"""Pictures that compare sharding strategies: a bar for the time and for the memory of each.

results by strategy (`batch_time_ms`, `memory_gb`, ...) -> Picture
"""

from collections.abc import Mapping, Sequence

from recapp.errors import ConfigError
from recapp.reporting.drawing import BAR, INK, Picture, byte_axis, size, spec_of
from recapp.reporting.horizontal_bars import horizontal_bars

Results = Mapping[str, Mapping[str, float]]
"""The measurements by the name of a strategy."""

TIME = "batch_time_ms"
QUARTILES = (f"{TIME}_q1", f"{TIME}_q3")
MEMORY = "memory_gb"


def latency_picture(results: Results) -> Picture:
    """Draw the milliseconds of a batch, with the middle half of the readings if it is known.

    Args:
        results: The measurements by strategy: each has `batch_time_ms`, and may have
            `batch_time_ms_q1`, `batch_time_ms_q3` and `throughput`.

    Raises:
        ConfigError: There are no results, or a result has no time.
    """
    times = _entries(results, TIME)
    spec = spec_of(times)
    said = [
        f"{ms:{spec}} ms{_rate(result)}" for ms, result in zip(times, results.values(), strict=True)
    ]
    whiskers = all(key in result for result in results.values() for key in QUARTILES)
    with horizontal_bars(list(results), said) as s:
        for (position,), ms, result in zip(s.positions, times, results.values(), strict=True):
            s.chart.barh(position, ms, 0.2, color=BAR)
            if whiskers:
                ends = [result[key] for key in QUARTILES]
                s.chart.plot(
                    ends, [position] * 2, color=INK, linewidth=1.3, marker="|", markersize=7
                )
        s.chart.set(xlabel="ms a batch (median)", xlim=(0, None))
        return s.finish(
            "strategy_latency",
            "Latency by sharding strategy",
            f"Bars: {_listed(results, said)}.",
            "Shorter is better"
            + ("; between the ends of a whisker lies the middle half." if whiskers else "."),
        )


def memory_picture(results: Results) -> Picture:
    """Draw the memory of each strategy.

    Args:
        results: The measurements by strategy: each has `memory_gb`, in units of 1e9 bytes.

    Raises:
        ConfigError: There are no results, or a result has no memory.
    """
    held = [gb * 1e9 for gb in _entries(results, MEMORY)]
    said = [size(n) for n in held]
    with horizontal_bars(list(results), said) as s:
        for (position,), n in zip(s.positions, held, strict=True):
            s.chart.barh(position, n, 0.2, color=BAR)
        s.chart.set(xlabel="bytes", xlim=(0, max(held) * 1.04 or 1))
        byte_axis(s.chart.xaxis)
        return s.finish(
            "strategy_memory",
            "Memory by sharding strategy",
            f"Bars: {_listed(results, said)}.",
            "What a rank holds, or the rank with most where that was taken.",
        )


def _entries(results: Results, key: str) -> list[float]:
    """Return the entry of each result under a key."""
    if not results:
        raise ConfigError("results={}: give what was measured, by strategy")
    for name, result in results.items():
        if key not in result:
            raise ConfigError(
                f"results[{name!r}] has no {key}: it has {', '.join(sorted(result)) or 'nothing'}"
            )
    return [float(result[key]) for result in results.values()]


def _rate(result: Mapping[str, float]) -> str:
    return f", {result['throughput']:,.0f} samples/s" if "throughput" in result else ""


def _listed(results: Results, said: Sequence[str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in zip(results, said, strict=True))
