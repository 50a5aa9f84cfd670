"""Every model of `conf/model`: its settings fit its constructor, it trains to the same bits under
two plans, and its artefact scores in Python and in C++.
"""

import json
import os
import subprocess
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from compilers import needs_program
from documents import PAGES, blocks, table
from jobs import command, recipe, validation
from stored import copy

import recapp
from recapp.errors import ConfigError
from recapp.models.catalogue import MODELS
from recapp.models.layers import FieldDropout
from recapp.run.model import build_model
from recapp.run.run_checks import check_training
from recapp.run.run_rows import rows_of
from recapp.settings.option_files import conf_dir
from recapp.settings.records import Constructor, find_constructor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.stored.manifest import META
from recapp.stored.stored_model import load_table, open_stored
from recapp.tables.collections import collections_in
from recapp.tables.table_settings import BAGS, SEQUENCES, WIDE

TARGETS = {
    path.stem: yaml.safe_load(path.read_text())["_target_"]
    for path in sorted((conf_dir() / "model").glob("*.yaml"))
}
ROWS = 640
BOUND = 1e-5
TESTS = Path(__file__).resolve().parents[1]
HERE = os.pathsep.join([str(TESTS.parent), str(TESTS)])
FIELD_AWARE = ("ffm", "onn")
SEQUENCE = ("tables.sequences=[history]", "tables.shared={history: item}")


def logs(folder):
    """Logs with numbers, ids and a history of items, in `folder`/logs.parquet."""
    random = np.random.default_rng(3)
    item = random.integers(0, 30, ROWS)
    history = [random.integers(0, 30, n).tolist() for n in random.integers(0, 6, ROWS)]
    columns = {
        "clicked": np.array([i in h for i, h in zip(item, history, strict=True)], np.int8),
        "price": random.random(ROWS).astype(np.float32),
        "age": random.random(ROWS).astype(np.float32),
        "user": random.integers(0, 40, ROWS),
        "item": item,
        "place": random.integers(0, 9, ROWS),
        "history": pa.array(history, pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), Path(folder) / "logs.parquet")


def settings(folder, name, *more):
    of_sequences = SEQUENCE if SEQUENCES in MODELS[TARGETS[name]].needs else ()
    return (
        *(f"model={name}", "dataset=custom", f"dataset.path={folder}/logs.parquet"),
        *("dataset.label=clicked", "dataset.dense=[price,age]"),
        f"tables.dim={24 if name in FIELD_AWARE else 8}",
        *("dataset.sparse=[user,item,place,history]", "dataset.batch_size=64"),
        *("dataset.val_batch_size=64", "tables.max_rows=50", "trainer.max_steps=6"),
        *of_sequences,
        *more,
    )


@pytest.fixture(scope="module")
def folder(stored):
    return stored.made(logs)


def built(folder, name, *more):
    """The model of its settings with whole tables, and a batch of the training rows."""
    found = recipe("train", settings(folder, name, *more))
    check_training(found)
    torch.manual_seed(1)
    model = build_model(found)
    for _, tables in collections_in(model):
        tables.to_empty(device="cpu")
        tables.reset_parameters()
    return found, model, next(iter(rows_of(found).training_stream()))


def test_every_model_of_the_catalogue_has_a_file_of_settings():
    assert set(TARGETS.values()) == set(MODELS)


@pytest.mark.parametrize("name", TARGETS)
def test_the_catalogue_knows_the_collections_that_a_model_requires(name):
    parameters = signature(find_constructor(TARGETS[name], "model")).parameters
    required = [
        each
        for each in (BAGS, SEQUENCES, WIDE)
        if each in parameters and parameters[each].default is Parameter.empty
    ]
    assert sorted(MODELS[TARGETS[name]].needs) == sorted(required)


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_gives_a_logit_for_each_sample_and_trains_all_its_weights(name, folder):
    found, model, batch = built(folder, name)

    def outputs_of(batch):
        return found.built_task.named(model(batch), batch.rows, name)

    def trained_loss(batch):
        def loss_of(outputs):
            return found.built_task.loss(found.built_task.named(outputs, batch.rows, name), batch)

        raw = model(batch)
        loss = loss_of(raw)
        if hasattr(model, "extra_losses"):
            loss = loss + sum(model.extra_losses(raw, batch, loss_of).values())
        loss.backward()
        return loss.item()

    assert 0 < trained_loss(batch) < 20
    idle = [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle
    # The ranks of the last batch of an epoch may have one row or none.
    assert 0 < trained_loss(first_rows(batch, 1)) < 20
    assert trained_loss(first_rows(batch, 0)) == 0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.eval()
    (logits_B,) = outputs_of(batch).values()
    assert logits_B.isfinite().all()
    assert logits_B.std() > 0 or name == "logistic"  # its weights start at 0
    assert outputs_of(first_rows(batch, 0))["logit"].shape == (0,)


def first_rows(batch, rows):
    """The batch that a rank with so many samples gets."""
    names = batch.sparse.keys()
    features = [batch.sparse[name] for name in names]
    lengths = torch.cat([each.lengths()[:rows] for each in features])
    ids = torch.cat([each.values()[: int(each.lengths()[:rows].sum())] for each in features])
    sparse = KeyedJaggedTensor(names, ids, lengths=lengths, stride=rows)
    return Batch(batch.dense_BI[:rows], sparse, batch.labels_B[:rows])


CONTEXT = "tables.collections={first_context: {dim: 4, columns: [item]}}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more"), [*((name, ()) for name in TARGETS), ("finalmlp", (CONTEXT,))]
)
def test_fp64_tables_serve_a_float_model(name, more, folder):
    found, model, batch = built(folder, name, "tables.data_type=fp64", *more)
    assert {p.dtype for _, tables in collections_in(model) for p in tables.parameters()} == {
        torch.float64
    }
    outputs = found.built_task.named(model(batch), batch.rows, name)
    assert outputs["logit"].dtype == torch.float32


def drops_fields(model):
    return any(isinstance(part, FieldDropout) for part in model.modules())


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_models_of_fields_drop_whole_vectors_on_request(name, folder):
    found = recipe("train", settings(folder, name))
    arguments = found.model.arguments
    assert not drops_fields(build_model(found))
    if "field_dropout" not in arguments:
        assert name in ("dlrm", "dlrm_dcn", "logistic", "ffm", "onn")
        return
    assert arguments["field_dropout"] == 0
    wanted = Constructor(found.model.target, {**arguments, "field_dropout": 0.6})
    assert drops_fields(build_model(replace(found, model=wanted)))
    wrong = Constructor(found.model.target, {**arguments, "field_dropout": 1})
    with pytest.raises(ConfigError, match=r"model.field_dropout=1: must be at least 0 and less"):
        check_training(replace(found, model=wrong))


@pytest.mark.parametrize("name", ["fcn", "finalnet", "qnn_alpha", "rankmixer"])
def test_models_with_losses_of_clicks_predict_no_ratings(tmp_path, name):
    more = ["task=rating"] + (["model.experts=2"] if name == "rankmixer" else [])
    found = recipe("train", settings(tmp_path, name, *more))
    with pytest.raises(ConfigError, match=r"losses of clicks .* predicts rating: choose another"):
        check_training(found)


@pytest.mark.parametrize("name", ["dlrm", "rankmixer"])
def test_other_models_predict_ratings(tmp_path, name):
    check_training(recipe("train", settings(tmp_path, name, "task=rating")))


def all_models(folder, *more):
    """The settings of all models in one, and the folder of their options."""
    models = {}
    for name, target in TARGETS.items():
        plain = recipe("train", settings(folder, name)).model.plain()
        drops = {"field_dropout": 0.2} if "field_dropout" in plain else {}
        models[name] = plain | drops | {"needs": list(MODELS[target].needs)}
    options = {
        "model": {"_target_": "many_models.ManyModels", "models": models},
        "task": {"_target_": "many_models.ManyTask", "models": list(models)},
    }
    mine = folder / "mine"
    for group, option in options.items():
        (mine / group).mkdir(parents=True, exist_ok=True)
        (mine / group / "many.yaml").write_text(yaml.safe_dump(option))
    dim = "tables.dim=40"  # field-aware models take multiples of the five fields
    wanted = settings(folder, "dlrm", "task=many", "tables.wide=true", *SEQUENCE, dim, *more)
    return ("model=many", *wanted[1:]), mine


@pytest.fixture
def many(folder, tmp_path):
    """A folder with the logs, for settings of all models."""
    return copy(folder, tmp_path / "logs")


def state_of(job):
    """The dense part of a run's last checkpoint, and its weights of tables."""
    last = job / "checkpoints/last.ckpt"
    with open_stored(last, selector=lambda manifest: [META]) as model:
        tables = {name: load_table(last, name) for name in model.manifest.shapes}
        return {**model.dense(), **tables}


@pytest.mark.full
def test_every_model_trains_to_the_same_bits_under_two_plans_and_across_a_resume(
    many, jobs, tmp_path
):
    average = ("trainer.average.kind=ema", "trainer.average.every=1")
    wanted, mine = all_models(many, "+plan=row_wise", *average)
    expected = validation(jobs.train(tmp_path / "one", *wanted, folders=[mine]))
    jobs.train(tmp_path / "part", *wanted, "trainer.max_steps=3", folders=[mine])
    on = (f"ckpt_path={tmp_path}/part/checkpoints/last.ckpt", "trust=[many_models]")
    more = ("+plan=table_wise", "trainer.max_steps=6")
    found = validation(jobs.train(tmp_path / "rest", *on, *more, folders=[mine]))
    assert found == expected
    last = f"ckpt_path={tmp_path}/rest/checkpoints/last.ckpt"
    measured = validation(jobs.evaluate(tmp_path / "eval", last, "trust=[many_models]"))
    assert measured == expected
    first, second = (state_of(tmp_path / name) for name in ("one", "rest"))
    assert first.keys() == second.keys() and len(first) > len(TARGETS)
    assert [key for key, value in first.items() if not np.array_equal(value, second[key])] == []


@pytest.mark.full
@needs_program
def test_artefacts_of_every_model_score_in_python_and_in_cpp(many, jobs, stored, tmp_path):
    torch.set_num_threads(1)  # as the program: products of two threads have other last bits
    wanted, mine = all_models(many, "trainer.max_steps=2")
    jobs.train(tmp_path / "job", *wanted, world=1, folders=[mine])
    artefact = tmp_path / "artefact"
    wanted = (f"ckpt_path={tmp_path}/job/checkpoints/last.ckpt", f"output={artefact}")
    more = ("compile=true", "report_rows=0", "trust=[many_models]")
    done = command("export", *wanted, *more, cwd=tmp_path, PYTHONPATH=HERE)
    assert done.code == 0, done.err
    rows = pq.read_table(many / "logs.parquet").drop_columns("clicked").slice(0, 100)
    portable = recapp.load_model(artefact, trust=["many_models"])
    compiled = recapp.load_model(artefact, trust=["many_models"], trust_compiled=True)
    assert compiled.info["compiled"]
    near, logits = (model(model.batch(rows)) for model in (portable, compiled))

    def in_cpp(*more):
        words = [stored.program(), artefact, "--threads=1", *more]
        scored = subprocess.run(words, input=arrow(rows), capture_output=True, timeout=60)
        assert scored.returncode == 0, scored.stderr
        lines = [json.loads(line) for line in scored.stdout.splitlines()]
        assert len(lines) == len(rows)
        return {name: torch.tensor([line[name] for line in lines]) for name in lines[0]}

    logits_in_cpp, scores_in_cpp = in_cpp("--logits"), in_cpp()
    scores, near_scores = (model.predict(rows) for model in (compiled, portable))
    assert list(scores_in_cpp) == list(scores) == [f"{name}_score" for name in TARGETS]
    for name in TARGETS:
        near_B = near[name]
        assert bool(((logits[name] - near_B).abs() <= BOUND * near_B.abs().clamp(min=1)).all())
        assert torch.equal(logits_in_cpp[name], logits[name])
        column = f"{name}_score"
        torch.testing.assert_close(scores[column], near_scores[column], rtol=0, atol=1e-6)
        assert torch.equal(scores_in_cpp[column], scores[column])
    assert {len(none) for none in compiled.predict(rows.slice(0, 0)).values()} == {0}


def arrow(rows):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue().to_pybytes()


def test_the_page_of_models_has_a_line_for_each():
    names = [row[0].strip("`") for row in table("model", PAGES["docs/models.md"])]
    assert sorted(names) == sorted(TARGETS)


@pytest.mark.full
def test_the_model_of_the_page_trains_with_all_its_parts(folder, tmp_path):
    for block in blocks(page="docs/models.md"):
        if block.file is not None:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    logs = f"dataset.path={folder}/logs.parquet"
    wanted = ("model=watched_clicks", "dataset=watched", logs, "tables.max_rows=50", *SEQUENCE)
    found = command(
        "train",
        *("--config-dir", "mine", *wanted, "trainer.max_steps=4", "trainer.devices=1"),
        *("dataset.batch_size=64", "dataset.val_batch_size=64", "hydra.run.dir=job"),
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(tmp_path / "mine")]),
    )
    assert found.code == 0, found.err
    curves = (tmp_path / "job").rglob("metrics.csv")
    assert any("train_straight" in path.read_text() for path in curves)
