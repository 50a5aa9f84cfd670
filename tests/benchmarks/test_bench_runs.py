"""Every measurement once, tiny: its rows of results and its table. Speeds are not tested."""

import json
import math
import re

import pytest
import torch
from bench_cases import ON_ONE_RANK, PLANS, make_tiny, measured
from documents import commands, fenced
from jobs import command, recipe

from recapp import bench
from recapp.benchmarks import reading
from recapp.benchmarks.session import Session
from recapp.benchmarks.steps import TrainingStep, batches_of
from recapp.benchmarks.workloads import MODELS
from recapp.console import print_table
from recapp.dataset.data_settings import DataSettings, Generate
from recapp.engine.sharded_collection import sharded_tables
from recapp.run.recipe import COMMANDS, VERBS
from recapp.settings.records import record
from recapp.tables.table_settings import ListedTables
from recapp.transport.communicator import Comm

SAMPLE = [
    {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": [name]}
    for name, rows, dim in (("large_table", 400, 8), ("small_table", 30, 4))
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Make workloads tiny, on one thread."""
    make_tiny(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(verb, rows):
    """Check that results have the columns of the table, finite numbers and quartiles in order."""
    assert rows and all({c.key for c in bench.COLUMNS[verb]} <= set(row) for row in rows)
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        if "median_ms" in row:
            assert row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
    print_table(bench.with_quartiles(rows, bench.COLUMNS[verb]), bench.COLUMNS[verb])


def test_a_step_has_a_row_for_each_plan(tmp_path):
    rows = measured("step", tmp_path)
    check("step", rows)
    assert [(row["workload"], row["plan"]) for row in rows] == [("W1", name) for name in PLANS]
    assert max(row["best_plan_ratio"] for row in rows) >= 1
    assert all(row["bytes_exchanged"] == 0 for row in rows)


def test_training_has_a_row_for_each_plan(tmp_path):
    rows = measured("train", tmp_path)
    check("train", rows)
    assert [row["plan"] for row in rows] == list(PLANS)


def test_batches_from_the_host_train_the_same(tmp_path):
    session = Session(COMMANDS["bench_train"](**ON_ONE_RANK), Comm(), tmp_path, PLANS)
    model = MODELS["small"]
    workload = model.workload()
    features = workload.batches(0)
    plan = session.plan("table_wise", workload.tables(), features)
    trained = []
    for kind in ("in_memory", "from_host"):
        step = TrainingStep(session, model, workload.tables(), plan, session.comm)
        times = getattr(step, kind)(batches_of(model, features)).run(len(features) + 2)
        assert len(times["step"]) == len(features) + 2
        stores = [s.weights for shared in sharded_tables(step.model) for s in shared.stores]
        trained.append([*step.model.parameters(), *stores])
    assert all(map(torch.equal, *trained))


def test_strategies_have_a_row_for_each_shape_of_batches(tmp_path):
    tables = record(ListedTables, {"source": "list", "tables": SAMPLE}, "tables")
    shape = {"batch_size": (4, 8), "ids": ("uniform", "zipf"), "bag": 3}
    rows = measured("strategies", tmp_path, tables=tables, **shape)
    check("strategies", rows)
    keys = {(row["strategy"], row["ids"], row["batch_size"], row["step"]) for row in rows}
    assert len(keys) == len(rows) == 2 * 2 * 2 * 2
    assert all(row["memory_peak_gb"] >= 0 for row in rows)


@pytest.mark.parametrize(
    "forms",
    [["hex"], pytest.param(["typed", "hex", "lists", "csv"], marks=pytest.mark.full)],
)
def test_reading_is_taken_apart_and_so_is_training(tmp_path, monkeypatch, forms):
    from recapp.dataset.synthetic import write_clicks

    sizes = (40, 9, 6, 5, 4, 4, 3, 2, 9, 30, 7, 6, 11, 2, 3, 10, 4, 9, 5, 20, 15, 9, 6, 3, 7, 5)
    write_clicks(tmp_path / "logs", Generate(rows=600), sizes)
    assert [*reading.FORMS] == ["typed", "hex", "lists", "csv"]
    monkeypatch.setattr(reading, "FORMS", {form: reading.FORMS[form] for form in forms})
    tiny = type(MODELS["small"])
    monkeypatch.setattr(tiny, "workload", lambda self: type(self).__mro__[1].workload(self))
    dataset = {
        "path": str(tmp_path / "logs"),
        "naming": "criteo",
        "lanes": 2,
        "shuffle_rows": 64,
        "dense_transform": "log1p",
        "batch_size": 64,
        "id_rule": "hash",
        "num_threads": 2,
    }
    given = record(DataSettings, dataset, "dataset")
    rows = measured("data", tmp_path, {"row_wise": PLANS["row_wise"]}, dataset=given)
    check("data", rows)
    *alone, launched, ahead = rows
    ways = ["raw", *(f"{threads} threads" for threads in range(3))]
    assert [(row["form"], row["stage"]) for row in alone] == [
        (form, way) for form in forms for way in ways
    ]
    assert all(row["rows_per_second"] > 0 for row in rows)
    assert all(row["raw_ratio"] > 0 for row in alone[1:4])
    for training, threads in ((launched, 0), (ahead, 2)):
        assert training["stage"] == f"small, {threads} threads"
        assert 0 < training["wait_share"] < 1 <= training["longest_ratio"]


@pytest.mark.parametrize("verb", bench.COLUMNS)
def test_headings_are_explained_and_a_table_fits_80_columns(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = bench.COLUMNS[verb]
    texts = {"plan": "data_parallel", "strategy": "data_parallel", "transport": "shared_memory"}
    texts |= {
        "model": "hugectr_d128",
        "stage": "hugectr_d128, mixed",
        "form": "its own",
        "way": "raw_rows",
    }
    texts |= {"workload": "W2m", "ids": "uniform", "step": "forward+backward", "quantize": "fp16"}
    row = {c.key: texts.get(c.key, 1234.567) for c in columns}
    row |= {"batch_size": 4096, "threads": 2, "throughput": 123_456.7, "bytes_exchanged": 1e9}
    quartiles = {f"{c.key}{q}": 1234.5 for c in columns for q in ("_q1", "_q3")}
    row |= quartiles | {"q1_ms": 1200.0, "q3_ms": 1300.0, "wait_share": 0.12}
    print_table(bench.with_quartiles([row], columns), columns)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for column in columns:
        if column.key.endswith("_ratio") or column.title == "ms":
            assert column.meaning and column.meaning in printed


@pytest.mark.full
def test_the_commands_of_the_pages_mean_something():
    calls = [c for c in commands(fenced("sh")) if c.name == "bench"]
    assert {c.arguments[0] for c in calls} == set(VERBS["bench"]) == set(bench.MEASURES)
    for call in calls:
        verb, *overrides = call.arguments
        settings = recipe(f"bench_{verb}", overrides)
        assert verb == "inference" or bench.rules_of(settings.plans)


@pytest.mark.full
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("step", ["workload=W4", "plans=[table_wise,mixed]"]),
        ("train", []),
        ("strategies", ["batch_size=32", "plans=[table_wise,row_wise]"]),
        ("data", ["dataset.generate.rows=20000"]),
    ],
)
def test_the_command_answers_machines_with_its_rows_alone(verb, arguments, tmp_path):
    short = ["rounds=1", "round_seconds=0.01", "format=json", "hydra.run.dir=run"]
    ran = command("bench", verb, *arguments, *short, cwd=tmp_path)
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert list(document) == ["rows"]
    check(verb, document["rows"])
    assert re.search(r"rounds: 1 of 1$", ran.err, re.MULTILINE)


@pytest.mark.full
def test_the_command_measures_a_checkpoint(stored, tmp_path):
    """Without what is compiled, which test_inference_bench.py measures."""
    run = stored.small_run("+plan=mixed")
    shape = ["compile=false", "threads=1", "batch_size=[1,64]", "rounds=1", "round_seconds=0.01"]
    path = f"artefact={run}/checkpoints/last.ckpt"
    ran = command("bench", "inference", path, *shape, "format=json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    for size in (1, 64):
        ways = {row["way"] for row in rows if row["batch_size"] == size}
        assert ways == {"eager", "raw_rows"}
