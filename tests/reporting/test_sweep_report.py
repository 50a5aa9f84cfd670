"""The report of a sweep, made from directories that somebody left: figures, seeds, failures, what is missing."""

import json
import re
from pathlib import Path

import pytest
import yaml
from recapp.reporting.strategies import Interval, read_runs, strategies_of
from recapp.reporting.sweep_figures import TITLES
from reporting.pages import opened, parts

from recapp import report
from recapp.errors import ConfigError
from recapp.reporting.phases import PHASES
from recapp.reporting.sweep_report import write_report

PLANS = {"row_wise": 9.0, "table_wise": 12.0}


def make_run(folder, plan, seed=1, step_ms=10.0, *, performance=True, predicted=True, curves=True, overrides=()):
    """What a training run leaves."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text(yaml.safe_dump([f"+plan={plan}", f"seed={seed}", *overrides]))
    (folder / "metrics.json").write_text(json.dumps({
        "plan": plan, "ranks": 2, "step_ms": step_ms, "samples_per_second": 1e6 / step_ms, "val_auc": 0.75 + seed / 1000,
        "val_log_loss": 0.5, "bytes_per_rank": 9 << 20, "bytes_exchanged_per_step": 12345.0, "status": "ok"}))
    if performance:
        memory = {"weights": 8 << 20, "state": 1 << 20, "buffers": 1 << 18, "rss": 1 << 29, "rss_peak": 1 << 30, "allocated": None,
                  "reserved": None, "allocated_peak": None}
        (folder / "performance.json").write_text(json.dumps({
            "batch_per_rank": 64, "ranks": 2, "steps": 30, "step_ms": step_ms, "memory": [memory, memory], "sent_bytes": [6000, 6345],
            "phases_ms": [dict.fromkeys(PHASES, step_ms / 6 * (0.9 + 0.2 * rank)) for rank in range(2)]}))
    if predicted:
        (folder / "predicted.json").write_text(json.dumps({"step_ms": 1.1 * step_ms, **{f"{p}_ms": 1.1 * step_ms / 6 for p in PHASES}}))
    if curves:
        (folder / "csv").mkdir()
        rows = [f"{step},{0.7 - step / 1000},{0.6 + step / 1000},," for step in (19, 39)] + [f"40,,,0.5,{0.75 + seed / 1000}"]
        (folder / "csv/metrics.csv").write_text("\n".join(["step,train_loss,train_auc,val_log_loss,val_auc", *rows]) + "\n")
    return folder


def make_sweep(folder, **options):
    """Two plans with two seeds each, and a job that failed."""
    folder.mkdir(exist_ok=True)
    asked = ["+plan=row_wise,table_wise,mixed", "seed=1,2"]
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": asked}}}))
    jobs = [(plan, seed) for plan in PLANS for seed in (1, 2)]
    for number, (plan, seed) in enumerate(jobs):
        make_run(folder / str(number), plan, seed, PLANS[plan] + seed, **options)
    broken = make_run(folder / "4", "mixed", 1)
    (broken / "error.json").write_text('{"error": "rank 1 failed: <boom>"}')
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = make_sweep(tmp_path_factory.mktemp("sweep") / "sweep")
    return folder, write_report(folder)


def test_the_report_has_every_figure_as_png_and_in_one_page(sweep):
    folder, made = sweep
    assert [row["what"] for row in made] == ["the page", *TITLES.values()] and [row["left_out"] for row in made] == [None] * 8
    assert sorted(path.name for path in folder.glob("*.png")) == sorted(f"{name}.png" for name in TITLES)
    assert all(Path(row["file"]).is_file() for row in made)
    found = parts(folder / "report.html")
    assert len(found.images) == len(TITLES)
    assert [title for title in TITLES.values() if title not in found.said] == []


def test_runs_that_differ_in_their_seed_are_one_strategy(sweep):
    folder, _ = sweep
    first, second = strategies_of(read_runs(folder))
    assert (first.label, second.label) == ("row_wise", "table_wise") and len(first.runs) == len(second.runs) == 2
    assert first.measure(lambda run: run.record["step_ms"]) == Interval((10.0, 11.0))
    said = parts(folder / "report.html").said
    assert "10.5 (10 to 11)" in said and "0.75150 (0.75100 to 0.75200)" in said
    assert any("Fastest: row_wise, 10.5 ms a step" in text for text in said)


def test_a_failed_job_is_told_with_its_error_and_has_no_part_in_the_pictures(sweep):
    folder, _ = sweep
    found = parts(folder / "report.html")
    assert "Job 4 (mixed) failed: rank 1 failed: <boom>" in found.said
    assert not any("mixed" in image["alt"] for image in found.images)


def test_alternative_texts_tell_the_numbers(sweep):
    folder, _ = sweep
    texts = " ".join(image["alt"] for image in parts(folder / "report.html").images)
    for number in ("row_wise 10.5 ms", "table_wise 13.5 ms", "row_wise 11 ms predicted, 10.5 ms measured (+5%)", "row_wise 0.75150"):
        assert number in texts, number


def test_a_browser_shows_every_figure_and_nothing_fails_to_load(sweep, tmp_path):
    found = opened(sweep[0] / "report.html", tmp_path)
    assert len(found["images"]) == len(TITLES) and all(width > 300 for _, width in found["images"])
    assert found["faults"] == [] and found["asked"] == [] and found["wide"] <= 1280
    assert found["headings"] == [*TITLES.values(), "In numbers"]


def test_a_figure_without_its_data_is_left_out_with_the_reason_and_its_old_picture_goes(tmp_path):
    folder = make_sweep(tmp_path / "sweep", performance=False, predicted=False, curves=False)
    (folder / "phases.png").write_bytes(b"old")
    left_out = {row["what"]: row["left_out"] for row in write_report(folder) if row["left_out"]}
    assert set(left_out) == {TITLES[name] for name in ("memory", "phases", "predicted", "curves")}
    assert "performance.json" in left_out[TITLES["phases"]] and "predicted.json" in left_out[TITLES["predicted"]]
    assert not (folder / "phases.png").exists()
    assert any("Left out: no run has a predicted.json" in text for text in parts(folder / "report.html").said)


def test_a_prediction_without_a_measurement_beside_it_draws_nothing(tmp_path):
    make_run(tmp_path / "run", "mixed", performance=False)
    assert next(row["left_out"] for row in write_report(tmp_path / "run") if row["what"] == TITLES["predicted"])


def test_a_sweep_in_which_every_job_failed_has_a_report_of_its_errors(tmp_path):
    for number in (0, 1):
        job = make_run(tmp_path / str(number), "mixed")
        (job / "error.json").write_text('{"error": "no memory"}')
    assert all(row["left_out"] == "no run has ended well" for row in write_report(tmp_path)[1:])
    assert sum("no memory" in text for text in parts(tmp_path / "report.html").said) >= 2


def test_other_settings_that_were_swept_make_strategies_of_their_own(tmp_path):
    asked = ["+plan=mixed", "seed=1", "dataset.batch_size=64,128"]
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": asked}}}))
    for number, size in enumerate((64, 128)):
        make_run(tmp_path / str(number), "mixed", overrides=[f"dataset.batch_size={size}"])
    assert [s.label for s in strategies_of(read_runs(tmp_path))] == ["mixed batch_size=64", "mixed batch_size=128"]


def test_the_command_makes_the_report_of_a_single_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", "mixed")
    assert report.main(["path=run", "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["file"] == str(tmp_path / "run/report.html") or rows[0]["file"] == "run/report.html"
    found = parts(tmp_path / "run/report.html")
    assert "Run with plan mixed" in found.said
    assert "rank 0" in next(image["alt"] for image in found.images if "update" in image["alt"])     # of one run, rank by rank
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]      # it makes no directory of its own


@pytest.mark.parametrize(("path", "told"), [
    ("nowhere", "error: path=nowhere: there is no such directory"),
    ("empty", "error: path=empty: no runs in it; name the directory of a run"),
])
def test_a_path_without_runs_is_one_line(tmp_path, capsys, monkeypatch, path, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert report.main([f"path={path}"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(f"{told}.*\n", captured.err)


def test_the_command_wants_a_path(capsys):
    assert report.main([]) == 1
    assert capsys.readouterr().err == "error: path must be given: path=...\n"


def test_a_file_is_no_directory_of_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no such directory"):
        read_runs(tmp_path / "file")
