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
STEP_MS = Spread(
    "median_ms", "ms", meaning="time of a step: median of the rounds, below it the quartiles"
)
TRANSPORT = Column("transport", "transport", meaning="the path of messages between ranks")
THREADS = Column("threads", "thr", meaning="the number of threads that compute")
IDS = Column("ids", "ids", meaning="the distribution of the ids of a batch")
STORED = Column("quantize", "rows", meaning="the data type of the stored tables")
TORCHREC = Spread(
    "torchrec_ratio",
    "torchrec\nratio",
    meaning="TorchRec's time / recapp's: above 1 recapp is faster",
)
TUNED = Spread(
    "torchrec_tuned_ratio",
    "tuned\nratio",
    meaning="the same ratio for TorchRec with a tuned allocator",
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
        Spread(
            "torch_ratio",
            "torch\nratio",
            meaning="plain torch's time / recapp's: above 1 recapp is faster",
        ),
        Spread(
            "floor_ratio",
            "floor\nratio",
            meaning="time to copy the bytes of a step / recapp's time: at most 1",
        ),
        Spread(
            "gather_ratio",
            "gather\nratio",
            meaning="time of torch's embedding_bag / recapp's forward pass",
        ),
        Spread(
            "small_pages_ratio",
            "small\npages",
            meaning="recapp's time on pages of 4 KB / its time on large pages",
        ),
    ],
    "quantised": [
        Column("workload", "work-\nload", meaning="tables and rows: docs/benchmarks.md"),
        Column("bits", "bits", meaning="the bits of a stored number"),
        Column("batch_size", "batch"),
        Column("bag", "bag", meaning="the number of ids in a bag"),
        THREADS,
        Spread(
            "median_ms",
            "ms",
            meaning="time of a lookup: median of the rounds, below it the quartiles",
        ),
        FBGEMM,
        Spread(
            "torch_quantised_ratio",
            "torch\nquant.",
            meaning="time of torch's lookup of quantised rows / recapp's time",
        ),
        Spread(
            "torch_ratio",
            "torch\nfp32",
            meaning="time of torch's lookup of fp32 rows / recapp's time",
        ),
        Spread("read_ratio", "read\nratio", meaning="time only to read the rows / recapp's time"),
    ],
    "memory": [
        Column("way", "method"),
        IDS,
        Column("batch_size", "batch"),
        Column("touched_rows", "rows\ntouched", meaning="the number of distinct rows in a batch"),
        Column("touched_bytes", "their\nMB", ",.1f", 1e6, meaning="the size of these rows"),
        Column(
            "peak_bytes",
            "peak\nMB",
            ",.1f",
            1e6,
            meaning="the most memory of backward and update, without the table",
        ),
        Column("table_bytes", "table\nMB", ",.0f", 1e6, meaning="the size of the table"),
        Spread(
            "median_ms",
            "ms",
            meaning="time of backward and update: the median, below it the quartiles",
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
            "best_plan_ratio",
            "best plan\nratio",
            meaning="the fastest plan's time / the time of this plan",
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
            meaning="time of the matrix products of the model / recapp's time",
        ),
        TORCHREC,
        TUNED,
    ],
    "dense_part": [
        Column("model", "model"),
        Column("batch_size", "batch", ",d"),
        Spread(
            "median_ms",
            "CPU ms",
            meaning="forward and backward: median, below it the quartiles",
        ),
        Spread(
            "products_median_ms",
            "products\nCPU ms",
            meaning="matrix products of the same step alone",
        ),
        Spread(
            "products_ratio",
            "times its\nproducts",
            meaning="CPU time of the dense part / of its products",
        ),
    ],
    "strategies": [
        Column("strategy", "strategy"),
        IDS,
        Column("batch_size", "batch"),
        Column("step", "pass", meaning="the timed part; backward updates the rows"),
        Spread(
            "batch_time_ms",
            "ms",
            meaning="time of a batch: median of the rounds, below it the quartiles",
        ),
        Column("throughput", "samples/s", ",.0f", meaning="samples per second of all ranks"),
        Column(
            "memory_gb",
            "GB",
            ".2f",
            meaning="memory of tables and buffers on the largest rank",
        ),
        Column(
            "memory_peak_gb", "peak", ".2f", meaning="the most memory of this rank during steps"
        ),
        Column(
            "bytes_exchanged",
            "MB sent",
            ",.1f",
            1e6,
            meaning="bytes of the messages of all ranks in a forward pass",
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
            meaning="recapp (eager, compiled or C++), torch or TorchRec",
        ),
        Column(
            "median_ms",
            "p50\nms",
            ".3f",
            meaning="the median time of a batch: half of the batches take longer",
        ),
        Column("p99_ms", "p99\nms", ".3f", meaning="the time that one batch in a hundred exceeds"),
        Column(
            "tail_ratio",
            "p99/\np50",
            ".1f",
            meaning="the 99th percentile / the median; goal at batch 1: below 3",
        ),
        Column("samples_per_second", "rows/s", ",.0f"),
        Column(
            "torch_ratio",
            "torch\nratio",
            ".2f",
            meaning="time of nn.EmbeddingBag in fp32 / time of this way",
        ),
        Column(
            "torchrec_tuned_ratio",
            "tuned\nratio",
            ".2f",
            meaning="TorchRec's time / time of this way",
        ),
    ],
    "loads": [
        Column("model", "model"),
        STORED,
        Column("rows_bytes", "MB", ",.1f", 1e6, meaning="the size of the rows of all tables"),
        Column("map_ms", "map\nms", ",.1f", meaning="time to map the rows into memory"),
        Column(
            "load_ms", "load\nms", ",.0f", meaning="time to load the model, which reads no rows"
        ),
        Column(
            "load_checked_ms",
            "checked\nms",
            ",.0f",
            meaning="time to load the model and check the checksums of its rows",
        ),
        Column(
            "rows_resident_bytes",
            "a process\nholds MB",
            ",.1f",
            1e6,
            meaning="memory of the rows in a process that has read all",
        ),
        Column(
            "two_resident_bytes",
            "two\nhold MB",
            ",.1f",
            1e6,
            meaning="the same in two processes; shared pages count once",
        ),
    ],
    "dynamic": [
        Column("what", "what"),
        Column("ranks", "ranks"),
        STEP_MS,
        Spread(
            "static_ratio",
            "static\nratio",
            meaning="time of a static table / time of the dynamic table",
        ),
        Column("ids_per_second", "ids/s", ",.0f"),
        Column("pause_ratio", "pause", ".2f", meaning="longest step with new keys / median step"),
        Column("cpu_pause_ratio", "its\nCPU", ".2f", meaning="the same ratio in processor time"),
        Column(
            "bytes_per_key",
            "bytes\na key",
            ".1f",
            meaning="growth of the process memory for each key",
        ),
        Column(
            "peak_bytes_per_key",
            "at most",
            ".1f",
            meaning="the same growth at its peak",
        ),
    ],
    "serve": [
        Column("protocol", "protocol"),
        Column("rows", "rows", meaning="the number of rows in a request"),
        Column(
            "load", "load", meaning="share of the highest rate of requests; most: the highest rate"
        ),
        Column("requests_per_second", "req/s", ",.0f"),
        Spread(
            "median_ms",
            "p50\nms",
            meaning="the median time of an answer, below it the quartiles of rounds",
        ),
        Column(
            "p99_ms", "p99\nms", ",.1f", meaning="the time that one answer in a hundred exceeds"
        ),
        Column(
            "p999_ms", "p99.9\nms", ",.1f", meaning="the time that one answer in a thousand exceeds"
        ),
        Column(
            "unanswered_share",
            "no\nanswer",
            ".1%",
            meaning="the share of requests without an answer",
        ),
        Column(
            "overhead_ms",
            "over-\nhead ms",
            ",.2f",
            meaning="time of the server without the time of the model",
        ),
        Column("model_ms", "model\nms", ",.2f", meaning="time of the model"),
        Spread(
            "rows_ratio",
            "rows\nratio",
            meaning="highest rate of requests / the highest rate with JSON rows",
        ),
    ],
    "start": [
        Column("what", "what", meaning="the event that ends the measured time"),
        Column("cache", "cache", meaning="warm: the files are in memory before the command starts"),
        Spread("median_s", "s", meaning="the median of the rounds, below it the quartiles"),
        Spread(
            "baseline_median_s",
            "base-\nline s",
            meaning="the same time for bench.baseline, another recapp",
        ),
        Spread(
            "baseline_ratio",
            "baseline\nratio",
            meaning="the baseline's time / recapp's: above 1 recapp is faster",
        ),
    ],
    "parts": [
        Column("part", "part of train", meaning='a part of the time of "train" above'),
        Column("cache", "cache", meaning="warm: the files are in memory before the command starts"),
        Spread("median_s", "s", meaning="the median of the rounds, below it the quartiles"),
        Spread(
            "baseline_median_s",
            "base-\nline s",
            meaning="the same time for bench.baseline, another recapp",
        ),
    ],
    "data": [
        Column(
            "stage",
            "stage",
            meaning='each stage includes those above it; "from" a source: training',
        ),
        Column("rows_per_second", "rows/s", ",.0f"),
        Column(
            "mb_per_second",
            "MB/s",
            ",.1f",
            meaning="Parquet bytes on disk that one process reads per second",
        ),
        Spread(
            "median_ms",
            "ms",
            meaning="time of a pass or a step: the median, below it the quartiles",
        ),
        Spread(
            "memory_ratio",
            "memory\nratio",
            meaning="time of training from memory / time from Parquet",
        ),
        Column(
            "decode_share",
            "decode\nshare",
            ".1%",
            meaning="the share of a step in which rows are read and decoded",
        ),
    ],
}
