"""The columns of the table that each measurement prints; the records have more entries.

A median has its quartiles below it, so that everything fits into 80 columns.
"""

from typing import Any

from recapp.console import Column


class Spread(Column):
    """A column of medians or ratios, each with its quartiles in a second line."""


def shown(verb: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records as they are printed: medians and ratios as text, quartiles below them."""
    return [{column.key: _cell(row, column) for column in COLUMNS[verb]} for row in rows]


def _cell(row: dict[str, Any], column: Column) -> Any:
    value = row.get(column.key)
    if not isinstance(column, Spread) or value is None:
        return value
    low, high = quartile_keys(column.key)
    return f"{_short(value)}\n{_short(row[low])}-{_short(row[high])}"


def quartile_keys(key: str) -> tuple[str, str]:
    """Return the keys of a record that hold the first and third quartile of an entry.

    Args:
        key: The key of a median or a ratio.
    """
    stem, median, unit = key.rpartition("median_")
    if median:
        return f"{stem}q1_{unit}", f"{stem}q3_{unit}"
    return f"{key}_q1", f"{key}_q3"


def _short(value: float) -> str:
    """Return a number with its three leading digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS: dict[str, list[Column]] = {
    "kernels": [
        Column("workload", "work-\nload"),
        Column("threads", "thr"),
        Spread("median_ms", "ms"),
        Spread("fbgemm_tuned_ratio", "fbgemm\ntuned"),
        Spread("torch_ratio", "torch\nratio"),
        Spread("floor_ratio", "floor\nratio"),
        Spread("gather_ratio", "gather\nratio"),
        Spread("small_pages_ratio", "small\npages"),
    ],
    "quantised": [
        Column("workload", "work-\nload"),
        Column("bits", "bits"),
        Column("batch_size", "batch"),
        Column("bag", "bag"),
        Column("threads", "thr"),
        Spread("median_ms", "ms"),
        Spread("fbgemm_tuned_ratio", "fbgemm\ntuned"),
        Spread("torch_quantised_ratio", "torch\nquant."),
        Spread("torch_ratio", "torch\nfp32"),
        Spread("read_ratio", "read\nratio"),
    ],
    "memory": [
        Column("way", "method"),
        Column("ids", "ids"),
        Column("batch_size", "batch"),
        Column("touched_rows", "rows\ntouched"),
        Column("touched_bytes", "their\nMB", ",.1f", 1e6),
        Column("peak_bytes", "peak\nMB", ",.1f", 1e6),
        Column("table_bytes", "table\nMB", ",.0f", 1e6),
        Spread("median_ms", "ms"),
    ],
    "step": [
        Column("workload", "work-\nload"),
        Column("plan", "plan"),
        Column("transport", "transport"),
        Spread("median_ms", "ms"),
        Spread("torchrec_ratio", "torchrec\nratio"),
        Spread("torchrec_tuned_ratio", "tuned\nratio"),
        Spread("best_plan_ratio", "best plan\nratio"),
    ],
    "train": [
        Column("model", "model"),
        Column("plan", "plan"),
        Column("transport", "transport"),
        Spread("median_ms", "ms"),
        Spread("gemm_floor_ratio", "gemm\nfloor"),
        Spread("torchrec_ratio", "torchrec\nratio"),
        Spread("torchrec_tuned_ratio", "tuned\nratio"),
    ],
    "strategies": [
        Column("strategy", "strategy"),
        Column("ids", "ids"),
        Column("batch_size", "batch"),
        Column("step", "pass"),
        Spread("batch_time_ms", "ms"),
        Column("throughput", "samples/s", ",.0f"),
        Column("memory_gb", "GB", ".2f"),
        Column("memory_peak_gb", "peak", ".2f"),
        Column("bytes_exchanged", "MB sent", ",.1f", 1e6),
    ],
    "inference": [
        Column("model", "model"),
        Column("quantize", "rows"),
        Column("batch_size", "batch"),
        Column("threads", "thr"),
        Column("way", "way"),
        Column("median_ms", "p50\nms", ".3f"),
        Column("p99_ms", "p99\nms", ".3f"),
        Column("tail_ratio", "p99/\np50", ".1f"),
        Column("samples_per_second", "rows/s", ",.0f"),
        Column("torch_ratio", "torch\nratio", ".2f"),
        Column("torchrec_tuned_ratio", "tuned\nratio", ".2f"),
    ],
    "loads": [
        Column("model", "model"),
        Column("quantize", "rows"),
        Column("rows_bytes", "MB", ",.1f", 1e6),
        Column("map_ms", "map\nms", ",.1f"),
        Column("load_ms", "load\nms", ",.0f"),
        Column("load_checked_ms", "checked\nms", ",.0f"),
        Column("rows_resident_bytes", "a process\nholds MB", ",.1f", 1e6),
        Column("two_resident_bytes", "two\nhold MB", ",.1f", 1e6),
    ],
    "dynamic": [
        Column("what", "what"),
        Column("ranks", "ranks"),
        Spread("median_ms", "ms"),
        Spread("static_ratio", "static\nratio"),
        Column("ids_per_second", "ids/s", ",.0f"),
        Column("pause_ratio", "pause", ".2f"),
        Column("cpu_pause_ratio", "its\nCPU", ".2f"),
        Column("bytes_per_key", "bytes\na key", ".1f"),
        Column("peak_bytes_per_key", "at most", ".1f"),
    ],
    "serve": [
        Column("protocol", "protocol"),
        Column("rows", "rows"),
        Column("load", "load"),
        Column("requests_per_second", "req/s", ",.0f"),
        Spread("median_ms", "p50\nms"),
        Column("p99_ms", "p99\nms", ",.1f"),
        Column("p999_ms", "p99.9\nms", ",.1f"),
        Column("unanswered_share", "no\nanswer", ".1%"),
        Column("overhead_ms", "over-\nhead ms", ",.2f"),
        Column("model_ms", "model\nms", ",.2f"),
        Spread("rows_ratio", "rows\nratio"),
    ],
    "start": [
        Column("what", "what"),
        Column("cache", "cache"),
        Spread("median_s", "s"),
        Spread("baseline_median_s", "base-\nline s"),
        Spread("baseline_ratio", "baseline\nratio"),
    ],
    "parts": [
        Column("part", "part of train"),
        Column("cache", "cache"),
        Spread("median_s", "s"),
        Spread("baseline_median_s", "base-\nline s"),
    ],
    "data": [
        Column("stage", "stage"),
        Column("rows_per_second", "rows/s", ",.0f"),
        Column("mb_per_second", "MB/s", ",.1f"),
        Spread("median_ms", "ms"),
        Spread("memory_ratio", "memory\nratio"),
        Column("decode_share", "decode\nshare", ".1%"),
    ],
}
