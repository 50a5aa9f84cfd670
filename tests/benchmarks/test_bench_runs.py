"""Every measurement once, tiny: its records, its table, its pictures. Speeds are not tested."""

import json
import math
import os
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bench_cases import PLANS, SETTINGS, make_tiny
from compilers import NO_PROGRAM
from documents import commands, fenced
from jobs import command, recipe

from recapp import bench
from recapp.benchmarks import bench_worker, columns
from recapp.benchmarks.bench_worker import MEASUREMENTS
from recapp.console import print_table

SAMPLE = [
    {
        "name": "large_table",
        "num_embeddings": 400,
        "embedding_dim": 8,
        "feature_names": ["large_table"],
    },
    {
        "name": "small_table",
        "num_embeddings": 30,
        "embedding_dim": 4,
        "feature_names": ["small_table"],
    },
]
COLUMNS = {
    "kernels": {
        "workload",
        "threads",
        "median_ms",
        "q1_ms",
        "q3_ms",
        "fbgemm_ratio",
        "torch_ratio",
        "floor_ratio",
        "gather_ratio",
        "small_pages_ratio",
    },
    "quantised": {
        "workload",
        "bits",
        "batch_size",
        "bag",
        "threads",
        "median_ms",
        "fbgemm_ratio",
        "fbgemm_tuned_ratio",
        "torch_quantised_ratio",
        "torch_ratio",
        "fp32_ratio",
        "ns_per_row",
        "read_ratio",
    },
    "step": {
        "workload",
        "plan",
        "transport",
        "median_ms",
        "q1_ms",
        "q3_ms",
        "torchrec_ratio",
        "torchrec_tuned_ratio",
    },
    "train": {"model", "median_ms", "q1_ms", "q3_ms", "gemm_floor_ratio", "torchrec_ratio"},
    "memory": {"way", "touched_rows", "touched_bytes", "peak_bytes", "table_bytes", "median_ms"},
    "strategies": {
        "strategy",
        "batch_time_ms",
        "throughput",
        "memory_gb",
        "memory_peak_gb",
        "bytes_exchanged",
    },
    "dynamic": {"what", "ranks", "median_ms", "ids_per_second"},
    "data": {"stage", "rows_per_second", "mb_per_second", "memory_ratio", "decode_share"},
    "inference": {
        "model",
        "quantize",
        "batch_size",
        "threads",
        "way",
        "median_ms",
        "q1_ms",
        "q3_ms",
        "p99_ms",
        "tail_ratio",
        "samples_per_second",
        "torch_ratio",
        "torchrec_ratio",
        "torchrec_tuned_ratio",
    },
}
PICTURES = {
    "kernels": {"roofline.png"},
    "step": {"phases.png"},
    "strategies": {"latency.png", "memory.png"},
    "dynamic": {"pauses.png"},
    "inference": {"answers.png"},
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Make workloads tiny, and restore the number of torch's threads."""
    make_tiny(monkeypatch)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measured(verb, folder, **more):
    """Return the records of a measurement on one rank, in this process, and its pictures."""
    (folder / "ids").mkdir(exist_ok=True)
    bench_worker.run(
        SETTINGS | {"verb": verb, "plans": PLANS, "ranks": 1, "folder": str(folder / "ids")} | more,
        folder,
    )
    found = json.loads((folder / "metrics.json").read_text())
    assert json.loads((folder / "rows.json").read_text())["rows"] == found["rows"]
    return found["rows"], {Path(path).name for path in found["pictures"]}


@pytest.mark.parametrize(
    "verb",
    [
        "kernels",
        "quantised",
        pytest.param("memory", marks=pytest.mark.full),
        "step",
        "train",
        pytest.param("strategies", marks=pytest.mark.full),
        "dynamic",
    ],
)
def test_a_measurement_leaves_its_records_and_pictures(verb, tmp_path):
    rows, pictures = measured(verb, tmp_path, tables={"source": "list", "tables": SAMPLE})
    assert rows and all(COLUMNS[verb] <= set(row) for row in rows)
    assert pictures == PICTURES.get(verb, set()) and all(
        (tmp_path / name).stat().st_size > 5000 for name in pictures
    )
    for row in rows:
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        assert all(math.isfinite(value) for value in numbers.values())
        assert all(row[key] is None for key in row if key.startswith(("fbgemm", "torchrec")))
        for key in ("median_ms", "batch_time_ms"):
            low, high = columns.quartile_keys(key)
            assert key not in row or row[low] <= row[key] <= row[high]


@pytest.mark.full
def test_one_record_for_each_thing_that_was_asked_for(tmp_path):
    rows, _ = measured("kernels", tmp_path, threads=[1, 2])
    assert [(row["workload"], row["threads"]) for row in rows] == [("W1", 1), ("W1", 2)]
    rows, _ = measured("step", tmp_path)
    assert [(row["workload"], row["plan"]) for row in rows] == [
        ("W1", "table_wise"),
        ("W1", "row_wise"),
    ]
    assert {row["rounds"] for row in rows} == {2} and min(
        row["best_plan_ratio"] for row in rows
    ) <= 1
    rows, _ = measured(
        "strategies", tmp_path, tables={"source": "list", "tables": SAMPLE}, batch_size=[4, 8]
    )
    assert (
        len({(row["strategy"], row["ids"], row["batch_size"], row["step"]) for row in rows})
        == len(rows)
        == 2 * 2 * 2 * 2
    )


def test_a_growing_table_is_filled_with_all_keys_and_its_memory_and_pauses_are_told(tmp_path):
    rows, _ = measured("dynamic", tmp_path, plans={"row_wise": PLANS["row_wise"]})
    assert [(row["what"], row["plan"]) for row in rows] == [
        ("W1 step", "row_wise"),
        ("small training", "row_wise"),
        ("new keys, step", "table_wise"),
        ("known keys, lookup", "table_wise"),
        ("known keys, step", "table_wise"),
        ("Python's dict, new keys", None),
        ("Python's dict, known keys", None),
    ]
    new = rows[2]
    assert len(new["batch_ms"]) == len(new["static_batch_ms"]) == 60 // 4 - 1
    assert new["payload_bytes"] == 16 * 4 + 4 and new["longest_ms"] == max(new["batch_ms"])
    assert all(row["static_ratio"] > 0 for row in rows[:5])


def test_reading_is_taken_apart_and_compared_with_memory(tmp_path, monkeypatch):
    from recapp.benchmarks.workloads import MODELS
    from recapp.dataset.data_settings import Generate
    from recapp.dataset.synthetic import write_clicks

    sizes = (40, 9, 6, 5, 4, 4, 3, 2, 9, 30, 7, 6, 11, 2, 3, 10, 4, 9, 5, 20, 15, 9, 6, 3, 7, 5)
    write_clicks(tmp_path / "logs", Generate(rows=600), sizes)
    tiny = type(MODELS["small"])
    monkeypatch.setattr(tiny, "workload", lambda self: type(self).__mro__[1].workload(self))
    dataset = {
        "path": str(tmp_path / "logs"),
        "lanes": 16,
        "shuffle_rows": 64,
        "dense_transform": "log1p",
        "batch_size": 64,
        "num_workers": 0,
        "id_rule": "hash",
    }
    rows, _ = measured("data", tmp_path, dataset=dataset, plans={"row_wise": PLANS["row_wise"]})
    assert all(COLUMNS["data"] <= set(row) for row in rows)
    assert [row["stage"] for row in rows] == [
        "parquet",
        "decoded",
        "batches",
        "small from parquet",
        "small from memory",
    ]
    assert (
        all(row["rows_per_second"] > 0 for row in rows)
        and 0 < rows[3]["decode_share"] < 1
        and rows[3]["memory_ratio"] > 0
    )


@pytest.mark.parametrize("verb", columns.COLUMNS)
def test_what_a_heading_means_stands_below_the_table(verb, capsys):
    print_table([], columns.COLUMNS[verb])
    printed = capsys.readouterr().out.splitlines()
    unclear = [c for c in columns.COLUMNS[verb] if c.key.endswith("_ratio") or c.title == "ms"]
    for column in {*unclear, *(c for c in columns.COLUMNS[verb] if c.meaning)}:
        title = column.title.replace("-\n", "").replace("\n", " ")
        assert column.meaning, title
        (line,) = [line for line in printed if line.endswith(f"  {column.meaning}")][:1]
        assert line.startswith(f"{title} ") and len(line) <= 80


@pytest.mark.parametrize("verb", [*COLUMNS, "loads"])
def test_a_table_is_right_in_80_columns(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = {
        "workload": "W2m",
        "bits": 8,
        "bag": 20,
        "plan": "torchrec_mixed",
        "transport": "shared_memory",
        "model": "hugectr_d128",
        "stage": "hugectr_d128 from parquet",
        "strategy": "data_parallel",
        "ids": "uniform",
        "step": "forward+backward",
        "threads": 2,
        "what": "Python's dict, known keys",
        "ranks": 2,
        "ids_per_second": 1_234_567.8,
        "pause_ratio": 12.34,
        "cpu_pause_ratio": 1.23,
        "bytes_per_key": 123.4,
        "peak_bytes_per_key": 123.4,
        "batch_size": 4096,
        "rows_per_second": 1_234_567.8,
        "mb_per_second": 1234.5,
        "throughput": 1_234_567.8,
        "decode_share": 0.123,
        "memory_gb": 12.34,
        "memory_peak_gb": 23.45,
        "bytes_exchanged": 1_234_567_890,
        "way": "torchrec_tuned",
        "quantize": "fp16",
        "samples_per_second": 1_234_567.8,
        "median_ms": 123.456,
        "p99_ms": 1234.567,
        "tail_ratio": 12.34,
        "torch_ratio": 123.45,
        "torchrec_tuned_ratio": 12.34,
        "rows_bytes": 2_345_678_901,
        "map_ms": 1.2,
        "load_ms": 1234.5,
        "load_checked_ms": 12_345.6,
        "rows_resident_bytes": 2_345_678_901,
        "two_resident_bytes": 2_345_678_901,
    }
    for column in columns.COLUMNS[verb]:
        if isinstance(column, columns.Spread):
            row |= {
                column.key: 1234.5,
                **dict(zip(columns.quartile_keys(column.key), (1123.4, 1345.6), strict=True)),
            }
    print_table(columns.shown(verb, [row]), columns.COLUMNS[verb])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for value in ("1,234", "1,123-1,346")[
        : 2 if any(isinstance(c, columns.Spread) for c in columns.COLUMNS[verb]) else 0
    ]:
        assert value in printed, printed


def test_the_commands_of_the_pages_mean_something(monkeypatch):
    from recapp.cli.job import Job

    monkeypatch.setattr(bench, "_write_logs", lambda dataset: None)
    monkeypatch.setattr("recapp.benchmarks.checks._check_artefact", lambda given: None)
    found = [c for c in commands(fenced("sh")) if c.name == "bench"]
    assert {c.arguments[0] for c in found} == set(bench.VERBS["bench"])
    for c in found:
        overrides = [
            bench._in_full(a)
            for a in c.arguments[1:]
            if not a.startswith(("bench.torchrec_python", "format"))
        ]
        given = recipe("bench", overrides)
        settings = bench.settings_of(given, Job(Path(), tuple(overrides), {}, c.arguments[0]))
        if c.arguments[0] == "start":  # which has no ranks of its own
            continue
        measurements = MEASUREMENTS | {"inference": "recapp.inference_bench"}
        assert import_module(measurements[settings.verb]).run and bool(settings.plans) == (
            settings.verb not in ("kernels", "quantised", "memory", "inference", "serve")
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("kernels", ["workload=W4", "threads=1"]),
        ("quantised", ["workload=L48k", "threads=1", "batch_size=1"]),
        ("step", ["workload=W4", "plan=[table_wise,mixed]", "transport=[gloo,shared_memory]"]),
        ("memory", ["batch_size=32"]),
        ("train", ["model=small"]),
        ("strategies", ["batch_size=32", "plan=[table_wise,row_wise]"]),
        ("data", ["model=small", "dataset.generate.rows=20000"]),
        ("dynamic", ["model=small", "keys=20000", "batch_size=1000"]),
        ("inference", ["model=small", "quantize=int8", "threads=1", "batch_size=[1,64]"]),
    ],
)
def test_the_command_answers_machines_with_its_records_alone(verb, arguments, tmp_path):
    python = os.environ.get("RECAPP_TORCHREC_PYTHON")
    ran = command(
        "bench",
        verb,
        *arguments,
        "rounds=1",
        "round_seconds=0.01",
        "format=json",
        "hydra.run.dir=run",
        *([f"bench.torchrec_python={python}"] if python else []),
        cwd=tmp_path,
    )
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert list(document) == ["rows", "loads"][: 2 if verb == "inference" else 1]
    assert all(COLUMNS[verb] <= set(row) for row in document["rows"])
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == PICTURES.get(verb, set())
    assert re.search(r"(rounds: 1 of 1|methods: 3 of 3)$", ran.err, re.MULTILINE)
    if verb == "inference":
        ways = {"torch", "eager", "raw_rows"}
        ways |= set() if NO_PROGRAM else {"compiled", "cpp"}
        ways |= {"torchrec", "torchrec_tuned"} if python else set()
        for size in (1, 64):
            assert ways <= {row["way"] for row in document["rows"] if row["batch_size"] == size}
        assert re.search(r"^goal, p99 at batch 1 below 3 x p50: (met|missed)", ran.err, re.M)
    if python and verb in ("kernels", "quantised", "train"):
        assert all(
            row["torchrec_ratio" if verb == "train" else "fbgemm_ratio"] > 0
            for row in document["rows"]
        )
    if python and verb == "step":
        assert [row["torchrec_ratio"] is None for row in document["rows"]] == [
            row["plan"] == "mixed" for row in document["rows"]
        ]
