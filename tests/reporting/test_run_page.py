"""The page of a single run."""

import json
import re
from itertools import pairwise

import pytest
from reporting.pages import opened, parts
from reporting.sweeps import leave_pictures_unpainted, make_run

from recapp import report
from recapp.errors import ConfigError
from recapp.reporting.report_pages import write_report


@pytest.fixture
def unpainted(monkeypatch):
    leave_pictures_unpainted(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(
        tmp_path_factory.mktemp("single") / "run",
        plan="mixed",
        overrides=["+plan=mixed", "dataset.batch_size=128"],
        more={"stopped": "step 40/90: no gain"},
    )
    write_report(folder)
    return folder


def test_it_says_what_it_reached_and_compares_nothing(run):
    said = parts(run / "report.html").said
    assert "Training run of 40 steps" in said and "Validation AUC: 0.75000." in said
    assert f"{run}/checkpoints/step_000040.ckpt" in said
    assert set(pairwise(said)) >= {
        ("plan", "mixed, 2 ranks"),
        ("step, median", "10.0 ms"),
        ("stopped early", "step 40/90: no gain"),
    }
    assert not re.search("Fastest|strategy|Sweep|Varied", " ".join(said))


def test_its_pictures_go_rank_by_rank_and_a_table_has_the_plan_beside_them(run):
    found = parts(run / "report.html")
    for title in (
        "Validation AUC over steps",
        "Validation log loss over steps",
        "Where a step's time goes",
        "Memory",
    ):
        assert title in found.said
    texts = {image["alt"] for image in found.images}
    assert any("rank 1: input 1 ms" in text for text in texts)
    assert any("rank 1 10.0 MB, process at most 1.1 GB" in text for text in texts)
    rows = re.findall(r"<tr><td>(input|step)</td>(.*?)</tr>", (run / "report.html").read_text())
    cells = {name: re.findall(r">([^<]+)</td>", rest) for name, rest in rows}
    assert cells == {"input": ["1.0", "1.0", "+0%"], "step": ["10.0", "11.0", "+10%"]}


def test_the_settings_of_the_command_line_stand_as_they_were_typed(run):
    table = (run / "report.html").read_text().partition("Settings of the command line")[2]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", table)
    assert rows == [("plan", "mixed"), ("dataset.batch_size", "128")]


def test_its_foot_names_data_model_versions_host_and_date(run):
    said = parts(run / "report.html").said
    for text in (
        "/data/clicks",
        "rows train",
        "5142",
        "DLRM",
        "node7",
        "version torch",
        "2.13.0",
        "2026-11-22T10:06:00+00:00",
        str(run),
    ):
        assert text in said, text


@pytest.mark.full
def test_a_browser_shows_it_in_every_width(run, tmp_path):
    for width, found in zip(
        (400, 1280, 1920), opened(run / "report.html", tmp_path, 400, 1280, 1920), strict=True
    ):
        assert (
            found["wide"] <= width
            and found["faults"] == []
            and found["asked"] == []
            and len(found["images"]) == 4
        )
        assert found["columns"] == {400: 1, 1280: 2, 1920: 3}[width]


def test_a_run_that_failed_has_its_error_and_the_curves_so_far(unpainted, tmp_path):
    write_report(make_run(tmp_path / "run", error="rank 1: <boom>"))
    said = parts(tmp_path / "run/report.html").said
    assert (
        "Training run that failed" in said
        and "rank 1: <boom>" in said
        and "What a step costs" not in said
    )
    assert "Validation AUC over steps" in said and "Validation log loss over steps" in said


def test_one_reading_is_said_and_not_drawn(unpainted, tmp_path):
    folder = make_run(tmp_path / "run")
    header, *_ = (folder / "csv/metrics.csv").read_text().splitlines()
    rows = ["19,0.6,0.7,,", "19,,,0.5,0.75"]
    (folder / "csv/metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    write_report(folder)
    assert (
        "Left out: Validation AUC over steps: a curve needs two readings "
        "(trainer.val_check_interval); there is 0.75000 after step 20, 0.70000 after step 20."
    ) in parts(folder / "report.html").said


def test_a_run_that_was_stopped_and_could_say_so_has_its_results(unpainted, tmp_path):
    stop = {
        "status": "stopped",
        "stopped": "step 12: SIGTERM",
        "steps": 12,
        "checkpoint_step": 12,
    }
    folder = make_run(tmp_path / "run", more=stop | {"val_auc": None}, curves=False)
    write_report(folder)
    said = parts(folder / "report.html").said
    assert "Training run of 12 steps" in said and "step 12: SIGTERM" in said
    assert "No validation AUC was measured yet." in said
    assert "What a step costs" in said


def test_a_run_that_has_not_ended_has_a_page(unpainted, tmp_path):
    folder = make_run(tmp_path / "run", performance=False)
    (folder / "metrics.json").unlink()
    write_report(folder)
    assert "Training run that was stopped" in parts(folder / "report.html").said


def test_a_run_without_its_settings_has_a_page_of_what_is_known(unpainted, tmp_path):
    folder = make_run(tmp_path / "run", predicted=False)
    (folder / "resolved.yaml").unlink()
    write_report(folder)
    assert "Training run of 40 steps" in parts(folder / "report.html").said


def test_the_command_prints_the_name_of_the_page(unpainted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    assert report.main(["path=run"]) == 0
    assert capsys.readouterr().out.split() == ["file", "run/report.html"]
    # it makes no directory of its own
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


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
    write_report(folder)
    said = parts(folder / "report.html").said
    assert "Evaluation on test data" in said and "Test AUC: 0.68071." in said and "0.59667" in said
    assert "/runs/best.ckpt" in said and "mixed, 2 ranks" in said
    assert ("ckpt_path", "best.ckpt") in pairwise(said)
    text = " ".join(said)
    assert not re.search("None|Training|Left out|What a step costs|not recorded", text)


def test_an_evaluation_that_failed_is_shown_with_its_error(tmp_path):
    folder = evaluation(tmp_path / "eval")
    (folder / "resolved.yaml").unlink()
    (folder / "error.json").write_text('{"error": "no such checkpoint"}')
    write_report(folder)
    said = parts(folder / "report.html").said
    assert "Evaluation on test data that failed" in said and "no such checkpoint" in said


def test_a_prediction_has_no_page_and_that_is_said(tmp_path):
    folder = evaluation(tmp_path / "predict", rows=3, rows_scored=3, mean_score=0.5, status="ok")
    with pytest.raises(ConfigError, match="is the directory of a prediction, which has no page"):
        write_report(folder)
    assert not (folder / "report.html").exists()
