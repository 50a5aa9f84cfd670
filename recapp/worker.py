"""The module that every rank runs: data, model, strategy, callbacks, trainer, fit, report.

    JOB/resolved.yaml.tmp -> run -> JOB/resolved.yaml, JOB/checkpoints/*.ckpt,
                                    JOB/metrics.json, JOB/csv

Evaluation and prediction leave the first and the last but one of these. `python -m recapp.train`
starts this module on every rank; under torchrun and srun it calls `run` in the rank's own process.
Hydra composes nothing here: the settings are plain values. Only rank 0 prints.
"""

from functools import partial
from pathlib import Path
from typing import Any

from recapp.app.rank_setup import leave_ranks, prepare_process, ranks_here, wants_bar
from recapp.processes.rank_environment import external_rank
from recapp.processes.stopping import Stopped
from recapp.reporting.record import update_settings


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train or, where the settings name a split, evaluate, or, where they name an input, predict;
    on rank 0 write `metrics.json` into the job directory.

    Args:
        settings: The settings, composed and resolved, with absolute paths.
        job_dir: The directory in which the run writes.

    Raises:
        RecappError: An error that a person can mend.
        Stopped: A signal has ended training, and what is left of it is written.
    """
    prepare_process(settings)
    from recapp.app.summary import report_end, report_prediction

    stopped = None
    if "input" in settings:
        if measured := predict(settings):
            report_prediction(settings, measured, job_dir)
        return leave_ranks(None)
    if "split" in settings:
        measured = evaluate(settings)
    else:
        measured, stopped = fit(settings, job_dir)
    if measured:
        report_end(settings, measured, job_dir, stopped)
    leave_ranks(stopped)


def fit(settings: dict[str, Any], job_dir: Path) -> tuple[dict[str, Any], Stopped | None]:
    """Train one model.

    Returns:
        On rank 0 what goes into `metrics.json`, on other ranks nothing; and the signal that has
        ended training early, or None.
    """
    from recapp.app import build_trainer, build_training
    from recapp.app.build_strategy import build_strategy
    from recapp.app.measured import metrics_of_run, note_no_validation, write_prediction
    from recapp.app.resume import catch_up, changed_optimizer, end_without_training
    from recapp.trainer.callbacks import (
        ClaimDirectory,
        KeepPosition,
        LogRate,
        StartReport,
        StepClock,
    )
    from recapp.trainer.dynamic_rows import LogDynamicRows
    from recapp.trainer.ending import EndTogether
    from recapp.trainer.keep_last import KeepLast
    from recapp.trainer.performance_recorder import RecordPerformance
    from recapp.trainer.progress import NoteEarlyStop, NoteFall, ProgressLines, TerminalProgress

    if (ended := end_without_training(settings)) is not None:
        return ended, None

    write_sizes = None if external_rank() else partial(update_settings, settings, job_dir)
    data = build_training.build_data(settings, write_sizes)
    module = build_training.build_module(settings)
    strategy = build_strategy(settings, training=True)

    loggers = build_trainer.build_loggers(settings, job_dir)
    chosen = build_trainer.build_callbacks(settings, job_dir / "checkpoints", logging=bool(loggers))
    clock = StepClock()
    last = KeepLast(job_dir / "checkpoints")
    end = EndTogether(
        lambda trainer: last.on_train_end(trainer, trainer.lightning_module),
        settings["launch"]["grace"],
    )
    performance = RecordPerformance(job_dir, clock)
    early_stop = NoteEarlyStop()
    progress = (
        TerminalProgress(clock)
        if wants_bar(settings)
        else ProgressLines(settings["trainer"]["log_every_n_steps"])
    )
    callbacks = [
        ClaimDirectory(job_dir),
        KeepPosition(),
        *changed_optimizer(settings),
        clock,
        performance,
        LogRate(clock),
        LogDynamicRows(),
        end,
        StartReport(
            settings["seed"],
            settings["format"] == "text",
            dense_columns=len(data.schema.dense),
            features=data.schema.sparse,
        ),
        *([] if build_trainer.has_bar(chosen) else [progress]),
        NoteFall(),
        early_stop,
        *chosen,
        last,
    ]
    trainer = build_trainer.build_trainer(
        settings, strategy, callbacks, loggers, ranks=ranks_here()
    )

    catch_up(trainer, settings)
    try:
        with build_trainer.in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=settings["ckpt_path"])
    except Stopped as stopped:
        if end.reason is None:  # stopped before the first step, or without the other ranks
            raise
        performance.on_train_end(trainer, module)
        measured = metrics_of_run(settings, trainer, clock, last, end.reason)
        how = {"status": "stopped", "last_checkpoint": str(last.path)}
        return measured and measured | how, stopped

    write_prediction(settings, strategy, data.val_rows, job_dir)
    note_no_validation(trainer, data.val_rows)
    return metrics_of_run(settings, trainer, clock, last, early_stop.reason), None


def evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a checkpoint.

    Returns:
        On rank 0 what goes into `metrics.json`, on other ranks nothing.
    """
    from recapp.app import build_trainer, build_training
    from recapp.app.build_strategy import build_strategy
    from recapp.trainer.progress import TerminalProgress

    data = build_training.build_data(settings)
    module = build_training.build_module(settings)
    strategy = build_strategy(settings, training=False)
    callbacks = [TerminalProgress()] if wants_bar(settings) else []
    trainer = build_trainer.build_trainer(settings, strategy, callbacks, [], ranks=ranks_here())

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


def predict(settings: dict[str, Any]) -> dict[str, Any]:
    """Score the rows of the input, and write the scores.

    Returns:
        On rank 0 what goes into `metrics.json`, on other ranks nothing.
    """
    from recapp.app import build_trainer, build_training
    from recapp.app.check_prediction import model_of, scoring_of
    from recapp.app.trained_model import model_on_ranks
    from recapp.trainer.progress import PredictProgress
    from recapp.trainer.score_writer import ScoreWriter

    data = build_training.build_data(settings, scoring=scoring_of(settings))
    model = model_on_ranks(settings)
    writer = ScoreWriter(
        settings["output"], overwrite=settings["overwrite"], model=model_of(settings)
    )
    progress = [PredictProgress()] if settings["trainer"]["enable_progress_bar"] else []
    trainer = build_trainer.build_trainer(
        settings, model.strategy, [*progress, *model.callbacks, writer], [], ranks=ranks_here()
    )
    with build_trainer.in_one_line():
        trainer.predict(
            model.module, datamodule=data, ckpt_path=model.ckpt_path, return_predictions=False
        )

    if model.strategy.comm.rank:
        return {}
    assert model.strategy.plan is not None and writer.joined is not None
    return {
        **writer.joined.measured(),
        "rows_scored": writer.rows,
        "seconds": writer.seconds,
        "rows_per_second": writer.rows / writer.seconds,
        "output": settings["output"],
        "checkpoint": settings["ckpt_path"],
        "ranks": model.strategy.comm.world,
        "plan": model.strategy.plan.name,
        "status": "ok",
    }
