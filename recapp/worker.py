"""The module that every rank runs: data, model, strategy, callbacks, trainer, fit, report.

    JOB/resolved.yaml.tmp -> run -> JOB/resolved.yaml, JOB/checkpoints/*.ckpt,
                                    JOB/metrics.json, JOB/csv

Of these, evaluation and prediction write only `resolved.yaml` and `metrics.json`. `python -m
recapp.train` starts this module on every rank; under torchrun and srun it calls `run` in the rank's
own process. The settings are plain values, so ranks need no Hydra. Only rank 0 prints.
"""

from functools import partial
from pathlib import Path
from typing import Any

from recapp.app.rank_setup import leave_ranks, prepare_process, ranks_here, wants_bar
from recapp.processes.rank_environment import external_rank
from recapp.processes.stopping import Stopped
from recapp.recipe.commands import Eval, Predict
from recapp.recipe.read import recipe_of
from recapp.recipe.recipe import Train
from recapp.reporting.record import update_settings
from recapp.settings.records import to_plain


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train, evaluate or predict, and on rank 0 write `metrics.json` into the job directory.

    Settings with a split evaluate, and settings with an input predict.

    Args:
        settings: The settings, composed and resolved, with absolute paths.
        job_dir: The directory in which the run writes.

    Raises:
        RecappError: An error that the user can fix.
        Stopped: A signal has ended training. Its checkpoint and metrics are written.
    """
    command = "predict" if "input" in settings else "eval" if "split" in settings else "train"
    recipe = recipe_of(settings, command)
    prepare_process(recipe)
    from recapp.app.summary import report_end, report_prediction

    stopped = None
    if isinstance(recipe, Predict):
        if measured := predict(recipe):
            report_prediction(recipe, measured, job_dir)
        return leave_ranks(None)
    if isinstance(recipe, Eval):
        measured = evaluate(recipe)
    else:
        measured, stopped = fit(recipe, job_dir)
    if measured:
        report_end(recipe, measured, job_dir, stopped)
    leave_ranks(stopped)


def fit(recipe: Train, job_dir: Path) -> tuple[dict[str, Any], Stopped | None]:
    """Train one model.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks; and the signal that
        has ended training early, or None.
    """
    from recapp.app.measured import metrics_of_run, note_no_validation, write_prediction
    from recapp.app.resume import catch_up, changed_optimizer, end_without_training
    from recapp.recipe import lightning_trainer, training
    from recapp.recipe.model import build_model
    from recapp.recipe.strategy_of_run import build_strategy
    from recapp.trainer.callbacks import (
        ClaimDirectory,
        KeepPosition,
        LogDynamicRows,
        LogRate,
        StartReport,
        StepClock,
    )
    from recapp.trainer.ending import EndTogether
    from recapp.trainer.keep_last import KeepLast
    from recapp.trainer.performance_recorder import RecordPerformance
    from recapp.trainer.progress import NoteEarlyStop, NoteFall, ProgressLines, TerminalProgress

    if (ended := end_without_training(recipe)) is not None:
        return ended, None

    data = training.build_data(recipe, partial(_write_sizes, recipe, job_dir))
    sized = training.sized_by(recipe, data)
    module = training.build_module(recipe, lambda: build_model(sized()))
    strategy = build_strategy(recipe, training=True, sized=sized)

    loggers = lightning_trainer.build_loggers(recipe, job_dir)
    chosen = lightning_trainer.build_callbacks(
        recipe, job_dir / "checkpoints", logging=bool(loggers)
    )
    clock = StepClock()
    last = KeepLast(job_dir / "checkpoints")
    end = EndTogether(
        lambda trainer: last.on_train_end(trainer, trainer.lightning_module),
        recipe.launch.grace,
    )
    performance = RecordPerformance(job_dir, clock)
    early_stop = NoteEarlyStop()
    progress = (
        TerminalProgress(clock)
        if wants_bar(recipe)
        else ProgressLines(recipe.trainer.log_every_n_steps)
    )
    callbacks = [
        ClaimDirectory(job_dir, module.task.known_measures),
        KeepPosition(),
        *changed_optimizer(recipe),
        clock,
        performance,
        LogRate(clock),
        LogDynamicRows(),
        end,
        StartReport(
            recipe.seed,
            recipe.format == "text",
            dense_columns=len(data.schema.dense),
            features=data.schema.sparse,
        ),
        *([] if lightning_trainer.has_bar(chosen) else [progress]),
        NoteFall(),
        early_stop,
        *chosen,
        last,
    ]
    trainer = lightning_trainer.build_trainer(
        recipe, strategy, callbacks, loggers, ranks=ranks_here()
    )

    catch_up(trainer, recipe)
    try:
        with lightning_trainer.in_one_line():
            trainer.fit(module, datamodule=data, ckpt_path=recipe.ckpt_path)
    except Stopped as stopped:
        if end.reason is None:  # stopped before the first step, or without the other ranks
            raise
        performance.on_train_end(trainer, module)
        measured = metrics_of_run(sized(), trainer, clock, last, end.reason)
        how = {"status": "stopped", "last_checkpoint": str(last.path)}
        return measured and measured | how, stopped

    write_prediction(sized(), strategy, data.val_rows, job_dir)
    note_no_validation(trainer, data.val_rows)
    return metrics_of_run(sized(), trainer, clock, last, early_stop.reason), None


def _write_sizes(recipe: Train, job_dir: Path, table_rows: list[int]) -> None:
    """Write the sizes of tables that were found in the data into the settings of the run."""
    if not external_rank():
        update_settings(to_plain(recipe.sized(table_rows)), job_dir)


def evaluate(recipe: Eval) -> dict[str, Any]:
    """Measure a checkpoint.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks.
    """
    from recapp.recipe import lightning_trainer, training
    from recapp.recipe.model import build_model
    from recapp.recipe.strategy_of_run import build_strategy
    from recapp.trainer.progress import TerminalProgress

    data = training.build_data(recipe)
    module = training.build_module(recipe, partial(build_model, recipe))
    strategy = build_strategy(recipe, training=False)
    callbacks = [TerminalProgress()] if wants_bar(recipe) else []
    trainer = lightning_trainer.build_trainer(recipe, strategy, callbacks, [], ranks=ranks_here())

    measure = trainer.validate if recipe.split == "val" else trainer.test
    with lightning_trainer.in_one_line():
        results = measure(module, datamodule=data, ckpt_path=recipe.ckpt_path, verbose=False)

    if strategy.comm.rank:
        return {}
    assert strategy.plan is not None
    return {name: float(value) for name, value in results[0].items()} | {
        "checkpoint": recipe.ckpt_path,
        "split": recipe.split,
        "ranks": strategy.comm.world,
        "plan": strategy.plan.name,
        "status": "ok",
    }


def predict(recipe: Predict) -> dict[str, Any]:
    """Score the rows of the input, and write the scores.

    Returns:
        The content of `metrics.json` on rank 0, an empty dict on other ranks.
    """
    from recapp.app.check_prediction import model_of
    from recapp.app.trained_model import model_on_ranks
    from recapp.recipe import lightning_trainer, training
    from recapp.trainer.progress import PredictProgress
    from recapp.trainer.score_writer import ScoreWriter

    assert recipe.ckpt_path is not None and recipe.output is not None
    data = training.build_data(recipe, scoring=recipe)
    model = model_on_ranks(recipe)
    writer = ScoreWriter(recipe.output, overwrite=recipe.overwrite, model=model_of(recipe))
    progress = [PredictProgress()] if recipe.trainer.enable_progress_bar else []
    trainer = lightning_trainer.build_trainer(
        recipe, model.strategy, [*progress, *model.callbacks, writer], [], ranks=ranks_here()
    )
    with lightning_trainer.in_one_line():
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
        "output": recipe.output,
        "checkpoint": recipe.ckpt_path,
        "ranks": model.strategy.comm.world,
        "plan": model.strategy.plan.name,
        "status": "ok",
    }
