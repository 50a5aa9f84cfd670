"""The measurements of a run, and the prediction for it, in the run's directory."""

from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch import Trainer

from recapp.console import note
from recapp.planner.problem import dense_weights
from recapp.planner.rank_memory import bytes_per_rank
from recapp.reporting.about import about
from recapp.reporting.plan_report import explained
from recapp.reporting.record import PREDICTED_FILE
from recapp.reporting.run_record import write_record
from recapp.run.plan_of_run import problem_of_run
from recapp.run.recipe import Train
from recapp.run.run_callbacks import RunCallbacks
from recapp.run.run_rows import score_of_click_model
from recapp.stored.checkpoint import read_manifest
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.progress import steps_planned
from recapp.trainer.strategy import EmbeddingShardingStrategy


def metrics_of_run(
    recipe: Train, trainer: Trainer, callbacks: RunCallbacks, stopped: str | None
) -> dict[str, Any]:
    """Return the content of `metrics.json`: the validation metrics of the checkpoint that the
    summary names, and the costs of a step over all ranks.

    This is a collective call. Ranks other than 0 return an empty dict.

    Args:
        recipe: The recipe of the run.
        trainer: The trainer of the run.
        callbacks: The callbacks of the run, which measured the steps and kept the checkpoints.
        stopped: The reason why training ended early, or None.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, EmbeddingShardingStrategy)
    measured = callbacks.clock.summary()
    sent = strategy.comm.all_gather(measured.get("bytes_sent_per_step", 0.0))
    cpu = sum(strategy.comm.all_gather(measured.get("cpu_seconds_per_sample", 0.0)))
    waits = [
        strategy.comm.all_gather(measured.get(name))
        for name in ("input_wait_ms", "exchange_wait_ms")
    ]
    shares = strategy.comm.all_gather(strategy.hidden_share() if strategy.comm.world > 1 else {})
    changed = strategy.comm.all_gather(
        sum(n for c in strategy.sharded_tables() for n in c.state.id_rules.changed.values())
    )
    if strategy.comm.rank:
        return {}
    data = datamodule_of(trainer)
    assert strategy.plan is not None
    best = callbacks.last.best_or_last(trainer)
    best_metric = recipe.built_task.best
    manifest = read_manifest(best)
    tables = [t for c in strategy.sharded_tables() for t in c.tables()]
    averaged = any(shared.keeps_average for shared in strategy.sharded_tables())
    held = [r.total for r in bytes_per_rank(tables, strategy.plan, strategy.rule, averaged)]
    description = about(
        recipe.dataset,
        recipe.model.target,
        recipe.trainer.precision,
        rows=data.rows,
        rows_read=data.rows_read(),
        hosts=[rank["host"] for rank in strategy.ranks],
        tables=tables,
        device=strategy.ranks[0]["device"],
    )
    return manifest.metrics | {
        "samples_per_second": measured.get("samples_per_second"),
        "samples_per_cpu_second": 1 / cpu if cpu else None,
        "step_ms": measured.get("step_ms"),
        "step_ms_quartiles": measured.get("step_ms_quartiles"),
        "train_seconds": measured.get("train_seconds"),
        **callbacks.clock.start,
        "steps": trainer.global_step,
        "steps_planned": steps_planned(trainer),
        "ranks": strategy.comm.world,
        "plan": strategy.plan.name,
        "checkpoint": best,
        "checkpoint_step": manifest.step,
        "stopped": stopped,
        "run": manifest.run,
        "seed": recipe.seed,
        "bytes_per_rank": max(held),
        "bytes_by_rank": held,
        "bytes_exchanged_per_step": sum(sent),
        "collectives_per_step": measured.get("collectives_per_step"),
        "input_wait_ms": None if None in waits[0] else mean(waits[0]),
        "exchange_wait_ms": None if None in waits[1] else mean(waits[1]),
        "ids_changed": sum(changed),
        **{f"hidden_share_{phase}": mean(rank[phase] for rank in shares) for phase in shares[0]},
        f"hidden_model_{best_metric}": score_of_click_model(
            recipe.dataset, recipe.trainer.limit_val_batches, data.val_rows, best_metric
        ),
        **description,
        "dense_parameters": dense_weights(strategy.problem.dense) if strategy.problem else None,
        "status": "ok",
    }


def write_prediction(
    recipe: Train, strategy: EmbeddingShardingStrategy, val_rows: int, job_dir: Path
) -> None:
    """Write the planner's prediction for this plan next to the measurements, on rank 0."""
    if strategy.problem is not None and strategy.plan is not None and strategy.sharded_tables():
        problem = problem_of_run(recipe, strategy.problem, val_rows=val_rows)
        report = explained(strategy.plan, problem, alternatives=False)
        write_record(report, job_dir / PREDICTED_FILE)


def note_no_validation(trainer: Trainer, val_rows: int) -> None:
    """Print on rank 0 that the run ended before its first validation, if there are rows for one."""
    if not (trainer.is_global_zero and val_rows and trainer.limit_val_batches):
        return
    if not any(name.startswith("val_") for name in trainer.callback_metrics):
        note(
            "no validation came before the end, so there are no metrics, and last.ckpt is the "
            "only checkpoint: see trainer.check_val_every_n_epoch, trainer.val_check_interval and "
            "trainer.min_epochs"
        )
