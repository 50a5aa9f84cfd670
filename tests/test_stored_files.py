"""Checkpoints and artefacts of earlier code load, score and resume as they did there, and are whole
by their own checksums.

`tests/fixtures/before_stored` was written before both became one room.
"""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from jobs import validation

import recapp
from recapp import predict
from recapp.app.stored_recipe import recipe_of_stored, stored_settings
from recapp.engine.engine_settings import EngineSettings
from recapp.errors import ArtefactError
from recapp.stored.artefact_files import example_table
from recapp.stored.artefact_manifest import EXAMPLE
from recapp.stored.checkpoint import read_manifest, static_table, verify
from recapp.stored.stored_model import open_artefact, read_stored
from recapp.tasks.click import ClickTask

OLD = Path(__file__).parent / "fixtures" / "before_stored"
EXPECTED = json.loads((OLD / "expected.json").read_text())
KINDS = ("static", "dynamic")
STORED = {"checkpoint": "checkpoints/last.ckpt", "artefact": "artefact"}


@pytest.fixture(autouse=True)
def plain_kernels(reference_kernels):
    """Kernels do not matter here."""


def rows_of(kind):
    return example_table(open_artefact(OLD / kind / "artefact").read(EXAMPLE))


def close(value):
    """Rounding differs from machine to machine."""
    return pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_it_scores_raw_rows_as_the_old_code_did(kind, what):
    model = recapp.load_model(OLD / kind / STORED[what])
    assert model.predict(rows_of(kind)).tolist() == close(EXPECTED[kind][f"{what}_scores"])


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_predict_with_it_what_the_old_code_did(jobs, kind, what, tmp_path):
    pq.write_table(rows_of(kind), tmp_path / "rows.parquet")
    output = tmp_path / "scores.parquet"
    named = [f"ckpt_path={OLD / kind / STORED[what]}", f"input={tmp_path / 'rows.parquet'}"]
    jobs.run("predict", tmp_path / "job", [*named, f"output={output}"], 2)
    scores = pq.read_table(output)["score"].to_pylist()
    assert scores == close(EXPECTED[kind][f"{what}_scores"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_evaluates_to_the_metrics_that_the_old_code_measured(jobs, kind, tmp_path):
    checkpoint = OLD / kind / STORED["checkpoint"]
    settings = [f"ckpt_path={checkpoint}", f"dataset.path={tmp_path / 'clicks'}"]
    metrics = jobs.evaluate(tmp_path / "eval", *settings)
    assert validation(metrics) == close(EXPECTED[kind]["validation"])
    assert read_manifest(checkpoint).metrics == close(EXPECTED[kind]["validation"])


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_it_as_the_old_code_went_on(jobs, kind, tmp_path):
    settings = [f"ckpt_path={OLD / kind / STORED['checkpoint']}", "trainer.max_steps=18"]
    metrics = jobs.train(tmp_path / "run", *settings, f"dataset.path={tmp_path / 'clicks'}")
    assert metrics["steps"] == 18
    assert validation(metrics) == close(EXPECTED[kind]["gone_on"])


def without(group):
    manifest = read_stored(OLD / "static" / STORED["artefact"])
    config = {name: value for name, value in manifest.info["config"].items() if name != group}
    return replace(manifest, info=manifest.info | {"config": config})


def test_a_group_that_it_does_not_store_has_its_defaults():
    assert recipe_of_stored(without("engine")).engine == EngineSettings()
    for name in ("trainer", "launch", "planner", "topology", "metrics"):
        assert recipe_of_stored(without(name)).seed


def test_who_only_scores_makes_none_of_its_metrics():
    metrics = {"names": ["auc"], "group": "C1", "extra": {"f1": {"_target_": "not_here.F1"}}}
    manifest = without("metrics")
    manifest.info["config"]["metrics"] = metrics
    assert recipe_of_stored(manifest).built_task.measures == ClickTask().measures
    for command in ("train", "eval"):
        assert stored_settings(manifest.config, command)["metrics"]["names"] == ["auc"]
    for command in ("predict", "export"):
        assert "metrics" not in stored_settings(manifest.config, command)


@pytest.mark.parametrize("name", ["dataset", "model", "tables", "optimizer"])
def test_a_group_without_defaults_must_be_stored(name):
    with pytest.raises(ArtefactError, match=rf"artefact is damaged: config\.{name} is missing; "):
        recipe_of_stored(without(name))


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_it_is_as_it_was_written(kind):
    assert verify(OLD / kind / STORED["checkpoint"]) > 4_000
    open_artefact(OLD / kind / "artefact").verify()


def test_a_dynamic_table_has_its_keys_and_rows():
    keys_R, tensor_RD = static_table(OLD / "dynamic" / STORED["checkpoint"], "large_table")
    stored = {t.name: t for t in open_artefact(OLD / "dynamic" / "artefact").manifest.tables}
    assert len(keys_R) == len(tensor_RD) == stored["large_table"].rows == 4436
    assert stored["large_table"].keys and not stored["wide_table"].keys


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "dataset.table_rows=[10,40,20]",
            "table large_table is 60 x 4 in the {}, but 10 x 4 by the",
        ),
        ("tables=dynamic", "table large_table has a fixed number of rows in the {}, but grows by"),
        (
            "model.top_layers=[4,1]",
            "the model's top.0.weight is 8 x 10 in the {}, but is 4 x 10 by",
        ),
    ],
)
def test_settings_of_another_model_are_refused_before_ranks_start(
    what, change, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recapp.app.job.launch", lambda *_, **__: pytest.fail("ranks started"))
    path = OLD / "static" / STORED[what]
    job = [f"hydra.run.dir={tmp_path}/job", f"input={tmp_path}", f"output={tmp_path}/s.parquet"]
    assert predict.main([f"ckpt_path={path}", *job, change]) == 1
    assert said.format(what) in capsys.readouterr().err
