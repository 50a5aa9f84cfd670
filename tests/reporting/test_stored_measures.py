"""What a run stores of its task is what its report and its sweep's comparison show."""

import json

from recapp.reporting.run_record import read_measures, write_measures
from recapp.reporting.runs import columns_of, compare, write_csv
from recapp.reporting.variants import Objective
from recapp.tasks.measures import Measure, Measures
from recapp.tasks.task import CLICK

OTHER = Measures((Measure("recall", "recall at 10", "max", shown=True),), "recall")


def job_of(sweep, number, measures, **metrics):
    job = sweep / str(number)
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra/overrides.yaml").write_text(f"- seed={number}\n")
    (job / "metrics.json").write_text(json.dumps({"status": "ok", "plan": "mixed", **metrics}))
    if measures is not None:
        write_measures(measures, job)
    return job


def test_a_run_that_has_stored_nothing_or_half_a_file_was_trained_for_clicks(tmp_path):
    job = job_of(tmp_path, 0, None)
    assert read_measures(job) == CLICK
    (job / "task.json").write_text('{"best": "recall", "metr')
    assert read_measures(job) == CLICK


def test_a_comparison_has_the_metrics_that_the_tasks_of_its_jobs_show(tmp_path):
    jobs = [
        job_of(tmp_path, 0, OTHER, val_recall=0.25, val_auc=0.5),
        job_of(tmp_path, 1, None),  # refused before it began
    ]
    runs = compare(tmp_path, jobs)
    lines = [run.flat() for run in runs]
    assert [line["val_recall"] for line in lines] == [0.25, None]
    assert "val_auc" not in lines[0] and lines[1]["seed"] == 1
    write_csv(runs, tmp_path / "comparison.csv")
    header = (tmp_path / "comparison.csv").read_text().splitlines()[0]
    assert ",train_seconds,val_recall,bytes_per_rank," in header and header.endswith(",error")
    titles = [column.title for column in columns_of(read_measures(*jobs))]
    assert "val recall at\n10" in titles and "val\nAUC" not in titles


def test_two_tasks_in_a_sweep_show_the_metrics_of_both(tmp_path):
    jobs = [job_of(tmp_path, 0, OTHER), job_of(tmp_path, 1, CLICK)]
    both = read_measures(*jobs)
    assert both.best == "recall" and both.shown == ("val_recall", "val_auc", "val_log_loss")


def test_titles_are_those_of_the_task():
    objective = Objective("val_recall", measures=OTHER)
    assert objective.title == "validation recall at 10"
    assert objective.named("train_loss").title == "train_loss"
