"""`python -m recapp.bench VERB`: measure recapp on this machine, to choose between its settings.

    settings -> ranks (`recapp.benchmarks.session`) -> JOB/metrics.json -> a table

| verb         | measures                                                                     |
|--------------|------------------------------------------------------------------------------|
| `step`       | the embedding step on several ranks, under plans                             |
| `train`      | a whole training step of a DLRM, under plans, also compiled                  |
| `strategies` | sharding strategies on listed tables: latency, memory, bytes exchanged       |
| `data`       | reading Parquet, text and lists: Arrow, batches, threads, and training       |
| `inference`  | a trained model: p50, p99, rows a second; in Python, compiled and in C++     |

`recapp.plan calibrate` measures the costs of this machine for the planner.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence
from typing import Any

from recapp.cli.command import recipe_under, run
from recapp.cli.job import Job, run_on_ranks
from recapp.console import Column, emit
from recapp.errors import ConfigError
from recapp.processes.launch import check_gpus
from recapp.processes.rank_environment import external_rank
from recapp.processes.rank_process import leave
from recapp.run.recipe import VERBS, Bench, BenchData, BenchOnRanks
from recapp.settings.records import to_plain

WORKER = "recapp.benchmarks.session"
# the function of each verb, which every rank calls with its session
MEASURES = {
    "step": "recapp.benchmarks.steps.measure_step",
    "train": "recapp.benchmarks.steps.measure_training",
    "strategies": "recapp.benchmarks.steps.measure_strategies",
    "data": "recapp.benchmarks.reading.measure_data",
    "inference": "recapp.inference_bench.measure",
}


class Spread(Column):
    """A column of medians or ratios, each with its quartiles in a second line."""


MODEL = Column("model", "model")
PLAN = Column("plan", "plan")
BATCH = Column("batch_size", "batch")
IDS = Column("ids", "ids", meaning="the distribution of the ids of a batch")
TRANSPORT = Column("transport", "transport", meaning="the path of messages between ranks")
STEP_MS = Spread("median_ms", "ms", meaning="median of all steps, below it the quartiles")
BEST_PLAN = Spread(
    "best_plan_ratio", "best plan\nratio", meaning="the fastest plan's time / the time of this plan"
)
# the columns of the table that each verb prints; the rows have more entries
COLUMNS: dict[str, list[Column]] = {
    "step": [
        Column("workload", "work-\nload", meaning="tables and bags of a batch: docs/benchmarks.md"),
        PLAN,
        TRANSPORT,
        STEP_MS,
        BEST_PLAN,
    ],
    "train": [
        MODEL,
        PLAN,
        TRANSPORT,
        STEP_MS,
        BEST_PLAN,
        Column("samples_per_second", "samples/s", ",.0f", meaning="of all ranks"),
    ],
    "strategies": [
        Column("strategy", "strategy"),
        IDS,
        BATCH,
        Column("step", "pass", meaning="the timed part; backward updates the rows"),
        Spread("batch_time_ms", "ms", meaning="median of all batches, below it the quartiles"),
        Column("throughput", "samples/s", ",.0f", meaning="of all ranks"),
        Column("memory_gb", "GB", ".2f", meaning="tables and buffers on the largest rank"),
        Column("memory_peak_gb", "peak", ".2f", meaning="the most memory of that rank in steps"),
        Column("bytes_exchanged", "MB sent", ",.1f", 1e6, meaning="by all ranks in a pass"),
    ],
    "data": [
        Column("form", "rows", meaning="the form of the rows; the plan where a model trains"),
        Column("stage", "stage", meaning="Arrow alone, batches by threads, or training"),
        Column("rows_per_second", "rows/s", ",.0f"),
        Spread("median_ms", "ms", meaning="of a pass or a step, below it the quartiles"),
        Spread("raw_ratio", "raw\nratio", meaning="time of Arrow alone / time of batches"),
        Column("longest_ratio", "longest", ".1f", meaning="the longest step / the median"),
        Column("wait_share", "waits", ".1%", meaning="the share of a step that waits for a batch"),
    ],
    "inference": [
        Column("quantize", "rows", meaning="the data type of the stored tables"),
        BATCH,
        Column("threads", "thr", meaning="the number of threads that compute"),
        Column("way", "way", meaning="Python, compiled, C++, or Python from raw rows"),
        Column("median_ms", "p50\nms", ".3f", meaning="half of the batches take longer"),
        Column("p99_ms", "p99\nms", ".3f", meaning="one batch in a hundred takes longer"),
        Column("tail_ratio", "p99/\np50", ".1f", meaning="the 99th percentile / the median"),
        Column("samples_per_second", "rows/s", ",.0f"),
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("bench", measure, verbs=VERBS["bench"], argv=argv)


def measure(settings: Bench, job: Job) -> None:
    """Run the measurement of the job's verb, and print its rows of results.

    Args:
        settings: The settings of the verb.
        job: The job: its verb and directory.

    Raises:
        ConfigError: A plan is unknown, or torchrun or srun started a verb of one process.
    """
    plain = to_plain(settings)
    plain |= {"command": f"bench_{job.verb}", "measure": MEASURES[job.verb]}
    ranks = 1
    if isinstance(settings, BenchOnRanks):
        ranks = settings.ranks
        if getattr(settings, "device", "cpu") == "cuda" and external_rank() is None:
            check_gpus(ranks)
        plain["rules"] = rules_of(settings.plans)
    elif external_rank() is not None:
        raise ConfigError(
            f"bench {job.verb} measures one process: start it without torchrun or srun"
        )
    if isinstance(settings, BenchData) and settings.dataset.generate is not None:
        from recapp.run.run_rows import write_generated

        write_generated(settings.dataset)
    metrics = run_on_ranks(
        plain,
        job,
        WORKER,
        0 if external_rank() is not None else ranks,
        settings.launch,
        to_stderr=settings.format == "json",
        preload=f"torch {WORKER}",
    )
    if metrics:  # empty on ranks other than 0
        rows = metrics["rows"]
        text = settings.format == "text"
        columns = COLUMNS[job.verb]
        emit(with_quartiles(rows, columns) if text else rows, settings.format, columns)


def rules_of(plans: str | tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the settings of plans by name, without repeats.

    Args:
        plans: The name of an option of `conf/plan`, or several names.

    Raises:
        ConfigError: A name is unknown.
    """
    names = dict.fromkeys([plans] if isinstance(plans, str) else plans)
    return {name: to_plain(recipe_under("plan", [f"+plan={name}"]).plan) for name in names}


def with_quartiles(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column]
) -> list[dict[str, Any]]:
    """Return the rows for printing: medians and ratios as text, with quartiles below them."""
    return [{column.key: _cell(row, column) for column in columns} for row in rows]


def _cell(row: dict[str, Any], column: Column) -> Any:
    value = row.get(column.key)
    if not isinstance(column, Spread) or value is None:
        return value
    median = column.key == "median_ms"
    low, high = ("q1_ms", "q3_ms") if median else (f"{column.key}_q1", f"{column.key}_q3")
    return f"{_short(value)}\n{_short(row[low])}-{_short(row[high])}"


def _short(value: float) -> str:
    """Return a number with its three leading digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    leave(main)
