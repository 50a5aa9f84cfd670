"""`docs/make_results.py` and the logs that `docs/parquet_of_logs.py` writes. Nothing is trained."""

import argparse
import gzip
import json
import re
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from documents import REPOSITORY
from jobs import recipe

from recapp import EmbeddingBagCollection
from recapp.run.model import build_model
from recapp.settings.option_files import options

PARTS = (("path", "train"), ("val_path", "test"), ("test_path", "test"))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return import_module("make_results")


@pytest.fixture
def logs(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return import_module("parquet_of_logs")


def arguments(verb="train", logs=("criteo_kaggle=/c", "movielens_1m=/m"), **more):
    usual = {"models": (), "seeds": 2, "fuxictr": None, "lightgbm": None}
    return argparse.Namespace(verb=verb, logs=logs, **usual | more)


def run_of(folder, name, overrides=(), **measured):
    """A run as recapp.train leaves it."""
    directory = folder / name
    (directory / ".hydra").mkdir(parents=True)
    log, model, _ = name.split("/")
    metrics = {
        "status": "ok",
        "val_auc": 0.7,
        "val_log_loss": 0.5,
        "samples_per_cpu_second": 12_340.0,
        "dense_parameters": 1_200_000,
        "table_parameters": 24,
        "rows_train": 6000,
        "rows_val": 1000,
        "version_torch": "2.13.0",
        "date": "2026-11-26T10:00:00+00:00",
    }
    (directory / "metrics.json").write_text(json.dumps(metrics | measured))
    (directory / "performance.json").write_text('{"memory": [{"rss_peak": 600000000}]}')
    said = [f"dataset={log}", f"model={model}", "logger=none", *overrides, "seed=1"]
    (directory / ".hydra/overrides.yaml").write_text(yaml.safe_dump(said))
    return said


# ---- runs


def test_every_model_trains_on_every_log_that_has_what_it_needs(script):
    given = list(script.runs(arguments()))
    names = [name for name, *_ in given]
    known = {*options("model")}
    assert len(names) == len({*names}) == 2 * (2 * len(known) - 2)  # din, bst: on one log
    assert {name for name in names if name.startswith("criteo_kaggle/")} == {
        f"criteo_kaggle/{model}/seed_{seed}" for model in known - {"din", "bst"} for seed in (1, 2)
    }
    assert {*script.OF_FUXICTR, *script.SIZES, *script.FIELD_AWARE} <= known
    assert {*script.LOGS} <= {*options("dataset")}
    of_one = {name: overrides for name, _, overrides in given}
    din = recipe("train", of_one["movielens_1m/din/seed_2"])
    assert (din.seed, din.dataset.min_frequency, din.callbacks) == (2, None, {})
    for name, fields in (("criteo_kaggle/ffm", 13 + 26 + 13), ("movielens_1m/onn", 3)):
        checked = recipe("train", of_one[f"{name}/seed_1"])
        assert checked.tables.dim == 4 * fields
        assert len(checked.schema.numbers) + len(checked.schema.features) == fields


def test_other_programs_get_the_same_settings(script):
    given = arguments(models=("fm", "dlrm"), seeds=1, fuxictr="/python", lightgbm="/trees")
    of_one = {name: (program, overrides) for name, program, overrides in script.runs(given)}
    program, overrides = of_one["movielens_1m/fuxictr_dlrm/seed_1"]
    assert program[2:] == ["tests.speed.fuxictr_beside", "/python"]
    assert overrides == of_one["movielens_1m/dlrm/seed_1"][1]
    program, overrides = of_one["criteo_kaggle/lightgbm/seed_1"]
    assert program[2:] == ["tests.speed.boosted_trees", "/trees"]
    assert recipe("train", overrides).dataset.missing_flags
    assert "movielens_1m/fuxictr_fm/seed_1" not in of_one


def test_sizes_are_runs_of_their_own(script):
    given = list(script.runs(arguments("sizes", ("criteo_kaggle=/c",), seeds=1)))
    names = [name for name, *_ in given]
    assert names[4:8] == [f"criteo_kaggle/fcn_x{size}/seed_1" for size in (1, 4, 16, 64)]
    recipe("train", given[-1][2])


def test_a_run_that_is_complete_is_not_run_again_and_a_failed_one_is_told(
    script, tmp_path, monkeypatch, capsys
):
    ran = []

    def run(command, cwd, **_):
        ran.append((Path(cwd).relative_to(tmp_path).as_posix(), command))
        return argparse.Namespace(returncode="fm" in str(cwd))

    monkeypatch.setattr(script.subprocess, "run", run)
    given = arguments(runs=tmp_path, logs=("avazu=/a",), models=("dlrm", "fm", "dcn"), seeds=1)
    of_one = {name: overrides for name, _, overrides in script.runs(given)}
    run_of(tmp_path, "avazu/dlrm/seed_1")
    run_of(tmp_path, "avazu/dcn/seed_1")
    file = tmp_path / "avazu/dlrm/seed_1/.hydra/overrides.yaml"
    file.write_text(yaml.safe_dump(of_one["avazu/dlrm/seed_1"]))
    assert script.train(given) == 1
    assert [name for name, _ in ran] == ["avazu/fm/seed_1", "avazu/dcn/seed_1"]  # other settings
    assert ran[0][1][1:4] == ["-m", "recapp.train", "hydra.run.dir=."]
    assert "failed: " in capsys.readouterr().err


# ---- the page


def test_the_page_has_means_ranges_fewer_seeds_and_further_settings(script, tmp_path):
    for model in ("dcn", "dlrm", "ffm", "fm", "onn"):
        own = ["tables.dim=156"] if model in ("ffm", "onn") else []
        shared = [] if model == "onn" else ["tables.shared={history: item}"]
        run_of(tmp_path, f"avazu/{model}/seed_1", [*own, *shared])
    run_of(tmp_path, "avazu/fm/seed_2", ["tables.shared={history: item}"], val_auc=0.72)
    run_of(tmp_path, "broken/dlrm/seed_1", val_auc=None, status="undefined")
    run_of(tmp_path, "broken/fm/seed_1", status="failed")
    page = tmp_path / "page/results.md"
    assert script.main(["page", str(tmp_path), str(page)]) == 0
    text = page.read_text()
    (own,) = (line for line in text.splitlines() if line.startswith("| fm "))
    cells = ["fm", ".7100 .7000-.7200", ".5000 .5000-.5000", "12.3", "600", "1.2 M", "24"]
    assert [cell.strip() for cell in own.split("|")[1:-1]] == cells
    assert text.index("| fm") < text.index("| dlrm")  # the best first
    assert "Seeds: 2. Fewer: dcn 1, dlrm 1, ffm 1, onn 1." in text
    assert "6,000 rows to train on, 1,000 to measure on. Settings: `logger=none`." in text
    said = (
        "Further settings: all but onn `tables.shared={history: item}`; ffm, onn `tables.dim=156`."
    )
    assert said in " ".join(text.split())
    assert "- torch 2.13.0\n" in text and "- 2026-11-26\n" in text
    assert "| dlrm  | -  " in text and text.count("| fm") == 1  # not defined; failed
    assert max(map(len, text.splitlines())) <= 100


def test_sizes_are_drawn_and_not_listed(script, tmp_path):
    for size, weights in ((1, 1000), (4, 4000)):
        for seed in (1, 2):
            more = {"dense_parameters": weights, "val_auc": 0.7 + weights / 1e5 + seed / 1e3}
            run_of(tmp_path, f"criteo_kaggle/fcn_x{size}/seed_{seed}", **more)
    run_of(tmp_path, "criteo_kaggle/fm/seed_1")
    script.write_page(tmp_path, tmp_path / "docs/results.md")
    figure = (tmp_path / "docs/pictures/quality_by_size_criteo_kaggle.svg").read_text()
    assert "mathdefault" not in figure and "2 k" in figure  # no formula as it is typed
    text = (tmp_path / "docs/results.md").read_text()
    assert "](pictures/quality_by_size_criteo_kaggle.svg)" in text and "| fcn" not in text
    assert "fcn 0.7115 with 1,000 parameters to 0.7415 with 4,000" in " ".join(text.split())


def test_the_page_of_today_is_of_this_script(script):
    text = (REPOSITORY / "docs/results.md").read_text()
    assert f"# Results\n\n{script.ABOUT}\n" in text
    assert {*re.findall(r"^## (\w+)$", text, re.MULTILINE)} == {*script.LOGS}


# ---- logs


def test_public_logs_become_parquet(logs, tmp_path):
    (tmp_path / "ml.test.rating").write_text("0\t7\t5\t30\n")
    (tmp_path / "ml.train.rating").write_text(
        "0\t1\t5\t10\n0\t2\t4\t10\n0\t3\t1\t20\n1\t1\t4\t20\n"
    )
    found = logs.movielens_1m(tmp_path)
    assert found["item"].to_pylist() == [1, 2, 3, 1, 7]
    assert found["history"].to_pylist() == [[], [], [1, 2], [], [1, 2]]  # not those of this second
    assert found["liked"].to_pylist() == [1, 1, 0, 1, 1]
    (tmp_path / "avazu").mkdir()
    (tmp_path / "avazu/test.csv").write_text("id,hour,C1\n1,14102100,1005\n")
    (tmp_path / "avazu/train.csv").write_text(
        "id,click,hour,C1\n10000009418151094273,1,14102123,0x\n"
    )
    found = logs.avazu(tmp_path / "avazu")
    assert found.to_pylist() == [{"C1": "0x", "hour": "23", "click": 1}]
    raw = (tmp_path / "avazu/train.csv").read_bytes()
    (tmp_path / "train.gz").write_bytes(gzip.compress(raw))  # as the contest has it
    assert logs.avazu(tmp_path / "train.gz").to_pylist() == found.to_pylist()


def test_items_of_open_bandit_are_found_by_their_ids(logs, tmp_path):
    names = [f"user-item_affinity_{k}" for k in range(80)] + [f"user_feature_{k}" for k in range(4)]
    rows = ["timestamp,click,item_id,position," + ",".join(names)]
    rows += [f"{time},0,{item},1,{','.join('0' * 84)}" for time, item in ((1, 7), (2, 3), (3, 70))]
    (tmp_path / "all.csv").write_text("\n".join(rows) + "\n")
    features = [f"item_feature_{k}" for k in range(4)]
    items = [f"{item},{','.join([str(item / 2)] * 4)}" for item in (7, 70, 3)]  # ids with gaps
    (tmp_path / "item_context.csv").write_text("\n".join(["item_id," + ",".join(features), *items]))
    found = logs.open_bandit(tmp_path)
    assert found["item"].to_pylist() == [7, 3, 70]
    assert found["item_0"].to_pylist() == [3.5, 1.5, 35.0]


def test_published_files_are_checked_and_their_experiments_read_them(logs, tmp_path, monkeypatch):
    """Each experiment composes, and its columns and tables are made from such files."""
    for name in logs.MD5:
        source, target = tmp_path / name, tmp_path / f"{name}_parquet"
        source.mkdir()
        dataset = yaml.safe_load((logs.EXPERIMENTS / f"{name}.yaml").read_text())["dataset"]
        columns = [dataset["label"], *dataset.get("dense", ()), *dataset["sparse"]]
        rows = [",".join(str((row + k) % 3) for k in range(len(columns) - 1)) for row in range(40)]
        text = "\n".join([",".join(columns), *(f"{row % 2},{rows[row]}" for row in range(40))])
        for file in logs.MD5[name]:
            (source / file).write_text(text)
        with pytest.raises(SystemExit, match="its md5 is"):
            logs.bars(name, source, target)
        md5 = logs.hashlib.md5(text.encode()).hexdigest()
        monkeypatch.setitem(logs.MD5, name, dict.fromkeys(logs.MD5[name], md5))
        logs.bars(name, source, target)
        read = pq.read_table(target / "train.parquet")
        assert read.num_rows == 40 and {*read.column_names} == {*columns}
        paths = [f"dataset.{key}={target}/{file}.parquet" for key, file in PARTS]
        checked = recipe("train", [f"experiment={name}", *paths])
        model = build_model(checked, on_paper=True)
        tables = [
            table
            for part in model.modules()
            if isinstance(part, EmbeddingBagCollection)
            for table in part.embedding_bag_configs()
        ]
        assert len(tables) == len(dataset["sparse"]) - len(checked.tables.shared or {}), name
