"""Directories as runs and sweeps leave them, small and made by hand."""

import json

import yaml
from reporting.records import performance as performance_of
from reporting.records import plan_report

from recapp.reporting import drawing
from recapp.reporting.run_record import write_record

ABOUT = {
    "dataset": "/data/clicks",
    "rows_train": 5142,
    "rows_val": 858,
    "rows_read": {
        "splits": {
            "train": {
                "files": 3,
                "first": "/data/clicks/a.parquet",
                "last": "/data/clicks/c.parquet",
                "rows": 5142,
                "positives": {"bought": 0.25},
                "positives_of": 5142,
            }
        },
        "left_out": [{"why": "hidden", "count": 4, "names": ["_SUCCESS"]}],
    },
    "model": "DLRM",
    "tables": 26,
    "table_rows": 1_221_286,
    "batch_size": 128,
    "precision": "32-true",
    "hosts": ["node7"],
    "device": "cpu",
    "version_recapp": "0.1.0",
    "version_torch": "2.13.0",
    "version_lightning": "2.6.6",
    "version_python": "3.11.7",
    "date": "2026-11-22T10:06:00+00:00",
}


def make_run(
    folder,
    overrides=(),
    *,
    step_ms=10.0,
    spread=0.2,
    dense_ms=None,
    auc=0.75,
    plan="automatic",
    seed=1,
    ranks=2,
    batch=128,
    error=None,
    performance=True,
    predicted=True,
    curves=True,
    settings=None,
    more=None,
):
    """Write what a training run leaves in its directory.

    Args:
        folder: The directory; it is made.
        overrides: The settings of the command line.
        step_ms: The median of its steps; their middle half lies `spread` around it.
        dense_ms: The median of its dense phase; None: what the other phases leave of a step.
        auc: The validation AUC.
        error: Why it failed.
        performance, predicted, curves: Whether those files are there.
        settings: Entries of `resolved.yaml`, beside the monitored metric.
        more: Entries of `metrics.json`.
    """
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text(yaml.safe_dump([*overrides]))
    checkpoint = {"monitor": "val_auc", "mode": "max"}
    resolved = {"seed": seed, "callbacks": {"checkpoint": checkpoint}, **(settings or {})}
    (folder / "resolved.yaml").write_text(yaml.safe_dump(resolved))
    if error:
        (folder / "error.json").write_text(json.dumps({"error": error}))
    metrics = {
        "plan": plan,
        "ranks": ranks,
        "seed": seed,
        "steps": 40,
        "checkpoint": str(folder / "checkpoints/step_000040.ckpt"),
        "checkpoint_step": 40,
        "step_ms": step_ms,
        "samples_per_second": 1e6 / step_ms,
        "val_auc": auc,
        "val_log_loss": 1.25 - auc,
        "bytes_per_rank": 9 << 20,
        "bytes_exchanged_per_step": 12345.0 if ranks > 1 else 0.0,
        "status": "ok",
    }
    quartiles = [step_ms * (1 - spread), step_ms * (1 + spread)]
    metrics |= {"step_ms_quartiles": quartiles, **ABOUT, "batch_size": batch}
    (folder / "metrics.json").write_text(json.dumps(metrics | (more or {})))
    if performance:
        measured = performance_of(ranks=ranks, step_ms=step_ms, dense_ms=dense_ms)
        write_record(measured, folder / "performance.json")
    if predicted:
        report = plan_report(plan, ranks=ranks, step_ms=1.1 * step_ms)
        write_record(report, folder / "predicted.json")
    if curves:
        _write_curves(folder, auc)
    return folder


def _write_curves(folder, auc):
    (folder / "csv").mkdir()
    rows = [f"{s},{0.7 - s / 1000},{0.6 + s / 1000},," for s in (4, 9, 14, 19, 24, 29, 34, 39)]
    rows += [f"19,,,{1.27 - auc},{auc - 0.02}", f"39,,,{1.25 - auc},{auc}"]
    header = "step,train_loss,train_auc,val_log_loss,val_auc"
    (folder / "csv/metrics.csv").write_text("\n".join([header, *rows]) + "\n")


def make_sweep(folder, asked, jobs):
    """Write what a sweep leaves in its directory, and return the directory.

    Args:
        folder: The directory; it is made.
        asked: The settings of the command line; None for a sweeper that leaves no `multirun.yaml`.
        jobs: Keyword arguments of `make_run` for each job.
    """
    folder.mkdir(exist_ok=True)
    if asked is not None:
        said = {"hydra": {"overrides": {"task": list(asked)}}}
        (folder / "multirun.yaml").write_text(yaml.safe_dump(said))
    for number, job in enumerate(jobs):
        make_run(folder / str(number), **job)
    return folder


def plan_sweep(folder, **options):
    """Write a sweep of two plans with two seeds each, of equal metrics, and a job that failed."""
    jobs = [
        {"overrides": [f"+plan={plan}", f"seed={seed}"], "plan": plan, "seed": seed, **options}
        | {"step_ms": step + seed, "auc": 0.75 + seed / 1000, "spread": 0.02}
        for plan, step in (("row_wise", 9.0), ("table_wise", 12.0))
        for seed in (1, 2)
    ]
    broken = {"overrides": ["+plan=mixed", "seed=1"], "plan": "mixed", "error": "rank 1: <boom>"}
    return make_sweep(folder, ["+plan=row_wise,table_wise,mixed", "seed=1,2"], [*jobs, broken])


def rate_sweep(folder, aucs=None, **options):
    """Write a sweep of three learning rates with two seeds each."""
    aucs = aucs or {0.001: (0.700, 0.702), 0.01: (0.720, 0.724), 0.1: (0.610, 0.600)}
    jobs = [
        {"overrides": [f"optimizer.dense.lr={rate}", f"seed={seed}", "trainer.max_steps=40"]}
        | {"auc": auc, "seed": seed, "step_ms": 8 + 3 * seed, **options}
        for rate, both in aucs.items()
        for seed, auc in enumerate(both, 1)
    ]
    rates = ",".join(map(str, aucs))
    asked = [f"optimizer.dense.lr={rates}", "seed=1,2", "trainer.max_steps=40"]
    return make_sweep(folder, asked, jobs)


def optuna_sweep(folder):
    """Write a sweep as the Optuna sweeper leaves it: no multirun.yaml, every override in each job,
    one result.
    """
    tried = [(0.017891218701253233, 0.08001570418940839, "[256,128,1]", 0.679)]
    tried += [(0.0016568480259580225, 0.07229281498378627, "[256,128,1]", 0.711)]
    tried += [(0.0004 * 1.7**n, 0.005 * 1.4**n, "[64,1]", 0.66 + n / 1000) for n in range(6)]
    fixed = ["dataset.generate.rows=6000", "dataset.path=/data/clicks", "trainer.devices=1"]
    jobs = []
    for dense, sparse, layers, auc in tried:
        said = [f"optimizer.dense.lr={dense}", f"optimizer.sparse.lr={sparse}"]
        said += [f"model.top_layers={layers}", *fixed]
        jobs.append({"overrides": said, "auc": auc, "ranks": 1})
    make_sweep(folder, None, jobs)
    best = {"name": "optuna", "best_params": {"optimizer.dense.lr": 0.00165}, "best_value": 0.711}
    (folder / "optimization_results.yaml").write_text(yaml.safe_dump(best))
    return folder


def leave_pictures_unpainted(monkeypatch):
    """Have pictures made with their texts alone, as tests of texts need no drawing."""

    def finish(self, name, title, alt, caption):
        return drawing.Picture(name, title, alt, caption, "<svg></svg>")

    monkeypatch.setattr(drawing.Sheet, "finish", finish)
