"""`python -m recapp.results`: its runs, what it keeps, and its page. No rank is started."""

import errno
import gzip
import json
import os
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from documents import REPOSITORY
from jobs import command

from recapp import results
from recapp.benchmarks import boosted_trees
from recapp.cli import job as job_module
from recapp.cli import kept_runs
from recapp.cli.job import Job
from recapp.cli.kept_runs import KeptRun
from recapp.cli.recipe_of_job import recipe_under
from recapp.cli.result_runs import runs_of
from recapp.cli.tree_runs import missing_trees, train_trees
from recapp.errors import CheckpointError, ConfigError, LaunchError
from recapp.reporting.result_lines import read_results
from recapp.reporting.results_page import table, write_page
from recapp.settings.option_files import options
from recapp.settings.values import in_quotes

JOB = Job(Path("."), (), {})
LOGS = "logs={criteo_kaggle: /c, movielens_1m: /m}"


def planned(*overrides, verb=""):
    logs = [] if any(override.startswith("logs=") for override in overrides) else [LOGS]
    return runs_of(recipe_under("results", [*logs, *overrides]), Job(Path("."), (), {}, verb))


def result(folder, log, model, seed, size="", **measured):
    """A result as a run leaves it."""
    name = f"{log}/sizes/{model}_{size}" if size else f"{log}/{model}"
    found = {
        "log": log,
        "model": model,
        "seed": seed,
        "val_auc": 0.7,
        "val_log_loss": 0.5,
        "samples_per_cpu_second": 12_340.0,
        "ranks": 1,
        "threads": 1,
        "form": kept_runs.FORM,
        "peak_bytes": 600e6,
        "dense_parameters": 1_200_000,
        "table_parameters": 24,
        "rows_train": 6000,
        "rows_val": 1000,
        "overrides": [f"dataset={log}", f"model={model}", "dataset.buckets=log", f"seed={seed}"],
        "version_torch": "2.13.0",
        "processor": "a processor",
        "cores": 2,
        "date": "2026-11-26T10:00:00+00:00",
        **({"size": size} if size else {}),
        **measured,
    }
    directory = folder / name / f"seed_{seed}"
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps(found))


# ---- which runs


def test_every_model_trains_on_every_log_that_has_what_it_needs():
    runs = planned("seeds=2", "columns=1")
    names = [run.name for run in runs]
    known = options("model")
    assert len(names) == len(set(names)) == 2 * (2 * len(known) - 2)  # din, bst: on one log
    assert {name for name in names if name.startswith("criteo_kaggle/")} == {
        f"criteo_kaggle/{model}/seed_{seed}"
        for model in {*known} - {"din", "bst"}
        for seed in (1, 2)
    }
    assert names[0].endswith("seed_1") and names[-1].endswith("seed_2")  # seeds in turn
    assert {run.threads for run in runs} == {1}  # as those of other programs


def test_a_run_is_a_command_line_of_recapp_train():
    (run,) = planned("models=[din]", "seeds=1")
    assert run.overrides[:3] == ("dataset=movielens_1m", "dataset.path='/m'", "model=din")
    assert {"tables.shared={history: item}", "tables.sequences=[history]", "seed=1"} <= {
        *run.overrides
    }
    recipe = recipe_under("train", run.overrides)
    assert recipe.dataset.min_frequency is None and recipe.callbacks == {}


def test_models_with_a_vector_for_each_field_get_tables_of_that_width():
    runs = planned("models=[ffm]", "seeds=1", "columns=3")
    widths = [recipe_under("train", run.overrides).tables.dim for run in runs]
    assert widths == [3 * (13 + 26 + 13), 3 * 3]


def test_settings_of_a_model_with_a_vector_for_each_field_replace_its_width():
    for own, dim in (("model.layers=[8]", 4 * (13 + 26 + 13)), ("tables.dim=390", 390)):
        (first, *_) = planned("models=[onn]", "seeds=1", f"+settings_of.onn=['{own}']")
        assert first.overrides[-2:] == (own, "seed=1")
        assert recipe_under("train", first.overrides).tables.dim == dim
    (first, *_) = planned("models=[ffm]", "seeds=1", "+settings_of.ffm=['dataset.buckets=null']")
    assert recipe_under("train", first.overrides).tables.dim == 4 * (13 + 26)


def test_a_misspelt_setting_of_all_runs_is_told_with_the_run(tmp_path):
    (run, *_) = planned("models=[fm]", "seeds=1", "settings=['trainer.devces=1']")
    with pytest.raises(
        ConfigError, match=r"^criteo_kaggle/fm/seed_1: unknown setting trainer\.dev"
    ):
        kept_runs.train_missing([run], tmp_path, JOB)


def test_mappings_take_new_keys_without_a_plus(tmp_path, monkeypatch, capsys):
    seen = []
    result(tmp_path, "avazu", "fm", 1)  # so that there is a page
    monkeypatch.setattr(kept_runs, "train_missing", lambda runs, *_: seen.extend(runs))
    given = ["logs={generated: /g}", "models=[din]", "seeds=1", f"path={tmp_path}"]
    more = ["histories={generated: {C1: C2}}", "settings_of={din: ['tables.dim=4']}"]
    assert results.main([*given, *more]) == 0, capsys.readouterr().err
    assert seen[0].overrides[-3:] == ("tables.sequences=[C1]", "tables.dim=4", "seed=1")
    assert results.main([*given, more[0], "settings_of.din=['tables.dim=8']"]) == 0
    assert seen[1].overrides[-2] == "tables.dim=8"


def test_models_with_nothing_but_weights_share_no_tables():
    runs = planned("models=[logistic]", "seeds=1")
    assert not any("tables.shared" in override for run in runs for override in run.overrides)


def test_sizes_are_composed_and_grow():
    runs = planned("seeds=1", verb="sizes")
    own = [run for run in runs if run.facts["log"] == "criteo_kaggle"]
    assert [run.name for run in own if run.facts["model"] == "fcn"] == [
        f"criteo_kaggle/sizes/fcn_{size}/seed_1" for size in (1, 4, 16, 64)
    ]
    for run in own:
        assert run.threads == 1
        if run.facts["size"] == "64":
            recipe_under("train", run.overrides)


@pytest.mark.parametrize(
    ("overrides", "verb", "said"),
    [
        (["logs=null"], "", 'logs must be given: "logs={criteo_kaggle: DIR}"'),
        (["logs={criteo: /c}"], "", "logs: dataset=criteo does not exist; did you mean criteo_k"),
        (
            ["logs={criteo_kaggle: ''}"],
            "",
            "logs.criteo_kaggle=: must be the path of Parquet files",
        ),
        (["models=[dlmr]"], "", "models: model=dlmr does not exist; did you mean dlrm"),
        (["models=[din]", "logs={criteo_kaggle: /c}"], "", "models=din: needs behaviour sequences"),
        (["models=[fm]"], "sizes", "models=fm: sizes lists no settings for it"),
        (["models=[fm,dlrm,fm]"], "", "models=[fm,dlrm,fm]: fm is there twice"),
        (
            ["+settings_of.avasu=['a=1']"],
            "",
            "settings_of.avasu: is an option neither of dataset nor of model; did you mean avazu",
        ),
        (
            ["+histories.avasu={a: b}"],
            "",
            "histories: dataset=avasu does not exist; did you mean avazu",
        ),
        (["+sizes.dlmr={}"], "", "sizes: model=dlmr does not exist; did you mean dlrm"),
        (
            ["models=[ffm]", "+settings_of.ffm=['model.normalize=false']"],
            "",
            "criteo_kaggle/ffm: unknown setting model.normalize",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(overrides, verb, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        planned(*overrides, verb=verb)


# ---- runs that are done once


@pytest.fixture
def ranks(monkeypatch):
    """What ran, in place of ranks: they print, write a checkpoint, and measure."""
    ran = []

    def run_recipe(recipe, job, module, threads):
        ran.append(job.directory.name)
        os.write(1, b"of a rank\n")
        (job.directory / "checkpoints").mkdir()
        if "fails" in job.directory.name:
            raise LaunchError("rank 0 was ended")
        if "full" in job.directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"val_auc": 0.75, "model": "DLRM"}

    monkeypatch.setattr(kept_runs, "run_recipe", run_recipe)
    monkeypatch.setattr(KeptRun, "recipe", lambda run: None)
    return ran


def test_a_complete_run_is_not_run_again_and_one_of_other_settings_is(ranks, tmp_path, capfd):
    runs = [KeptRun(name, ("a=1",), {"model": "mine"}) for name in ("one", "two")]
    first = kept_runs.train_missing(runs[:1], tmp_path, JOB)
    again = kept_runs.train_missing(runs, tmp_path, JOB)
    assert ranks == ["one", "two"] and again[0] == first[0]
    assert first[0]["model"] == "mine" and first[0]["overrides"] == ["a=1"]
    assert first[0]["cores"] > 0 and first[0]["processor"]
    assert not (tmp_path / "one/checkpoints").exists()
    assert (tmp_path / "one/log.txt").read_text() == "of a rank\n"
    assert "of a rank" not in capfd.readouterr().out
    kept_runs.train_missing([KeptRun("one", ("a=2",))], tmp_path, JOB)
    assert ranks == ["one", "two", "one"]


def test_a_failed_run_is_told_and_tried_again_and_the_next_one_goes_on(ranks, tmp_path, capfd):
    runs = [KeptRun(name, ()) for name in ("fails", "full", "next")]
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"2 runs failed, the first fails: log\.txt"):
            kept_runs.train_missing(runs, tmp_path, JOB)
    assert ranks == ["fails", "full", "next", "fails", "full"]
    said = capfd.readouterr().err
    assert "fails: rank 0 was ended" in said and "full: [Errno 28] No space left" in said


def test_trees_that_fail_are_told_and_the_other_logs_and_models_go_on(
    ranks, tmp_path, monkeypatch, capfd
):
    def measure(python, recipe, seeds, log):
        log.write_text("of LightGBM\n")
        if "/c" in recipe.dataset.path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return [{"val_auc": 0.7}]

    monkeypatch.setattr(boosted_trees, "measure", measure)
    settings = recipe_under("results", [LOGS, "seeds=1", "lightgbm_python=/python"])
    missing = missing_trees(settings, tmp_path, {"lightgbm": "4"})
    trees = partial(train_trees, settings, tmp_path, missing)
    with pytest.raises(LaunchError, match="1 run failed, the first criteo_kaggle/lightgbm"):
        kept_runs.train_missing([KeptRun("one", ())], tmp_path, JOB, trees)
    assert ranks == ["one"] and "criteo_kaggle/lightgbm: [Errno 28]" in capfd.readouterr().err
    found = json.loads((tmp_path / "movielens_1m/lightgbm/seed_1/result.json").read_text())
    assert (tmp_path / "criteo_kaggle/lightgbm/log.txt").read_text() == "of LightGBM\n"
    assert [trees.log for trees in missing_trees(settings, tmp_path, {"lightgbm": "4"})] == [
        "criteo_kaggle"  # the other one has its result
    ]
    assert found["threads"] == 1 and found["version_lightgbm"] == "4"
    assert "version_torch" not in found


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "dataset.weight=w",
            "dataset.weight=w: LightGBM is trained and measured without weights",
        ),
        ("task=rating", r"task._target_=recapp.tasks.rating.RatingTask: LightGBM predicts clicks"),
        (
            "task.soft_labels=true",
            "task.soft_labels=true: LightGBM predicts labels of 0 or 1 alone",
        ),
    ],
)
def test_settings_that_trees_would_ignore_are_refused_before_anything_trains(
    setting, said, tmp_path
):
    given = [LOGS, f"settings=['callbacks=none','{setting}']", "lightgbm_python=/python"]
    with pytest.raises(ConfigError, match=f"^criteo_kaggle/lightgbm: {said}"):
        missing_trees(recipe_under("results", given), tmp_path, {})


def test_what_a_killed_command_has_not_deleted_is_deleted(ranks, tmp_path):
    run = KeptRun("one", ("a=1",))
    run.train(tmp_path, JOB)
    (tmp_path / "one/checkpoints").mkdir()  # killed between the result and the deletion
    kept_runs.train_missing([run], tmp_path, JOB)
    assert ranks == ["one"] and not (tmp_path / "one/checkpoints").exists()


def test_a_result_of_another_version_or_form_is_told_and_run_again(ranks, tmp_path, capfd):
    run = KeptRun("one", ("a=1",), threads=1)
    run.train(tmp_path, JOB)
    path = tmp_path / "one/result.json"
    for key, other in (
        ("form", 1),
        ("version_recapp", "0.0.1"),
        ("version_torch", "1.0"),
        ("threads", 2),
        ("overrides", ["a=2"]),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: other}))
        kept_runs.train_missing([run], tmp_path, JOB)
        assert "1 of 1 runs have results of other settings" in capfd.readouterr().err
    assert ranks == ["one"] * 6


def test_results_of_another_program_have_its_versions(ranks, tmp_path):
    run = KeptRun("one", (), versions={"torch": "3", "fuxictr": "2"})
    found = run.train(tmp_path, JOB)
    versions = {key for key in found if key.startswith("version_")}
    assert versions == {"version_recapp", "version_torch", "version_fuxictr"}
    assert found["version_torch"] == "3" and run.result(tmp_path) == found
    assert replace(run, versions={"torch": "3", "fuxictr": "2.1"}).result(tmp_path) is None


def test_the_threads_of_a_run_are_those_of_its_ranks(tmp_path, monkeypatch):
    seen = []

    def launch(*_, threads, **__):
        seen.append(threads)
        raise LaunchError("no ranks here")

    monkeypatch.setattr(job_module, "launch", launch)
    recipe = recipe_under("train", ["dataset=avazu", "dataset.path=/a", "trainer.devices=1"])
    with pytest.raises(LaunchError):
        KeptRun("one", (), threads=3).measure(recipe, replace(JOB, directory=tmp_path))
    assert seen == [3]


def test_a_stopped_run_goes_on_from_its_checkpoint_if_it_may(ranks, tmp_path, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr(
        kept_runs, "recipe_under", lambda command, overrides: seen.append(overrides)
    )
    run = KeptRun("a, 'b'", ("a=1",), resumes=True)

    def stop(directory):
        run.train(tmp_path, JOB)
        (directory / "checkpoints/last.ckpt").mkdir(parents=True)
        (directory / "result.json").unlink()

    directory = tmp_path / "a, 'b'"
    stop(directory)
    monkeypatch.setattr(
        kept_runs, "run_recipe", lambda recipe, job, *_: {"ran": list(job.overrides)}
    )
    went_on = run.train(tmp_path, JOB)
    named = f"ckpt_path={in_quotes(directory / 'checkpoints/last.ckpt')}"
    assert went_on["ran"] == [named] and seen == [(named,)] and went_on["overrides"] == ["a=1"]
    assert "goes on from" in capfd.readouterr().err
    for other in (
        KeptRun("a, 'b'", ("a=2",), resumes=True),  # other settings
        KeptRun("a, 'b'", ("a=1",)),  # its speed is wanted
    ):
        (directory / "checkpoints/last.ckpt").mkdir(parents=True)
        assert other.train(tmp_path, JOB)["ran"] == list(other.overrides)
        (directory / "begun.json").write_text(json.dumps(run._same()))


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        ({"overrides": ["a=2"]}, "differs in settings and would"),
        ({"version_torch": "1.0", "threads": 2}, "differs in the version of torch, threads and"),
        (None, r"differs in settings or versions \(begun.json cannot be read\)"),
    ],
)
def test_a_stopped_run_of_other_settings_is_never_deleted(begun, said, stopped, tmp_path):
    run, directory = stopped
    text = "" if begun is None else json.dumps(run._same() | begun)
    (directory / "begun.json").write_text(text)
    for train in (run.train, partial(kept_runs.train_missing, [run])):
        with pytest.raises(ConfigError, match=rf"one: .*{said}.*remove the directory.*path=\.\.\."):
            train(tmp_path, JOB)
    assert (directory / "checkpoints/last.ckpt").exists()


def test_a_complete_run_of_other_settings_is_told_before_it_is_replaced(ranks, tmp_path, capfd):
    KeptRun("one", ("a=1",), resumes=True).train(tmp_path, JOB)
    KeptRun("one", ("a=2",), resumes=True).train(tmp_path, JOB)
    assert "one: differs in settings, and is replaced" in capfd.readouterr().err
    assert ranks == ["one"] * 2


@pytest.mark.parametrize("resumes", [True, False])
def test_runs_that_resume_keep_the_measured_checkpoint(resumes, tmp_path, monkeypatch):
    def run_recipe(recipe, job, *_):
        folder = job.directory / "checkpoints"
        for name in ("best", "other"):
            (folder / name).mkdir(parents=True)
        (folder / "last.ckpt").symlink_to("other")
        return {"checkpoint": str(folder / "best")}

    monkeypatch.setattr(kept_runs, "run_recipe", run_recipe)
    monkeypatch.setattr(KeptRun, "recipe", lambda run: None)
    run = KeptRun("one", (), resumes=resumes)
    found = run.train(tmp_path, JOB)
    kept = tmp_path / "one/checkpoints"
    assert [path.name for path in kept.glob("*")] == (["best"] if resumes else [])
    assert ("checkpoint" in found) == resumes
    run.delete_large(tmp_path)
    assert not resumes or Path(found["checkpoint"]).is_dir()


@pytest.fixture
def stopped(ranks, tmp_path):
    """A run with a model of the user that was stopped, and its directory."""
    run = KeptRun("one", ("a=1",), tests=True, resumes=True)
    (tmp_path / "one/checkpoints/last.ckpt").mkdir(parents=True)
    (tmp_path / "one/begun.json").write_text(json.dumps(run._same()))
    return run, tmp_path / "one"


def test_a_run_that_was_stopped_in_its_test_is_only_measured(stopped, tmp_path, monkeypatch):
    run, directory = stopped
    ran = []

    def run_recipe(recipe, job, module, threads):
        ran.append((module, job.overrides))
        return {"test_auc": 0.7}

    monkeypatch.setattr(kept_runs, "run_recipe", run_recipe)
    monkeypatch.setattr(kept_runs, "recipe_under", lambda *_: None)
    metrics = {"val_auc": 0.8, "checkpoint": "/best"}
    for status, first in (("ok", []), ("undefined", []), ("stopped", ["recapp.train"])):
        (directory / "metrics.json").write_text(json.dumps({**metrics, "status": status}))
        ran.clear()
        with suppress(KeyError):  # the stand-in's training has no checkpoint
            found = run.train(tmp_path, JOB)
        assert [module for module, _ in ran] == (first or ["recapp.eval"])
        if not first:
            assert (found["test_auc"], found["val_auc"]) == (0.7, 0.8)
            assert ran[0][1] == ("ckpt_path='/best'", "split=test")
        (directory / "checkpoints/last.ckpt").mkdir(parents=True, exist_ok=True)


def test_a_stopped_run_of_the_users_own_model_is_trusted(stopped, tmp_path, monkeypatch, capfd):
    run, directory = stopped
    recipe = {"model": {"_target_": "mine.models.Own"}, "task": {"_target_": "recapp.tasks.T"}}
    monkeypatch.setattr(KeptRun, "recipe", lambda run: recipe)
    monkeypatch.setattr(kept_runs, "recipe_under", lambda *_: recipe)
    seen = []

    def run_recipe(recipe, job, module, threads):
        seen.append(job.overrides)
        return {"checkpoint": "/best"}

    monkeypatch.setattr(kept_runs, "run_recipe", run_recipe)
    run.train(tmp_path, JOB)
    assert [own[1] for own in seen] == ["trust=[mine]"] * 2 and "goes on" in capfd.readouterr().err

    def refuse(command, overrides):
        if command == "train":
            raise CheckpointError("the checkpoint is damaged")

    (directory / "checkpoints/last.ckpt").mkdir(parents=True)
    monkeypatch.setattr(kept_runs, "recipe_under", refuse)
    seen.clear()
    run.train(tmp_path, JOB)
    assert seen[0] == ("a=1",)
    assert "one: begins anew: the checkpoint is damaged" in capfd.readouterr().err


def test_wrong_settings_are_told_with_the_run_before_any_run_begins(ranks, tmp_path, monkeypatch):
    def recipe(run):
        if run.name == "wrong":
            raise ConfigError("dataset.path=x: there is no such file")

    monkeypatch.setattr(KeptRun, "recipe", recipe)
    with pytest.raises(ConfigError, match=r"wrong: dataset\.path=x: there is no such file"):
        kept_runs.train_missing([KeptRun("right", ("a=1",)), KeptRun("wrong", ())], tmp_path, JOB)
    assert ranks == []


def test_a_table_of_a_log_has_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for model in ("fuxictr_xdeepfm", "masknet_parallel"):
        more = {"peak_bytes": 1.516e9, "dense_parameters": 10_100_000}
        result(tmp_path, "criteo_kaggle", model, 1, table_parameters=14_500_000, **more)
    monkeypatch.setattr(kept_runs, "train_missing", lambda *_: None)
    given = ["logs={criteo_kaggle: /c}", f"path={tmp_path}"]
    assert results.main(given) == 0
    said = capsys.readouterr().out.splitlines()
    table = [line for line in said if tmp_path.name not in line]  # but for the path of the page
    assert said[0] == "criteo_kaggle" and max(map(len, table)) <= 80
    assert any(
        "fuxictr_xdeepfm" in line and line.rstrip().endswith("14.500") for line in said
    )  # one line each


# ---- the page


def test_the_page_has_means_ranges_and_fewer_seeds(tmp_path):
    for seed, auc in ((1, 0.70), (2, 0.72)):
        result(tmp_path, "avazu", "fm", seed, val_auc=auc)
    result(tmp_path, "avazu", "dlrm", 1, val_auc=0.75)
    result(tmp_path, "broken", "dlrm", 1, val_auc=None)
    lines = read_results(tmp_path)
    (page,) = write_page(lines, tmp_path / "results.md")
    text = page.read_text()
    (own,) = (line for line in text.splitlines() if line.startswith("| fm "))
    cells = ["fm", ".7100 .7000-.7200", ".5000 .5000-.5000", "12.3", "600", "1.2 M", "24"]
    assert [cell.strip() for cell in own.split("|")[1:-1]] == cells
    assert text.index("| dlrm") < text.index("| fm")  # the best first
    assert "Seeds: 2. Fewer: dlrm 1." in text
    assert "6,000 rows to train on, 1,000 to measure on. Settings: `dataset.buckets=log`." in text
    assert "- torch 2.13.0" in text and "- a processor, 2 cores; one rank of one thread" in text
    assert "| dlrm  | -  " in text  # not defined
    assert max(map(len, text.splitlines())) <= 100
    assert "| dlrm  | .7500             |" in text  # one number has no range
    assert table(lines)[0] == {
        "log": "avazu",
        "model": "dlrm",
        "seeds": 1,
        "auc": 0.75,
        "log_loss": 0.5,
        "samples_per_cpu_second": 12_340,
        "peak_bytes": 600e6,
        "dense_parameters": 1_200_000,
        "table_parameters": 24,
    }


def test_the_page_has_the_settings_that_only_some_models_have(tmp_path):
    shared = "tables.shared={history: item}"
    for model in ("dcn", "dlrm", "ffm", "fm", "onn"):
        own = ["tables.dim=156"] if model in ("ffm", "onn") else []
        more = [] if model == "onn" else [shared]
        overrides = ["dataset=avazu", f"model={model}", "~logger", *more, *own, "seed=1"]
        result(tmp_path, "avazu", model, 1, overrides=overrides)
    (page,) = write_page(read_results(tmp_path), tmp_path / "results.md")
    text = page.read_text()
    assert "Settings: `~logger`." in text  # a setting without a value
    assert f"\nFurther settings: all but onn `{shared}`; ffm, onn `tables.dim=156`.\n" in text


def test_runs_of_other_settings_are_left_out_of_a_mean_and_told(tmp_path):
    for seed, day, auc, more in (
        (1, 26, 0.70, {}),
        (2, 26, 0.72, {}),
        (3, 25, 0.80, {"overrides": ["model=fm", "dataset.buckets=null", "seed=3"]}),
        (4, 25, 0.80, {"version_recapp": "0.0.9"}),
        (5, 25, 0.80, {"form": 1}),
        (6, 25, 0.80, {"threads": 2}),
        (7, 25, 0.80, {"version_torch": "2.12.0"}),
        (8, 25, 0.80, {"version_fuxictr": "2.3.9"}),
        (9, 25, 0.80, {"form": 1}),
    ):
        result(tmp_path, "avazu", "fm", seed, val_auc=auc, date=f"2026-11-{day}", **more)
    (line,) = lines = read_results(tmp_path)
    assert [run["seed"] for run in line.runs] == [1, 2] and line.auc == pytest.approx(0.71)
    page, *_ = write_page(lines, tmp_path / "results.md")
    text = " ".join(page.read_text().split())
    assert (
        "Left out of fm: seeds 3 of other settings; 4 of another version of recapp; 5, 9 in "
        "another form; 6 on another number of threads; 7 of another version of torch; 8 of another "
        "version of fuxictr." in text
    )


def test_sizes_are_drawn_and_not_listed(tmp_path):
    for size, weights in ((1, 1000), (4, 4000)):
        for seed in (1, 2):
            more = {"dense_parameters": weights, "val_auc": 0.7 + weights / 1e5 + seed / 1e3}
            result(tmp_path, "criteo_kaggle", "fcn", seed, str(size), **more)
    page, figure = write_page(read_results(tmp_path), tmp_path / "docs/results.md")
    assert figure == tmp_path / "docs/pictures/quality_by_size_criteo_kaggle.svg"
    assert "mathdefault" not in figure.read_text()  # a formula as it is typed
    assert "2 k" in figure.read_text()
    text = page.read_text()
    assert "](pictures/quality_by_size_criteo_kaggle.svg)" in text and "| fcn" not in text
    assert "fcn 0.7115 with 1,000 parameters to 0.7415 with 4,000" in " ".join(text.split())


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    result(tmp_path, "avazu", "fm", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"page=.*: cannot be written"):
        write_page(read_results(tmp_path), tmp_path / "file/results.md")


@pytest.mark.parametrize(
    ("page", "said"), [("file/results.md", "cannot be written"), ("runs", "is a directory")]
)
def test_a_page_is_checked_before_anything_trains(page, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(kept_runs, "train_missing", lambda *_: pytest.fail("has trained"))
    given = ["logs={criteo_kaggle: /c}", f"path={tmp_path / 'runs'}"]
    assert results.main([*given, f"page={tmp_path / page}"]) == 1
    assert said in capsys.readouterr().err


def test_the_command_says_what_it_lacks(capsys):
    assert results.main([]) == 1
    assert capsys.readouterr().err.startswith("error: logs must be given: ")
    assert results.main(["size"]) == 1


def test_public_logs_become_parquet(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import parquet_of_logs

    (tmp_path / "ml.test.rating").write_text("0\t7\t5\t30\n")
    (tmp_path / "ml.train.rating").write_text(
        "0\t1\t5\t10\n0\t2\t4\t10\n0\t3\t1\t20\n1\t1\t4\t20\n"
    )
    found = parquet_of_logs.movielens_1m(tmp_path)
    assert found["item"].to_pylist() == [1, 2, 3, 1, 7]
    assert found["history"].to_pylist() == [[], [], [1, 2], [], [1, 2]]  # not those of this second
    assert found["liked"].to_pylist() == [1, 1, 0, 1, 1]
    (tmp_path / "avazu").mkdir()
    (tmp_path / "avazu/test.csv").write_text("id,hour,C1\n1,14102100,1005\n")
    (tmp_path / "avazu/train.csv").write_text(
        "id,click,hour,C1\n10000009418151094273,1,14102123,0x\n"
    )
    found = parquet_of_logs.avazu(tmp_path / "avazu")
    assert found.to_pylist() == [{"C1": "0x", "hour": "23", "click": 1}]
    raw = (tmp_path / "avazu/train.csv").read_bytes()
    (tmp_path / "train.gz").write_bytes(gzip.compress(raw))  # as the contest has it
    assert parquet_of_logs.avazu(tmp_path / "train.gz").to_pylist() == found.to_pylist()


def test_items_of_open_bandit_are_found_by_their_ids(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import parquet_of_logs

    names = [f"user-item_affinity_{k}" for k in range(80)] + [f"user_feature_{k}" for k in range(4)]
    rows = ["timestamp,click,item_id,position," + ",".join(names)]
    rows += [f"{time},0,{item},1,{','.join('0' * 84)}" for time, item in ((1, 7), (2, 3), (3, 70))]
    (tmp_path / "all.csv").write_text("\n".join(rows) + "\n")
    features = [f"item_feature_{k}" for k in range(4)]
    items = [f"{item},{','.join([str(item / 2)] * 4)}" for item in (7, 70, 3)]  # ids with gaps
    (tmp_path / "item_context.csv").write_text("\n".join(["item_id," + ",".join(features), *items]))
    found = parquet_of_logs.open_bandit(tmp_path)
    assert found["item"].to_pylist() == [7, 3, 70]
    assert found["item_0"].to_pylist() == [3.5, 1.5, 35.0]


@pytest.mark.full
def test_two_models_on_a_log_end_in_a_page_and_are_not_run_again(tmp_path):
    from recapp.dataset.published_files import PublishedFiles

    ids = recipe_under("train", ["dataset=avazu", "dataset.path=/x"]).dataset.sparse
    rows = PublishedFiles(label="click", rows={"train": 2_000_000}, ids=dict.fromkeys(ids, 9))
    (tmp_path / "log").mkdir()
    rows.make_up(tmp_path / "log")
    given = ["logs={avazu: log}", "models=[logistic,ffm]", "seeds=1", "format=json"]
    done = command("results", *given, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = json.loads(done.out)["rows"]
    assert {line["model"] for line in lines} == {"logistic", "ffm"}
    assert all(line["auc"] and line["peak_bytes"] > 1e8 for line in lines)
    assert all(line["dense_parameters"] > 0 < line["table_parameters"] for line in lines)
    assert "| ffm" in (tmp_path / "results/results.md").read_text()
    again = command("results", *given, cwd=tmp_path)
    assert again.out == done.out and "2 of 2 runs are complete already" in again.err
    kept = json.loads((tmp_path / "results/avazu/ffm/seed_1/result.json").read_text())
    assert kept["threads"] == 1
