"""What every rank runs: build, say what will happen, fit, end well, report.

    JOB/resolved.yaml.tmp -> run -> JOB/resolved.yaml, JOB/checkpoints/*.ckpt,
                                    JOB/metrics.json, JOB/csv

`python -m recapp.train` starts this module on every rank; under torchrun and srun it calls `run` in
place. Hydra composes nothing here: the settings are plain. Rank 0 speaks.
"""

import math
import os
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from recapp.console import note, print_table, short_path
from recapp.errors import TrainingError
from recapp.processes.rank_environment import rank_info
from recapp.processes.rank_process import rank_main
from recapp.processes.startup_and_exit import freeze_loaded_objects, loading
from recapp.processes.stopping import Stopped, disregard_signals
from recapp.reporting.record import update_settings, write_metrics

SPLITS = {"val": "validation", "test": "test"}


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train or, where the settings name a split, evaluate; on rank 0 leave `metrics.json` in the
    job directory.

    Args:
        settings: composed and resolved, paths absolute.
        job_dir: where the run writes.

    Raises:
        RecappError: what a person can mend.
        Stopped: a signal has ended training, and all that is left of it is written.
    """
    # before torch: else sums depend on how busy the machine is, and one seed gives two runs
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    with loading():
        import torch

        from recapp.app import build_trainer  # noqa: F401  (what the rest needs)
        from recapp.processes.process_memory import keep_freed_memory
        from recapp.transport.communicator import leave_process_group, wait_for_all

        _quiet(profiles="profiler" in settings["trainer"])
    freeze_loaded_objects()
    if settings["launch"].get("keep_freed_memory", True):
        keep_freed_memory()
    torch.set_float32_matmul_precision("high")
    metrics, stopped = (evaluate(settings), None) if "split" in settings else fit(settings, job_dir)
    if metrics:
        split = settings.get("split", "val")
        refuse_nan(metrics, split)
        metrics = write_metrics(metrics, job_dir)
        if unknown := [
            name for name in metrics.get("undefined", []) if name.startswith(f"{split}_")
        ]:
            note(
                f"{', '.join(unknown)} cannot be computed: the {SPLITS[split]} rows are of one "
                "class only; choose others with "
                f"dataset.{'test_path' if split == 'test' else 'val_share or dataset.val_path'}"
            )
        if settings["format"] == "text":
            print_summary(metrics, job_dir)
        if stopped is not None:
            note(
                "to go on: python -m recapp.train "
                f"ckpt_path={short_path(metrics['last_checkpoint'])}"
            )
    if stopped is not None:
        disregard_signals()
        wait_for_all()  # whoever has started the ranks ends the others as soon as one has left
    leave_process_group()
    if stopped is not None:
        raise stopped


def refuse_nan(metrics: dict[str, Any], split: str) -> None:
    """Raise TrainingError where the log loss is not a finite number: of any rows it is one, if the
    model's predictions are.
    """
    loss = metrics.get(f"{split}_log_loss")
    if loss is not None and not math.isfinite(loss):
        raise TrainingError(
            f"the {SPLITS[split]} log loss is {loss}: either no row was looked at, or the model's "
            "predictions are not "
            "finite; lower optimizer.sparse.lr and optimizer.dense.lr"
        )


def fit(settings: dict[str, Any], job_dir: Path) -> tuple[dict[str, Any], Stopped | None]:
    """Train; on rank 0 what goes into `metrics.json`, elsewhere nothing. And the signal that has
    ended it before its time.
    """
    from recapp.app import build, build_trainer
    from recapp.trainer import callbacks as own
    from recapp.trainer.ending import EndTogether
    from recapp.trainer.keep_last import KeepLast
    from recapp.trainer.performance_recorder import RecordPerformance
    from recapp.trainer.progress import MovingLine, PlainLines, TellFall, TellStop

    if setting := exhausted(settings):
        return _as_it_was(settings, setting), None
    bar = _bar(settings)
    loggers = build_trainer.build_loggers(settings, job_dir)
    clock = own.StepClock()
    last = KeepLast(job_dir / "checkpoints")
    end = EndTogether(
        lambda trainer: last.on_train_end(trainer, trainer.lightning_module),
        settings["launch"]["grace"],
    )
    performance = RecordPerformance(job_dir, clock)
    chosen = build_trainer.build_callbacks(settings, job_dir / "checkpoints", logging=bool(loggers))
    told = (
        []
        if build_trainer.has_bar(chosen)
        else [MovingLine(clock) if bar else PlainLines(settings["trainer"]["log_every_n_steps"])]
    )
    report = own.StartReport(settings["seed"], settings["format"] == "text")
    ended = TellStop()
    callbacks = [
        own.TakeOver(job_dir),
        own.KeepPosition(),
        *_changes(settings),
        clock,
        performance,
        own.LogRate(clock),
        end,
        report,
        *told,
        TellFall(),
        ended,
        *chosen,
        last,
    ]
    strategy = build.build_strategy(settings, training=True)
    trainer = build_trainer.build_trainer(
        settings, strategy, callbacks, loggers, ranks=ranks_here()
    )
    info = rank_info()
    keep = None if info and info.rank else partial(update_settings, settings, job_dir)
    module = build.build_module(settings)
    data = build.build_data(settings, keep)
    try:
        with build_trainer.in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=settings["ckpt_path"])
    except Stopped as stopped:
        if end.said is None:  # before the first step, or without the other ranks
            raise
        performance.on_train_end(trainer, module)
        measured = _measured(settings, trainer, clock, last, end.said)
        return measured and measured | {
            "status": "stopped",
            "last_checkpoint": str(last.path),
        }, stopped
    _predict(settings, strategy, data.val_rows, job_dir)
    if trainer.is_global_zero and data.val_rows and trainer.limit_val_batches:
        _tell_of_no_validation(trainer.callback_metrics)
    return _measured(settings, trainer, clock, last, ended.said), None


def _tell_of_no_validation(measured: Mapping[str, Any]) -> None:
    if not any(name.startswith("val_") for name in measured):
        note(
            "no validation came before the end, so there are no metrics, and last.ckpt is the "
            "only checkpoint: see "
            "trainer.check_val_every_n_epoch, trainer.val_check_interval and trainer.min_epochs"
        )


def _changes(settings: dict[str, Any]) -> list[Any]:
    """What takes the settings' own rates where a run goes on from a checkpoint of other ones."""
    from recapp.checkpoints.directory import read_manifest
    from recapp.trainer.changed_optimizer import ChangedOptimizer

    if not settings["ckpt_path"]:
        return []
    return [
        ChangedOptimizer(
            read_manifest(settings["ckpt_path"]).config.get("optimizer"), settings["optimizer"]
        )
    ]


def _predict(settings: dict[str, Any], strategy: Any, val_rows: int, job_dir: Path) -> None:
    """Leave beside what was measured what the planner expects of this plan; on rank 0."""
    from recapp.app.planning_problem import predicted
    from recapp.reporting.performance import write_predicted

    if strategy.planned_for is not None and strategy.collections():
        topology, statistics, dense = strategy.planned_for
        tables = [t for c in strategy.collections() for t in c.embedding_bag_configs()]
        write_predicted(
            predicted(
                settings,
                tables,
                strategy.plan,
                topology,
                strategy.rule,
                statistics,
                dense,
                val_rows,
            ),
            job_dir,
        )


def exhausted(settings: dict[str, Any]) -> str | None:
    """The setting that has been reached by the checkpoint to go on from; None where there is
    something to train.
    """
    from recapp.app.build_trainer import length
    from recapp.checkpoints.directory import read_manifest

    if not settings["ckpt_path"]:
        return None
    manifest = read_manifest(settings["ckpt_path"])
    epochs, steps = length(settings["trainer"])
    if 0 <= steps <= manifest.step:
        return f"trainer.max_steps={steps}"
    return f"trainer.max_epochs={epochs}" if 0 <= epochs <= manifest.position["epoch"] else None


def _as_it_was(settings: dict[str, Any], reached: str) -> dict[str, Any]:
    """Says that nothing is left to train; the checkpoint's own metrics stand."""
    from recapp.checkpoints.directory import read_manifest

    info = rank_info()
    path = settings["ckpt_path"]
    if info and info.rank:
        return {}
    manifest = read_manifest(path)
    steps = manifest.step
    position = manifest.position
    print(
        f"nothing is left to train: {short_path(path)} has {steps} steps behind it "
        f"({position['epoch']} epochs and {position['batches']} "
        f"batches) and {reached}; raise that to go on"
    )
    return manifest.metrics | {
        "samples_per_second": None,
        "step_ms": None,
        "steps": steps,
        "ranks": info.world if info else 1,
        "plan": manifest.plan.name,
        "checkpoint": path,
        "checkpoint_step": steps,
        "seed": settings["seed"],
        "status": "ok",
    }


def evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a checkpoint; on rank 0 what goes into `metrics.json`, elsewhere nothing."""
    from recapp.app import build, build_trainer
    from recapp.trainer.progress import MovingLine

    strategy = build.build_strategy(settings, training=False)
    trainer = build_trainer.build_trainer(
        settings, strategy, [MovingLine()] if _bar(settings) else [], [], ranks=ranks_here()
    )
    module = build.build_module(settings)
    data = build.build_data(settings)
    measure = trainer.validate if settings["split"] == "val" else trainer.test
    with build_trainer.in_one_line():
        results = measure(module, datamodule=data, ckpt_path=settings["ckpt_path"], verbose=False)
    if strategy.comm.rank:
        return {}
    assert strategy.plan is not None
    return {name: float(value) for name, value in results[0].items()} | {
        "checkpoint": settings["ckpt_path"],
        "split": settings["split"],
        "ranks": strategy.comm.world,
        "plan": strategy.plan.name,
        "status": "ok",
    }


def _bar(settings: dict[str, Any]) -> bool:
    """A progress bar wants a terminal; elsewhere there are lines."""
    return (
        bool(settings["trainer"]["enable_progress_bar"])
        and sys.stderr.isatty()
        and sys.stdout.isatty()
    )


def ranks_here() -> tuple[int, int]:
    """Ranks on this host and number of hosts, as whoever started the ranks says (torch elastic,
    torchrun, srun, a person).
    """
    info = rank_info()
    return (info.local_world, -(-info.world // info.local_world)) if info else (1, 1)


def _quiet(*, profiles: bool) -> None:
    """Silence what Lightning says to people who write loops, not to those who run this command; the
    report of a profiler stays.
    """
    import logging

    import lightning.pytorch  # noqa: F401  (it sets its loggers' levels when it is imported)

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if profiles:
        logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    # torch's, of a tree that Lightning walks
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")


def _measured(
    settings: dict[str, Any], trainer: Any, clock: Any, last: Any, stopped: str | None
) -> dict[str, Any]:
    """The validation metrics of the checkpoint that is named, and what the steps cost over all
    ranks.
    """
    from recapp.app.build import hidden_model_auc
    from recapp.checkpoints.directory import read_manifest
    from recapp.planner.rank_memory import bytes_per_rank
    from recapp.reporting.about import about
    from recapp.trainer.progress import steps_planned

    strategy = trainer.strategy
    measured = clock.summary()
    sent = strategy.comm.gather(measured.get("bytes_sent_per_step", 0.0))
    waits = [
        strategy.comm.gather(measured.get(name, 0.0))
        for name in ("input_wait_ms", "exchange_wait_ms")
    ]
    shares = strategy.comm.gather(strategy.hidden_share() if strategy.comm.world > 1 else {})
    changed = strategy.comm.gather(
        sum(n for c in strategy.collections() for n in c.id_rules.changed.values())
    )
    if strategy.comm.rank:
        return {}
    best = last.named(trainer)
    manifest = read_manifest(best)
    tables = [t for c in strategy.collections() for t in c.embedding_bag_configs()]
    held = [r.total for r in bytes_per_rank(tables, strategy.plan, strategy.rule)]
    told = about(
        settings,
        rows=trainer.datamodule.rows,
        hosts=[rank["host"] for rank in strategy.ranks],
        tables=tables,
        device=strategy.ranks[0]["device"],
    )
    return manifest.metrics | {
        "samples_per_second": measured.get("samples_per_second"),
        "step_ms": measured.get("step_ms"),
        "step_ms_quartiles": measured.get("step_ms_quartiles"),
        "steps": trainer.global_step,
        "steps_planned": steps_planned(trainer),
        "ranks": strategy.comm.world,
        "plan": strategy.plan.name,
        "checkpoint": best,
        "checkpoint_step": manifest.step,
        "stopped": stopped,
        "seed": settings["seed"],
        "bytes_per_rank": max(held),
        "bytes_by_rank": held,
        "bytes_exchanged_per_step": sum(sent),
        "collectives_per_step": measured.get("collectives_per_step"),
        "input_wait_ms": mean(waits[0]),
        "exchange_wait_ms": mean(waits[1]),
        "ids_changed": sum(changed),
        **{f"hidden_share_{phase}": mean(rank[phase] for rank in shares) for phase in shares[0]},
        "hidden_model_auc": hidden_model_auc(settings, trainer.datamodule.val_rows),
        **told,
        "status": "ok",
    }


def print_summary(metrics: dict[str, Any], job_dir: Path) -> None:
    """What a person wants to know at the end."""
    split = metrics.get("split", "val")
    shown = {
        "AUC": "auc",
        "log loss": "log_loss",
        "normalised entropy": "normalized_entropy",
        "calibration": "calibration",
    }
    rows = [
        {
            "what": f"{SPLITS[split]} {name}",
            "value": "undefined"
            if (value := metrics[f"{split}_{key}"]) is None
            else f"{value:.5f}",
        }
        for name, key in shown.items()
        if f"{split}_{key}" in metrics
    ]
    if metrics.get("hidden_model_auc"):
        rows += [
            {
                "what": "AUC of the model that drew the labels",
                "value": f"{metrics['hidden_model_auc']:.5f}",
            }
        ]
    rows += [
        {
            "what": "plan",
            "value": (
                f"{metrics['plan']}, {metrics['ranks']} rank{'s' if metrics['ranks'] > 1 else ''}"
            ),
        }
    ]
    if metrics.get("samples_per_second"):
        rows += [
            {"what": "samples/s, all ranks", "value": f"{metrics['samples_per_second']:,.0f}"},
            {"what": "step, median", "value": f"{metrics['step_ms']:.1f} ms"},
        ]
    hidden = {
        key.removeprefix("hidden_share_"): share
        for key, share in metrics.items()
        if key.startswith("hidden_share_")
    }
    if hidden:
        rows += [
            {
                "what": "exchange hidden",
                "value": ", ".join(f"{phase} {share:.0%}" for phase, share in hidden.items()),
            }
        ]
    if metrics.get("stopped"):
        rows += [
            {
                "what": "stopped" if metrics["status"] == "stopped" else "stopped early",
                "value": metrics["stopped"],
            }
        ]
    behind = metrics.get("checkpoint_step")
    steps = metrics.get("steps")
    of = f" (step {behind} of {steps})" if behind != steps else ""
    print()
    print_table(rows, title="Summary")
    print(
        f"\ncheckpoint  {short_path(metrics['checkpoint'])}{of}\nmetrics     "
        f"{short_path(job_dir / 'metrics.json')}",
        flush=True,
    )


if __name__ == "__main__":
    rank_main(run)
