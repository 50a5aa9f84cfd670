"""The report of a sweep, made from directories that somebody left: what it says first, its figures,
what is missing.
"""

import json
import re
import warnings

import pytest
import yaml
from jobs import small
from reporting.pages import opened, parts
from reporting.sweeps import (
    leave_pictures_unpainted,
    make_run,
    make_sweep,
    optuna_sweep,
    plan_sweep,
    rate_sweep,
)

from recapp import report
from recapp.reporting import report_pages
from recapp.reporting.drawing import COLUMN
from recapp.reporting.report_pages import write_report
from recapp.reporting.runs import read_runs

COSTS = ("Speed", "Where a step's time goes", "Memory")
CURVES = ("Validation AUC over steps", "Validation log loss over steps")


@pytest.fixture
def unpainted(monkeypatch):
    leave_pictures_unpainted(monkeypatch)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = plan_sweep(tmp_path_factory.mktemp("plans") / "sweep")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    folder = rate_sweep(tmp_path_factory.mktemp("rates") / "sweep")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def optuna(tmp_path_factory):
    folder = optuna_sweep(tmp_path_factory.mktemp("optuna") / "sweep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(folder)
    return folder


@pytest.fixture(scope="module", params=["plans", "rates", "optuna"])
def any_sweep(request):
    return request.getfixturevalue(request.param)


def first_words(folder, n=5):
    """Return the first texts of a page's body."""
    said = [text.strip() for text in parts(folder / "report.html").said if text.strip()]
    return said[2 : 2 + n]  # after the title in head and the style


def test_a_sweep_of_rates_begins_with_the_best_and_what_was_varied(rates):
    title, best, varied, *_ = first_words(rates)
    assert title == "Sweep of 6 runs"
    assert best == (
        "Best: lr=0.01, validation AUC 0.72200 (mean of 2 seeds, 0.72000 to 0.72400); higher is "
        "better."
    )
    assert varied == "Varied: optimizer.dense.lr (0.001, 0.01, 0.1) and seed (1, 2)."
    said = parts(rates / "report.html").said
    assert "Best single run: job 3 (lr=0.01 seed=2), 0.72400." in said


def test_the_tables_mark_the_best(rates):
    text = (rates / "report.html").read_text()
    marked = re.findall(r'<tr class="best">(.*?)</tr>', text)
    assert len(marked) == 2  # among the variants and among the runs
    assert "★ best" in marked[0] and "0.72200" in marked[0] and "0.72400" in marked[1]
    ranked = re.findall(r'<td class="number">(0\.\d{5})</td><td>0\.(?:001|01|1)</td>', text)
    assert ranked == sorted(ranked, reverse=True) and len(ranked) == 3


@pytest.mark.parametrize(
    ("monitor", "mode", "best"),
    [
        ("val_log_loss", "min", "Best: lr=0.01, validation log loss 0.52800"),
        ("val_calibration", "max", "Best: lr=0.1, validation calibration 0.94500"),
        ("train_auc", "min", "Best: lr=0.001, train_auc 0.56950"),
    ],
)
def test_the_metric_is_the_one_that_checkpoints_are_chosen_by(
    unpainted, tmp_path, monitor, mode, best
):
    rate_sweep(tmp_path, settings={"callbacks": {"checkpoint": {"monitor": monitor, "mode": mode}}})
    for number in range(6):
        file = tmp_path / str(number) / "metrics.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"val_calibration": 0.9 + number / 100})
        )
    if monitor == "train_auc":  # of the curve: no metrics.json has it
        file = tmp_path / "0/csv/metrics.csv"
        file.write_text(re.sub(r"^39,([^,]*),([^,]+)", r"39,\1,0.5", file.read_text(), flags=re.M))
    write_report(tmp_path)
    assert first_words(tmp_path, 2)[1].startswith(best)


def test_seeds_that_overlap_make_the_order_noise(unpainted, tmp_path):
    rate_sweep(tmp_path, {0.001: (0.70, 0.73), 0.01: (0.71, 0.74), 0.1: (0.5, 0.5)})
    write_report(tmp_path)
    said = parts(tmp_path / "report.html").said
    assert any(
        "the runs of lr=0.01 and those of lr=0.001 overlap, so which of these is best is noise"
        in text
        for text in said
    )


def test_a_rate_does_not_change_speed_so_speed_is_not_compared(rates):
    said = " ".join(parts(rates / "report.html").said)
    assert "Fastest" not in said and "Slowest" not in said
    assert "Speed is not compared: the runs do not differ in anything that changes it." in said
    titles = ["Validation AUC by dense.lr", *CURVES, *COSTS]
    assert [said.index(title) for title in titles] == sorted(map(said.index, titles))
    assert "Left out" not in said.partition("Every run")[0]


def test_plans_learn_the_same_and_are_compared_by_speed(plans):
    title, answer, varied, same, fastest = first_words(plans)
    assert (
        title == "Sweep of 5 runs"
        and varied == "Varied: plan (row_wise, table_wise, mixed) and seed (1, 2)."
    )
    assert (
        answer
        == "All runs reach the same validation AUC: 0.75150 (mean of 2 seeds, 0.75100 to 0.75200)."
    )
    assert same == (
        "The plan does not change what is learned: runs that differ in nothing else have the same "
        "validation AUC."
    )
    assert (
        fastest
        == "Fastest: row_wise, 12,190 samples/s. Slowest: table_wise, 9,481 samples/s, 1.29 times "
        "fewer."
    )
    said = parts(plans / "report.html").said
    assert said.count(fastest) == 1 and not any("Left out:" in text for text in said)
    assert {"Validation AUC by seed", *CURVES, *COSTS} <= set(said)


def test_latency_and_throughput_stand_in_one_picture_with_the_spread_of_steps(plans):
    pictures = {image["alt"] for image in parts(plans / "report.html").images}
    (steps,) = [alt for alt in pictures if "samples/s" in alt]
    assert steps.startswith(
        "Bars: row_wise 12,190 (11,408 to 13,061) samples/s, 10.5 ms; table_wise 9,481 (8,964 to "
    )


def test_a_failed_job_is_listed_with_its_error_and_has_no_part_in_the_pictures(plans):
    found = parts(plans / "report.html")
    assert "Job 4 (mixed seed=1) failed: rank 1: <boom>" in found.said
    assert not any("mixed" in image["alt"] for image in found.images)


def test_jobs_that_failed_alike_are_listed_once(unpainted, tmp_path):
    make_sweep(
        tmp_path,
        ["seed=1,2,3"],
        [{"overrides": [f"seed={n}"], "error": "no memory" if n > 1 else None} for n in (1, 2, 3)],
    )
    write_report(tmp_path)
    said = parts(tmp_path / "report.html").said
    assert "Jobs 1 (seed=2), 2 (seed=3) failed: no memory" in said


def test_a_stopped_job_is_listed_and_not_compared(unpainted, tmp_path):
    jobs = [{"overrides": [f"tables.dim={n}"], "auc": 0.7 + n / 100} for n in (1, 2, 3)]
    make_sweep(
        tmp_path,
        ["tables.dim=1,2,3"],
        [*jobs[:2], jobs[2] | {"more": {"status": "stopped", "stopped": "step 12/40: SIGTERM"}}],
    )
    write_report(tmp_path)
    said = parts(tmp_path / "report.html").said
    assert any(text.startswith("Best: dim=2, validation AUC 0.72000") for text in said)
    # among all runs
    assert "Job 2 (dim=3) stopped: step 12/40: SIGTERM" in said and "0.73000" in said


def test_of_very_many_variants_the_pictures_show_the_fastest_and_nothing_warns(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(report_pages, "SHOWN_VARIANTS", 4)
    jobs = [
        {
            "overrides": [f"tables.dim={8 * n}", "+name=\u8ba1\u5212"],
            "auc": 0.5 + n / 1000,
            "step_ms": 10.0 + n,
            "curves": False,
            "performance": False,
            "predicted": False,
            "plan": "\u8ba1\u5212" if n % 2 else "mixed",
        }
        for n in range(1, 7)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(make_sweep(tmp_path, None, jobs))
    found = parts(tmp_path / "report.html")
    assert "The pictures show the fastest 4; the table has all runs." in found.said
    (steps,) = [image["alt"] for image in found.images if "samples/s" in image["alt"]]
    assert "dim=32 " in steps and "dim=40" not in steps and "48" in found.said


def test_names_of_an_optuna_sweep_are_what_differs(optuna):
    found = parts(optuna / "report.html")
    assert first_words(optuna, 3)[1:] == [
        "Best: dense.lr=0.00166 sparse.lr=0.0723 top_layers=[256,128,1], validation AUC 0.71100; "
        "higher is better.",
        "Varied: optimizer.dense.lr (8 values from 0.0004 to 0.0179), optimizer.sparse.lr (8 "
        "values from 0.005 to 0.08) "
        "and model.top_layers ([256,128,1], [64,1]).",
    ]
    curve = next(image["alt"] for image in found.images if image["alt"].startswith("Curves"))
    assert "dense.lr=0.0179 sparse.lr=0.08 top_layers=[256,128,1] 0.67900" in curve
    assert "…" not in "".join([*found.said, *(image["alt"] for image in found.images)])
    assert [run.name.count("=") for run in read_runs(optuna)] == [3] * 8
    # once, at the foot
    assert "dataset.generate.rows=6000, dataset.path=/data/clicks, trainer.devices=1" in found.said


@pytest.mark.full
def test_a_browser_shows_every_figure_and_nothing_reaches_out_of_the_window(any_sweep, tmp_path):
    for width, found in zip(
        (400, 1280, 1920), opened(any_sweep / "report.html", tmp_path, 400, 1280, 1920), strict=True
    ):
        assert (
            found["window"] == width
            and found["wide"] <= width
            and found["faults"] == []
            and found["asked"] == []
        )
        assert found["images"] and all(
            0.27 * width < shown <= width for _, shown in found["images"]
        )
        # pixels for points: letters of 9 points have 9 pixels
        assert all(shown >= 72 * COLUMN for _, shown in found["images"])
        # white patches, then the shadows
        assert {attached for _, attached in found["boxes"]} == {"local, local, scroll, scroll"}
        assert any(scrolls for scrolls, _ in found["boxes"]) or width > 400
        assert found["headings"] == ["What was learned", "What a step costs", "Every run"]
        assert found["columns"] == {400: 1, 1280: 2, 1920: 3}[width]


def test_a_figure_without_its_data_is_left_out_with_the_reason(unpainted, tmp_path):
    folder = plan_sweep(tmp_path / "sweep", performance=False, predicted=False, curves=False)
    write_report(folder)
    found = parts(folder / "report.html")
    missing = {text.split(": ")[1]: text for text in found.said if text.startswith("Left out: ")}
    assert set(missing) == {*CURVES, *COSTS[1:]} and len(found.images) == 2
    assert missing["Memory"].startswith("Left out: Memory: no run has a performance.json")


def test_a_sweep_in_which_every_job_failed_has_a_report_of_its_errors(tmp_path):
    make_sweep(
        tmp_path, None, [{"overrides": [f"seed={n}"], "error": f"no memory {n}"} for n in range(9)]
    )
    write_report(tmp_path)
    said = parts(tmp_path / "report.html").said
    assert "No run ended well." in said and "Job 4 (seed=4) failed: no memory 4" in said
    assert "Job 8 (seed=8) failed: no memory 8" in said


def test_the_foot_says_what_the_runs_were_made_with(rates):
    text = (rates / "report.html").read_text()
    foot = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text.partition("<footer>")[2]))
    assert foot == {
        "dataset": "/data/clicks",
        "rows train": "5142",
        "rows val": "858",
        "model": "DLRM",
        "precision": "32-true",
        "tables": "26",
        "table rows": "1221286",
        "plan": "automatic",
        "ranks": "2",
        "batch size": "128",
        "seed": "1, 2",
        "hosts": "node7",
        "device": "cpu",
        "date": "2026-11-22T10:06:00+00:00",
        "version lightning": "2.6.6",
        "version python": "3.11.7",
        "version recapp": "0.1.0",
        "version torch": "2.13.0",
        "same in all": "trainer.max_steps=40",
    }


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nowhere", "error: path=nowhere: there is no such directory"),
        ("empty", "error: path=empty: has no runs; name the directory of a run"),
    ],
)
def test_a_path_without_runs_is_one_line(tmp_path, capsys, monkeypatch, path, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert report.main([f"path={path}"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and re.fullmatch(f"{error}.*\n", captured.err)


def test_the_command_wants_a_path(capsys):
    assert report.main([]) == 1
    assert capsys.readouterr().err == "error: path must be given: path=...\n"


def test_the_command_makes_the_report_of_a_sweep(unpainted, tmp_path, capsys):
    make_sweep(
        tmp_path / "sweep",
        ["seed=1,2"],
        [{"overrides": [f"seed={n}"], "seed": n, "curves": False} for n in (1, 2)],
    )
    make_run(tmp_path / "sweep/notes")  # no job of it, but named like one
    assert report.main([f"path={tmp_path}/sweep", "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["file"] == str(tmp_path / "sweep/report.html")


@pytest.mark.full
def test_runs_of_two_plans_and_two_rates_make_a_report(jobs, tmp_path):
    said = [["+plan=table_wise"], ["+plan=row_wise"], ["+plan=row_wise", "optimizer.dense.lr=0.1"]]
    for number, overrides in enumerate(said):
        folder = tmp_path / "sweep" / str(number)
        jobs.train(
            folder,
            *small(tmp_path / "logs"),
            *overrides,
            "trainer.max_steps=20",
            "trainer.log_every_n_steps=5",
        )
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra/overrides.yaml").write_text(yaml.safe_dump(overrides))
    write_report(tmp_path / "sweep")
    found = parts(tmp_path / "sweep/report.html")
    assert not any("Left out:" in text for text in found.said)
    best, varied = first_words(tmp_path / "sweep", 3)[1:]
    assert best.startswith(("Best: lr=", "Best: defaults"))
    assert varied == "Varied: plan (table_wise, row_wise) and optimizer.dense.lr (default, 0.1)."
    assert any(text.startswith("The plan does not change what is learned") for text in found.said)
    assert {"rows train", "5142", "version torch"} <= set(found.said)
