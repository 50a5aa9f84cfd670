"""The page of a single run."""

import json
import re
from itertools import pairwise

import pytest
from reporting.pages import opened, parts
from reporting.sweeps import leave_pictures_unpainted, make_run

from recapp import report
from recapp.cli.command import default_settings
from recapp.errors import ConfigError
from recapp.reporting.report_pages import write_report

DEFAULTS = {
    "seed": 1,
    "dataset": {"path": "/data", "batch_size": 1024},
    "choices": {"model": "dlrm"},
    "callbacks": {},
}
SETTINGS = {
    "dataset": {"path": "/data", "batch_size": 128},
    "choices": {"model": "dlrm", "plan": "mixed"},
    "trainer": {"devices": 2},
    "callbacks": {},
}


@pytest.fixture
def unpainted(monkeypatch):
    leave_pictures_unpainted(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(
        tmp_path_factory.mktemp("single") / "run",
        plan="mixed",
        settings=SETTINGS,
        more={"stopped": "step 40/90: no gain"},
    )
    return folder, write_report(folder, lambda chosen: DEFAULTS)


def test_it_says_what_it_reached_and_compares_nothing(run):
    said = parts(run[0] / "report.html").said
    assert "Training run of 40 steps" in said and "Validation AUC: 0.75000." in said
    assert f"{run[0]}/checkpoints/step_000040.ckpt" in said
    assert set(pairwise(said)) >= {
        ("plan", "mixed, 2 ranks"),
        ("step, median", "10.0 ms"),
        ("stopped early", "step 40/90: no gain"),
        ("step, predicted by the planner", "11.0 ms (+10%)"),
    }
    assert not re.search("Fastest|strategy|Sweep|Varied", " ".join(said))


def test_its_pictures_go_rank_by_rank(run):
    folder, made = run
    assert [row["what"] for row in made] == [
        "the page",
        "Validation AUC over steps",
        "Validation log loss over steps",
        "Where a step's time goes",
        "Memory",
    ]
    assert {row["file"] for row in made} == {str(folder / "report.html")}
    found = parts(folder / "report.html")
    texts = {image["alt"] for image in found.images}
    assert any("rank 1: input 1 ms" in text for text in texts)
    assert any("rank 1 10.0 MB, process at most 1.1 GB" in text for text in texts)
    assert "Medians of each rank's phases" in found.said


def test_settings_that_differ_from_the_defaults_stand_with_both_values(run):
    table = (run[0] / "report.html").read_text().partition("Settings that differ")[2]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table)
    assert sorted(rows) == [
        ("dataset.batch_size", "128", "1024"),
        ("plan", "mixed", "-"),
        ("trainer.devices", "2", "-"),
    ]


def test_its_foot_names_data_model_versions_host_and_date(run):
    said = parts(run[0] / "report.html").said
    for text in (
        "/data/clicks",
        "5,142 to train on, 858 to validate on",
        "DLRM, 32-true",
        "26 of 1,221,286 rows",
        "node7 (cpu)",
        "recapp 0.1.0, torch 2.13.0, lightning 2.6.6, python 3.11.7",
        "2026-11-22 10:06:00+00:00",
        str(run[0]),
    ):
        assert text in said, text


@pytest.mark.full
def test_a_browser_shows_it_in_every_width(run, tmp_path):
    for width, found in zip(
        (400, 1280, 1920), opened(run[0] / "report.html", tmp_path, 400, 1280, 1920), strict=True
    ):
        assert (
            found["wide"] <= width
            and found["faults"] == []
            and found["asked"] == []
            and len(found["images"]) == 4
        )
        assert found["columns"] == {400: 1, 1280: 2, 1920: 3}[width]


def test_a_run_that_failed_has_its_error_and_the_curves_so_far(unpainted, tmp_path):
    made = write_report(make_run(tmp_path / "run", error="rank 1: <boom>"), lambda chosen: DEFAULTS)
    said = parts(tmp_path / "run/report.html").said
    assert (
        "Training run that failed" in said
        and "rank 1: <boom>" in said
        and "What a step costs" not in said
    )
    assert [row["what"] for row in made if row["file"]] == [
        "the page",
        "Validation AUC over steps",
        "Validation log loss over steps",
    ]


def test_one_reading_is_said_and_not_drawn(unpainted, tmp_path):
    folder = make_run(tmp_path / "run")
    header, *_ = (folder / "csv/metrics.csv").read_text().splitlines()
    rows = ["19,0.6,0.7,,", "19,,,0.5,0.75"]
    (folder / "csv/metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    made = write_report(folder, lambda chosen: DEFAULTS)
    (why,) = [row["left_out"] for row in made if row["what"] == "Validation AUC over steps"]
    assert why == (
        "a curve needs two readings (trainer.val_check_interval); there is validation AUC 0.75000 "
        "after step 20, 0.70000 after step 20"
    )


def test_a_run_that_was_stopped_and_could_say_so_has_its_results(unpainted, tmp_path):
    stop = {
        "status": "stopped",
        "stopped": "step 12: SIGTERM",
        "steps": 12,
        "steps_planned": 835,
        "checkpoint_step": 12,
    }
    folder = make_run(tmp_path / "run", more=stop | {"val_auc": None}, curves=False)
    write_report(folder, lambda chosen: DEFAULTS)
    said = parts(folder / "report.html").said
    assert "Training run of 12 steps" in said and "step 12: SIGTERM" in said
    assert "No validation AUC was measured yet." in said
    assert "What a step costs" in said


def test_a_run_that_has_not_ended_has_a_page(unpainted, tmp_path):
    folder = make_run(tmp_path / "run", performance=False)
    (folder / "metrics.json").unlink()
    write_report(folder, lambda chosen: DEFAULTS)
    assert "Training run that was stopped" in parts(folder / "report.html").said


def test_a_run_without_its_settings_has_a_page_of_what_is_known(unpainted, tmp_path):
    folder = make_run(tmp_path / "run", predicted=False)
    (folder / "resolved.yaml").unlink()
    write_report(folder, lambda chosen: DEFAULTS)
    said = parts(folder / "report.html").said
    assert "Its settings were not left (resolved.yaml)." in said


def test_the_command_compares_with_the_defaults_of_training(
    unpainted, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", settings={"dataset": {"batch_size": 96}})
    assert report.main(["path=run", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["file"] == "run/report.html"
    page = (tmp_path / "run/report.html").read_text()
    assert re.search(r"<td[^>]*>dataset.batch_size</td><td[^>]*>96</td><td[^>]*>1024</td>", page)
    # it makes no directory of its own
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_option_of_a_group_is_one_row_and_what_its_file_does_not_say_others(
    unpainted, tmp_path, capsys
):
    chosen = default_settings({"plan": "mixed", "optimizer": "adam"})
    chosen["plan"]["column_width"] = 32
    chosen["plan"]["rules"] = [{"type": "row_wise"}]
    folder = make_run(
        tmp_path / "run",
        plan="mixed",
        settings=chosen | {"callbacks": default_settings({})["callbacks"]},
    )
    assert report.main([f"path={folder}"]) == 0
    table = (folder / "report.html").read_text().partition("Settings that differ")[2]
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", table)
    ]
    shown = {name: (own, default) for name, own, default in (row for row in rows if len(row) == 3)}
    assert shown.pop("plan.rules")[0] == "[{type: row_wise}]"
    assert shown == {
        "plan": ("mixed", "-"),
        "optimizer": ("adam", "adam_rowwise_adagrad"),
        "plan.column_width": ("32", "64"),
    }


# ---- an evaluation


def evaluation(folder, **metrics):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text("split: test\nckpt_path: best.ckpt\n")
    (folder / ".hydra/overrides.yaml").write_text("[ckpt_path=best.ckpt]")
    (folder / "resolved.yaml").write_text(
        "{split: test, ckpt_path: /runs/best.ckpt, dataset: {path: /data, batch_size: 128}}"
    )
    if metrics:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_the_page_of_an_evaluation_says_what_was_measured_of_which_checkpoint(tmp_path):
    measured = {
        "test_auc": 0.68071,
        "test_log_loss": 0.59667,
        "checkpoint": "/runs/best.ckpt",
        "split": "test",
        "ranks": 2,
        "plan": "mixed",
        "status": "ok",
    }
    folder = evaluation(tmp_path / "eval", **measured)
    made = write_report(folder, lambda chosen: DEFAULTS)
    said = parts(folder / "report.html").said
    assert [row["what"] for row in made] == ["the page"]  # no picture was left out: there is none
    assert "Evaluation on test data" in said and "Test AUC: 0.68071." in said and "0.59667" in said
    assert "/runs/best.ckpt" in said and "mixed, 2 ranks" in said
    assert "dataset.batch_size" in said and "ckpt_path" not in said and "split" not in said
    text = " ".join(said)
    assert not re.search("None|Training|Left out|What a step costs|not recorded", text)


def test_an_evaluation_that_failed_is_shown_with_its_error(tmp_path):
    folder = evaluation(tmp_path / "eval")
    (folder / "resolved.yaml").unlink()
    (folder / "error.json").write_text('{"error": "no such checkpoint"}')
    assert len(write_report(folder)) == 1
    said = parts(folder / "report.html").said
    assert "Evaluation on test data that failed" in said and "no such checkpoint" in said


def test_a_prediction_has_no_page_and_that_is_said(tmp_path):
    folder = evaluation(tmp_path / "predict", rows=3, rows_scored=3, mean_score=0.5, status="ok")
    with pytest.raises(ConfigError, match="is the directory of a prediction, which has no page"):
        write_report(folder)
    assert not (folder / "report.html").exists()


# ---- what the command prints


def test_names_of_files_are_whole_on_80_columns_beside_reasons_too(
    unpainted, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    make_run(tmp_path / "stopped", performance=False)
    assert report.main(["path=stopped"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any("stopped/report.html" in line for line in lines)
    assert any("left out: no run has a performance.json" in line for line in lines)
