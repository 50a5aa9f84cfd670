"""The columns of the table that each measurement prints; the records have more entries.

Quartiles stand below their median, so that the table fits into 80 columns. A line below the table
explains a heading that needs it.
"""

from typing import Any

from recapp.console import Column


class Spread(Column):
    """A column of medians or ratios, each with its quartiles in a second line."""


def shown(verb: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records for printing: medians and ratios as text, with quartiles below them."""
    return [{column.key: _cell(row, column) for column in COLUMNS[verb]} for row in rows]


def _cell(row: dict[str, Any], column: Column) -> Any:
    value = row.get(column.key)
    if not isinstance(column, Spread) or value is None:
        return value
    low, high = quartile_keys(column.key)
    return f"{_short(value)}\n{_short(row[low])}-{_short(row[high])}"


def quartile_keys(key: str) -> tuple[str, str]:
    """Return the keys of the first and third quartile of an entry of a record.

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


# columns that several measurements have
STEP_MS = Spread("median_ms", "ms", meaning="a step, median of the rounds; below it the quartiles")
TRANSPORT = Column("transport", "transport", meaning="how messages travel between ranks")
THREADS = Column("threads", "thr", meaning="threads that compute")
IDS = Column("ids", "ids", meaning="how the ids of a batch are drawn")
STORED = Column("quantize", "rows", meaning="how the tables are stored")
TORCHREC = Spread(
    "torchrec_ratio",
    "torchrec\nratio",
    meaning="TorchRec's time / recapp's: above 1 recapp is faster",
)
TUNED = Spread(
    "torchrec_tuned_ratio",
    "tuned\nratio",
    meaning="the same; TorchRec with its allocator tuned",
)
FBGEMM = Spread(
    "fbgemm_tuned_ratio",
    "fbgemm\ntuned",
    meaning="FBGEMM's time / recapp's: above 1 recapp is faster",
)

COLUMNS: dict[str, list[Column]] = {
    "kernels": [
        Column("workload", "work-\nload", meaning="tables and bags of a batch: docs/benchmarks.md"),
        THREADS,
        STEP_MS,
        FBGEMM,
        Spread("torch_ratio", "torch\nratio", meaning="plain torch's time / recapp's"),
        Spread(
            "floor_ratio",
            "floor\nratio",
            meaning="time to copy the bytes of a step / recapp's: 1 is the limit",
        ),
        Spread(
            "gather_ratio",
            "gather\nratio",
            meaning="time of torch's embedding_bag alone / recapp's forward",
        ),
        Spread(
            "small_pages_ratio",
            "small\npages",
            meaning="time on pages of 4 KB / on large pages, both recapp",
        ),
    ],
    "quantised": [
        Column("workload", "work-\nload", meaning="tables and rows: docs/benchmarks.md"),
        Column("bits", "bits", meaning="of a stored number"),
        Column("batch_size", "batch"),
        Column("bag", "bag", meaning="ids of a bag"),
        THREADS,
        Spread("median_ms", "ms", meaning="a lookup, median of the rounds; below it the quartiles"),
        FBGEMM,
        Spread(
            "torch_quantised_ratio",
            "torch\nquant.",
            meaning="time of torch's own lookup of such rows / recapp's",
        ),
        Spread(
            "torch_ratio",
            "torch\nfp32",
            meaning="time of torch's lookup of rows of floats / recapp's",
        ),
        Spread(
            "read_ratio", "read\nratio", meaning="time to read the rows and nothing else / recapp's"
        ),
    ],
    "memory": [
        Column("way", "method"),
        IDS,
        Column("batch_size", "batch"),
        Column("touched_rows", "rows\ntouched", meaning="distinct rows of a batch"),
        Column("touched_bytes", "their\nMB", ",.1f", 1e6, meaning="the size of these rows"),
        Column(
            "peak_bytes",
            "peak\nMB",
            ",.1f",
            1e6,
            meaning="the most memory of backward and update beside the table",
        ),
        Column("table_bytes", "table\nMB", ",.0f", 1e6, meaning="the size of the table"),
        Spread(
            "median_ms",
            "ms",
            meaning="backward and update, median of the rounds; below it the quartiles",
        ),
    ],
    "step": [
        Column("workload", "work-\nload", meaning="tables and bags of a batch: docs/benchmarks.md"),
        Column("plan", "plan"),
        TRANSPORT,
        STEP_MS,
        TORCHREC,
        TUNED,
        Spread(
            "best_plan_ratio", "best plan\nratio", meaning="the fastest plan's time / this one's"
        ),
    ],
    "train": [
        Column("model", "model"),
        Column("plan", "plan"),
        TRANSPORT,
        STEP_MS,
        Spread(
            "gemm_floor_ratio",
            "gemm\nfloor",
            meaning="time of the model's matrix products alone / recapp's",
        ),
        TORCHREC,
        TUNED,
    ],
    "strategies": [
        Column("strategy", "strategy"),
        IDS,
        Column("batch_size", "batch"),
        Column("step", "pass", meaning="the timed part; backward updates the rows"),
        Spread(
            "batch_time_ms", "ms", meaning="a batch, median of the rounds; below it the quartiles"
        ),
        Column("throughput", "samples/s", ",.0f", meaning="samples of all ranks a second"),
        Column(
            "memory_gb",
            "GB",
            ".2f",
            meaning="growth of the largest rank with tables and buffers",
        ),
        Column("memory_peak_gb", "peak", ".2f", meaning="the same at its highest during steps"),
        Column(
            "bytes_exchanged", "MB sent", ",.1f", 1e6, meaning="messages of all ranks in a forward"
        ),
    ],
    "inference": [
        Column("model", "model"),
        STORED,
        Column("batch_size", "batch"),
        THREADS,
        Column(
            "way",
            "way",
            meaning="recapp in eager, compiled or in C++, torch, or TorchRec",
        ),
        Column("median_ms", "p50\nms", ".3f", meaning="half of the batches take longer"),
        Column("p99_ms", "p99\nms", ".3f", meaning="one batch of a hundred takes longer"),
        Column("tail_ratio", "p99/\np50", ".1f", meaning="the goal at batch 1 is below 3"),
        Column("samples_per_second", "rows/s", ",.0f"),
        Column(
            "torch_ratio",
            "torch\nratio",
            ".2f",
            meaning="time of nn.EmbeddingBag in fp32 / this one's: above 1 is faster",
        ),
        Column(
            "torchrec_tuned_ratio", "tuned\nratio", ".2f", meaning="TorchRec's time / this one's"
        ),
    ],
    "loads": [
        Column("model", "model"),
        STORED,
        Column("rows_bytes", "MB", ",.1f", 1e6, meaning="the size of the rows of all tables"),
        Column("map_ms", "map\nms", ",.1f", meaning="to map the rows"),
        Column("load_ms", "load\nms", ",.0f", meaning="to load the model without reading its rows"),
        Column(
            "load_checked_ms",
            "checked\nms",
            ",.0f",
            meaning="to load it and compare the checksums of its rows",
        ),
        Column(
            "rows_resident_bytes",
            "a process\nholds MB",
            ",.1f",
            1e6,
            meaning="rows in memory when a process has read all of them",
        ),
        Column(
            "two_resident_bytes",
            "two\nhold MB",
            ",.1f",
            1e6,
            meaning="the same of two processes, shared pages counted once",
        ),
    ],
    "dynamic": [
        Column("what", "what"),
        Column("ranks", "ranks"),
        STEP_MS,
        Spread(
            "static_ratio", "static\nratio", meaning="a static table's time / the dynamic one's"
        ),
        Column("ids_per_second", "ids/s", ",.0f"),
        Column("pause_ratio", "pause", ".2f", meaning="longest step with new keys / median one"),
        Column("cpu_pause_ratio", "its\nCPU", ".2f", meaning="the same in the processor's time"),
        Column(
            "bytes_per_key",
            "bytes\na key",
            ".1f",
            meaning="growth of the process for each key",
        ),
        Column("peak_bytes_per_key", "at most", ".1f", meaning="the same at its highest"),
    ],
    "serve": [
        Column("protocol", "protocol"),
        Column("rows", "rows", meaning="rows of a request"),
        Column("load", "load", meaning="share of the most requests a second; most: all at once"),
        Column("requests_per_second", "req/s", ",.0f"),
        Spread(
            "median_ms",
            "p50\nms",
            meaning="half of the answers take longer; below it the quartiles of rounds",
        ),
        Column("p99_ms", "p99\nms", ",.1f", meaning="one answer of a hundred takes longer"),
        Column("p999_ms", "p99.9\nms", ",.1f", meaning="one answer of a thousand takes longer"),
        Column(
            "unanswered_share",
            "no\nanswer",
            ".1%",
            meaning="share of the requests that was not answered",
        ),
        Column(
            "overhead_ms", "over-\nhead ms", ",.2f", meaning="the server's time without the model's"
        ),
        Column("model_ms", "model\nms", ",.2f", meaning="the model's time"),
        Spread(
            "rows_ratio",
            "rows\nratio",
            meaning="most requests a second / those of JSON rows: above 1 is more",
        ),
    ],
    "start": [
        Column("what", "what", meaning="what is waited for"),
        Column(
            "cache", "cache", meaning="whether files are in memory before the command (warm) or not"
        ),
        Spread("median_s", "s", meaning="median of the rounds; below it the quartiles"),
        Spread(
            "baseline_median_s",
            "base-\nline s",
            meaning="the same of bench.baseline, another recapp",
        ),
        Spread(
            "baseline_ratio",
            "baseline\nratio",
            meaning="the baseline's time / recapp's: above 1 recapp is faster",
        ),
    ],
    "parts": [
        Column("part", "part of train", meaning='a part of the time of "train" above'),
        Column(
            "cache", "cache", meaning="whether files are in memory before the command (warm) or not"
        ),
        Spread("median_s", "s", meaning="median of the rounds; below it the quartiles"),
        Spread(
            "baseline_median_s",
            "base-\nline s",
            meaning="the same of bench.baseline, another recapp",
        ),
    ],
    "data": [
        Column("stage", "stage", meaning='each includes the ones above; "from" a source: training'),
        Column("rows_per_second", "rows/s", ",.0f"),
        Column("mb_per_second", "MB/s", ",.1f", meaning="of Parquet on disk, by one process"),
        Spread(
            "median_ms",
            "ms",
            meaning="a pass or a step, median of the rounds; below it the quartiles",
        ),
        Spread(
            "memory_ratio", "memory\nratio", meaning="time of training from memory / from Parquet"
        ),
        Column(
            "decode_share", "decode\nshare", ".1%", meaning="share of a step that reads and decodes"
        ),
    ],
}
