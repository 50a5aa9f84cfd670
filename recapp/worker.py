"""What every rank runs: data, model, strategy, callbacks, trainer, fit, report.

    JOB/resolved.yaml.tmp -> run -> JOB/resolved.yaml, JOB/checkpoints/*.ckpt,
                                    JOB/metrics.json, JOB/csv

`python -m recapp.train` starts this module on every rank; under torchrun and srun it calls `run` in
place. Hydra composes nothing here: the settings are plain. Rank 0 speaks.
"""

from functools import partial
from pathlib import Path
from typing import Any

from recapp.app.rank_setup import leave_ranks, prepare_process, ranks_here, wants_bar
from recapp.processes.rank_environment import rank_info
from recapp.processes.rank_process import rank_main
from recapp.processes.stopping import Stopped
from recapp.reporting.record import update_settings


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train or, where the settings name a split, evaluate; on rank 0 leave `metrics.json` in the
    job directory.

    Args:
        settings: Composed and resolved, paths absolute.
        job_dir: Where the run writes.

    Raises:
        RecappError: What a person can mend.
        Stopped: A signal has ended training, and all that is left of it is written.
    """
    prepare_process(settings)
    from recapp.app.summary import report_end

    stopped = None
    if "split" in settings:
        measured = evaluate(settings)
    else:
        measured, stopped = fit(settings, job_dir)
    if measured:
        report_end(settings, measured, job_dir, stopped)
    leave_ranks(stopped)


def fit(settings: dict[str, Any], job_dir: Path) -> tuple[dict[str, Any], Stopped | None]:
    """Train.

    Returns:
        On rank 0 what goes into `metrics.json`, elsewhere nothing; and the signal that has ended
        training before its time.
    """
    from recapp.app import build, build_trainer
    from recapp.app.build_strategy import build_strategy
    from recapp.app.measured import metrics_of_run, note_no_validation, write_prediction
    from recapp.app.resume import changed_optimizer, end_without_training, limit_reached
    from recapp.trainer import callbacks as own
    from recapp.trainer.ending import EndTogether
    from recapp.trainer.keep_last import KeepLast
    from recapp.trainer.performance_recorder import RecordPerformance
    from recapp.trainer.progress import NoteEarlyStop, NoteFall, ProgressLines, TerminalProgress

    if reached := limit_reached(settings):
        return end_without_training(settings, reached), None

    here = rank_info()
    keep = None if here and here.rank else partial(update_settings, settings, job_dir)
    data = build.build_data(settings, keep)
    module = build.build_module(settings)
    strategy = build_strategy(settings, training=True)

    loggers = build_trainer.build_loggers(settings, job_dir)
    chosen = build_trainer.build_callbacks(settings, job_dir / "checkpoints", logging=bool(loggers))
    clock = own.StepClock()
    last = KeepLast(job_dir / "checkpoints")
    end = EndTogether(
        lambda trainer: last.on_train_end(trainer, trainer.lightning_module),
        settings["launch"]["grace"],
    )
    performance = RecordPerformance(job_dir, clock)
    ended = NoteEarlyStop()
    lines = ProgressLines(settings["trainer"]["log_every_n_steps"])
    callbacks = [
        own.ClaimDirectory(job_dir),
        own.KeepPosition(),
        *changed_optimizer(settings),
        clock,
        performance,
        own.LogRate(clock),
        end,
        own.StartReport(
            settings["seed"], settings["format"] == "text", dense_columns=len(data.schema.dense)
        ),
        *(
            []
            if build_trainer.has_bar(chosen)
            else [TerminalProgress(clock) if wants_bar(settings) else lines]
        ),
        NoteFall(),
        ended,
        *chosen,
        last,
    ]
    trainer = build_trainer.build_trainer(
        settings, strategy, callbacks, loggers, ranks=ranks_here()
    )

    try:
        with build_trainer.in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=settings["ckpt_path"])
    except Stopped as stopped:
        if end.reason is None:  # before the first step, or without the other ranks
            raise
        performance.on_train_end(trainer, module)
        measured = metrics_of_run(settings, trainer, clock, last, end.reason)
        how = {"status": "stopped", "last_checkpoint": str(last.path)}
        return measured and measured | how, stopped

    write_prediction(settings, strategy, data.val_rows, job_dir)
    note_no_validation(trainer, data.val_rows)
    return metrics_of_run(settings, trainer, clock, last, ended.reason), None


def evaluate(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a checkpoint.

    Returns:
        On rank 0 what goes into `metrics.json`, elsewhere nothing.
    """
    from recapp.app import build, build_trainer
    from recapp.app.build_strategy import build_strategy
    from recapp.trainer.progress import TerminalProgress

    data = build.build_data(settings)
    module = build.build_module(settings)
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


if __name__ == "__main__":
    rank_main(run)
