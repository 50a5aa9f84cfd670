"""`python -m recapp.reproduce`: its records, published files, made-up rows and verdicts. No rank is
started.
"""

import hashlib
import json
import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from jobs import command

from recapp import reproduce
from recapp.cli import kept_runs
from recapp.cli.kept_runs import KeptRun
from recapp.cli.recipe_of_job import recipe_under
from recapp.dataset import published_files
from recapp.dataset.published_files import PublishedFiles, md5_of
from recapp.errors import ConfigError, DataError
from recapp.run.checks import check_training
from recapp.run.published import Published, Witness, read_published
from recapp.settings.option_files import options

NAMES = options("reproduce")
CSV = {
    "train.csv": "label,I1,I2,C1,C2\n1,1.5,30,0a,x^y\n0,,2,07,\n",
    "valid.csv": "label,I1,I2,C1,C2\n0,1,-1.5,b,x\n",
    "test.csv": "label,I1,I2,C1,C2\n1,2,,b,x\n",
}
FILES = PublishedFiles(
    files={name: hashlib.md5(text.encode()).hexdigest() for name, text in CSV.items()},
    rows={"train": 2000, "valid": 1000, "test": 1000},
    dense=("I1",),
    ids={"I2": 9, "C1": 5_000_000, "C2": 3},
    bags={"C2": 2},
    splits={"C2": "^"},
    buckets=("I2",),
)


def published(auc=0.8, **others):
    return Published(published=Witness(auc=auc, source="a log"), **others)


# ---- records


@pytest.mark.parametrize("name", NAMES)
def test_every_record_composes_to_settings_of_training(name, tmp_path):
    found = read_published(name)
    assert found.published.source and found.split and found.overrides
    columns = found.data.overrides(tmp_path) if found.data else []
    recipe = recipe_under("train", [*columns, *found.overrides, *found.shape])
    check_training(recipe)
    assert recipe.metrics.group not in recipe.schema.vocabularies
    if found.data:
        assert recipe.dataset.dense == found.data.dense
        assert recipe.dataset.sparse == tuple(found.data.ids)
        assert recipe.dataset.path == str(tmp_path / "train.parquet")
        assert (recipe.dataset.test_path is not None) or found.measured_on == "val"
        assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in found.data.files.values())


def test_an_epoch_that_test_rows_have_chosen_is_marked_and_validates_on_them(tmp_path):
    found = read_published("bars_taobaoad_x1_dcnv2")
    rows = {row["what"]: row["value"] for row in reproduce.table(found, [], whole=False)}
    assert rows["the epoch was chosen by"] == "test rows, so the published value is too high"
    assert sum("test.parquet" in override for override in found.data.overrides(tmp_path)) == 2
    others = [read_published(name).chosen_by for name in NAMES if "taobaoad" not in name]
    assert "test" not in others


def test_an_unknown_experiment_and_a_broken_record_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"name must be given: name=\.\.\., one of bars_avazu"):
        read_published(None)
    with pytest.raises(ConfigError, match="did you mean hugectr_notebook"):
        read_published("hugectr_notebok")
    (tmp_path / "reproduce").mkdir()
    for text, said in (
        ("publshed: {auc: .8}", "publshed: did you mean published"),
        ("tolerance: .1", "published must be given"),
        ("[]", "is no mapping of settings"),
    ):
        (tmp_path / "reproduce/mine.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{said}"):
            read_published("mine", [tmp_path])


# ---- verdicts


@pytest.mark.parametrize(
    ("aucs", "whole", "verdict"),
    [
        ((0.8003, 0.8001), True, "reproduced"),
        ((0.7996, 0.7997), True, "reproduced"),
        ((0.8003, 0.8009), True, "not reproduced"),
        ((0.7990,), True, "not reproduced"),
        ((None,), True, "not reproduced"),
        ((0.8,), False, "shape only"),  # even if the value is the published one
    ],
)
def test_the_verdict_is_that_of_the_mean_and_of_published_files_alone(aucs, whole, verdict):
    results = [{"seed": seed, "test_auc": auc} for seed, auc in enumerate(aucs)]
    found = published(seeds=(1, 2))
    assert found.verdict(results, whole=whole) == verdict
    rows = reproduce.table(found, results, whole=whole)
    assert rows[-1] == {"what": "verdict", "value": verdict}
    assert any(row["what"] == "difference of AUC" for row in rows) == (
        whole and aucs[0] is not None
    )


def test_changed_settings_are_another_experiment():
    results = [{"seed": 1, "test_auc": 0.8}]
    rows = reproduce.table(published(), results, whole=True, changed=["tables.dim=4"])
    assert {"what": "changed by this command", "value": "tables.dim=4"} in rows
    assert rows[-1]["value"] == "other settings"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("data=''", "data='': names no directory"), ("seeds=[1,2,1]", "1 is there twice")],
)
def test_settings_that_name_no_runs_are_refused(wrong, says, tmp_path):
    done = command("reproduce", "name=hugectr_notebook", f"path={tmp_path}", wrong, cwd=tmp_path)
    assert says in done.error()


def test_a_plateau_is_that_of_the_published_logs():
    for name in NAMES:
        overrides = read_published(name).overrides
        if "optimizer/schedule=plateau" in overrides:
            found = recipe_under("train", overrides).optimizer.schedule.arguments
            assert found["threshold"] == found["min_lr"] == 1e-6
            assert found["threshold_mode"] == "abs"


def test_nothing_is_reproduced_where_nothing_was_published():
    assert published(None).verdict([{"test_auc": 0.8}], whole=True) == "not reproduced"


# ---- files


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    for name, text in CSV.items():
        (folder / name).write_text(text)
    return folder


def test_published_files_become_parquet_once(source, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    FILES.convert(source, folder)
    assert pq.read_table(folder / "train.parquet").to_pylist() == [
        {"I2": 23, "C1": "0a", "C2": ["x", "y"], "I1": 1.5, "label": 1.0},
        {"I2": 11, "C1": "07", "C2": [""], "I1": None, "label": 0.0},
    ]
    assert pq.read_table(folder / "test.parquet")["I2"].to_pylist() == [9]  # missing: 0
    monkeypatch.setattr(published_files, "md5_of", lambda path: pytest.fail("read again"))
    FILES.convert(source, folder)


def test_another_file_and_a_missing_one_are_refused(source, tmp_path):
    (source / "valid.csv").write_text(CSV["valid.csv"] + "0,1,1,b,x\n")
    with pytest.raises(DataError, match=r"valid\.csv: its md5 is .*, that of the published file"):
        FILES.convert(source, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*"))
    (source / "valid.csv").unlink()
    with pytest.raises(DataError, match=r"valid\.csv is missing: train\.csv, valid\.csv"):
        FILES.convert(source, tmp_path / "data")
    with pytest.raises(ConfigError, match="not CSV, and are not read: leave out data"):
        PublishedFiles(rows={"train": 1}).convert(source, tmp_path / "data")
    (source / "train.csv").write_text("label,C1\n")
    empty = PublishedFiles(
        files={"train.csv": published_files.md5_of(source / "train.csv")}, ids={"C1": 2}
    )
    with pytest.raises(DataError, match="has no rows"):
        empty.convert(source, tmp_path / "data")


def test_made_up_rows_have_the_shape_and_a_label_that_depends_on_ids(tmp_path):
    FILES.make_up(tmp_path)
    train = pq.read_table(tmp_path / "train.parquet")
    assert {path.stem for path in tmp_path.glob("*.parquet")} == {"train", "valid", "test"}
    assert train.num_rows == 2 and train.column_names == ["I2", "C1", "C2", "I1", "label"]
    assert [len(bag) for bag in train["C2"].to_pylist()] == [2, 2]
    assert FILES.shape_of_ids() == {"I2": 9, "C1": 5000, "C2": 3}
    more = PublishedFiles(rows={"train": 4_000_000}, ids={"C1": 4})
    more.make_up(tmp_path / "more")
    rows = pq.read_table(tmp_path / "more/train.parquet")
    ids, labels = rows["C1"].to_numpy(), rows["label"].to_numpy()
    shares = [labels[ids == k].mean() for k in range(4)]
    assert rows.num_rows == 4000 and max(shares) - min(shares) > 0.1
    before = (tmp_path / "more/train.parquet").stat().st_mtime_ns
    more.make_up(tmp_path / "more")
    assert (tmp_path / "more/train.parquet").stat().st_mtime_ns == before
    replace(more, label="clicked").make_up(tmp_path / "more")  # another record
    assert "clicked" in pq.read_table(tmp_path / "more/train.parquet").column_names


def test_converted_files_are_written_again_for_another_record(tmp_path):
    (tmp_path / "train.csv").write_text("label,C1\n1,a b\n0,a\n")
    files = {"train.csv": md5_of(tmp_path / "train.csv")}
    record = PublishedFiles(files=files, rows={"train": 2}, ids={"C1": 2})
    record.convert(tmp_path, tmp_path / "written")
    written = tmp_path / "written/train.parquet"
    assert pq.read_table(written)["C1"].to_pylist() == ["a b", "a"]
    replace(record, splits={"C1": " "}).convert(tmp_path, tmp_path / "written")
    assert pq.read_table(written)["C1"].to_pylist() == [["a", "b"], ["a"]]


def test_paths_of_any_letters_are_read_as_they_are(tmp_path):
    for name in ("a,b", "it's", "a=b [c] {d}", "${x}", "\\${x}", "back\\", "\\'", " "):
        folder = tmp_path / name
        found = recipe_under(
            "train", PublishedFiles(rows={"train": 1}, ids={"C1": 2}).overrides(folder)
        )
        assert found.dataset.path == str(folder / "train.parquet"), name


# ---- the command


def test_the_command_trains_its_seeds_measures_test_rows_and_prints_the_verdict(
    tmp_path, monkeypatch, capsys
):
    ran = []

    def run_recipe(recipe, job, module, threads):
        ran.append((module, job.overrides))
        measured = {"train": {"val_auc": 0.9, "checkpoint": "/best"}, "eval": {"test_auc": 0.7}}
        return measured[module.removeprefix("recapp.")]

    monkeypatch.setattr(kept_runs, "run_recipe", run_recipe)
    monkeypatch.setattr(kept_runs, "recipe_under", lambda *_: None)
    monkeypatch.setattr(KeptRun, "recipe", lambda run: None)
    given = ["name=bars_avazu_x1_finalnet", f"path={tmp_path}", "seeds=[5,6]", "format=json"]
    assert reproduce.main([*given, "settings=['tables.dim=4']"]) == 0
    said = json.loads(capsys.readouterr().out)["rows"]
    assert said[-1] == {"what": "verdict", "value": "shape only"}
    assert {"what": "AUC, mean", "value": "0.700000"} in said
    assert [module for module, _ in ran] == ["recapp.train", "recapp.eval"] * 2
    assert ran[0][1][-3:] == ("trainer.max_epochs=1", "tables.dim=4", "seed=5")
    assert ran[1][1] == ("ckpt_path='/best'", "split=test")
    assert reproduce.main([*given, "settings=['tables.dim=4']"]) == 0 and len(ran) == 4


def test_experiments_without_published_files_refuse_data(tmp_path, capsys):
    given = [f"path={tmp_path}", f"data={tmp_path}"]
    assert reproduce.main(["name=hugectr_notebook", *given]) == 1
    assert "has no published files: its data are generated" in capsys.readouterr().err
    assert reproduce.main(["name=mlperf_dlrm_dcnv2", *given]) == 1
    assert "the published files are not CSV" in capsys.readouterr().err


@pytest.mark.full
def test_a_record_of_the_users_own_runs_its_shape_on_ranks(tmp_path):
    (tmp_path / "mine/reproduce").mkdir(parents=True)
    (tmp_path / "mine/reproduce/small.yaml").write_text(
        "published: {auc: .8, source: nobody}\n"
        "data:\n"
        "  rows: {train: 2000000, valid: 500000, test: 500000}\n"
        "  ids: {user: 5, item: 7}\n"
        "overrides: [dataset.batch_size=256, tables.dim=4, 'model.bottom_layers=[8,4]']\n"
    )
    given = ["--config-dir", "mine", "name=small", "format=json"]
    done = command("reproduce", *given, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = {row["what"]: row["value"] for row in json.loads(done.out)["rows"]}
    assert rows["verdict"] == "shape only" and 0.4 < float(rows["AUC, mean"]) < 1
    kept = tmp_path / "reproduced/small/shape/seed_1"
    named = json.loads((kept / "result.json").read_text())["checkpoint"]
    assert (kept / "checkpoints").is_dir() and named.startswith(f"{kept / 'checkpoints'}/")
    again = command("reproduce", *given, cwd=tmp_path)
    assert again.out == done.out and "1 of 1 runs are complete already" in again.err
