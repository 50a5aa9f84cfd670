"""What every rank runs: build, say what will happen, fit, end well, report.

    JOB/resolved.yaml -> run -> JOB/checkpoints/*.ckpt, JOB/metrics.json, JOB/csv

`python -m recapp.train` starts this module on every rank; under torchrun and srun it calls `run` in place. Hydra composes nothing here:
the settings are plain. Rank 0 speaks.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from recapp.distributed.rank_process import rank_main


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Train as the settings say; on rank 0 leave `metrics.json` in the job directory.

    Args:
        settings: composed and resolved, paths absolute.
        job_dir: where the run writes.

    Raises:
        RecappError: what a person can mend.
    """
    import torch

    from recapp import build
    from recapp.trainer import callbacks as own

    _quiet()
    torch.set_float32_matmul_precision("high")
    bar = settings["trainer"]["enable_progress_bar"] and sys.stderr.isatty() and sys.stdout.isatty()
    loggers = build.build_loggers(settings, job_dir)
    clock, end, stop = own.StepClock(), own.EndWell(job_dir / "checkpoints"), own.StopTogether()
    signal.signal(signal.SIGTERM, lambda *_: setattr(stop, "asked", True))
    lines = [] if bar else [own.PlainProgress(settings["trainer"]["log_every_n_steps"])]
    report = own.StartReport(settings["seed"], settings["format"] == "text")
    callbacks = [own.KeepPosition(), clock, own.ShowRate(clock), stop, report, *lines,
                 *build.build_callbacks(settings, job_dir / "checkpoints", logging=bool(loggers)), end]
    strategy = build.build_strategy(settings, training=True)
    devices, nodes = ranks_here()
    trainer = build.build_trainer(settings, strategy, callbacks, loggers, devices=devices, nodes=nodes, bar=bar)
    module, data = build.build_module(settings), build.build_data(settings)
    trainer.fit(module, datamodule=data, ckpt_path=settings["ckpt_path"])
    _summarise(settings, job_dir, trainer, clock, end)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def ranks_here() -> tuple[int, int]:
    """Ranks on this host and number of hosts, as whoever started the ranks says (torch elastic, torchrun, srun)."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if here:
        return here, int(os.environ.get("GROUP_WORLD_SIZE") or int(os.environ["WORLD_SIZE"]) // here)
    if "SLURM_NTASKS" in os.environ and "SLURM_PROCID" in os.environ:
        nodes = int(os.environ.get("SLURM_NNODES") or os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return int(os.environ.get("WORLD_SIZE", 1)), 1


def _quiet() -> None:
    """Silence what Lightning says to people who write loops, not to those who run this command."""
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for text in (".*does not have many workers.*", ".*is not resumable.*", ".*`training_step` returned `None`.*", ".*exists and is not empty.*",
                 ".*isinstance.treespec, LeafSpec.*", ".*Checkpoint directory.*", ".*The number of training batches.*"):
        warnings.filterwarnings("ignore", text)


def _summarise(settings: dict[str, Any], job_dir: Path, trainer: Any, clock: Any, end: Any) -> None:
    """Write `metrics.json`: the validation metrics of the checkpoint it names, and what the steps cost over all ranks."""
    from recapp.checkpoints.directory import read_manifest
    from recapp.planner.memory import bytes_per_rank

    strategy = trainer.strategy
    measured = clock.summary()
    everyone = strategy.comm.gather(measured.get("bytes_sent_per_step", 0.0))
    changed = strategy.comm.gather([dict(c.id_rules.changed) for c in strategy.collections()])
    if strategy.comm.rank:
        return
    best = getattr(trainer.checkpoint_callback, "best_model_path", "") or end.saved or ""
    manifest = read_manifest(best) if best else None
    tables = [t for c in strategy.collections() for t in c.embedding_bag_configs()]
    held = [r.total for r in bytes_per_rank(tables, strategy.plan, strategy.rule)]
    metrics = (manifest.extra["metrics"] if manifest else {}) | {
        "samples_per_second": measured.get("samples_per_second"), "step_ms": measured.get("step_ms"), "steps": trainer.global_step,
        "ranks": strategy.comm.world, "plan": strategy.plan.name, "checkpoint": best, "seed": settings["seed"], "bytes_per_rank": max(held),
        "bytes_by_rank": held, "bytes_exchanged_per_step": sum(everyone), "collectives_per_step": measured.get("collectives_per_step"),
        "ids_changed": sum(n for rank in changed for c in rank for n in c.values()), "status": "ok"}
    (job_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    rank_main(run)
