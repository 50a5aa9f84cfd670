"""Small training runs in this process, on one rank, through the same parts as the command:
settings, build, strategy, callbacks.
"""

import logging
from pathlib import Path

import composing
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from recapp.cli.compose import to_plain as without_references
from recapp.dataset.data_settings import Generate
from recapp.dataset.synthetic import write_clicks
from recapp.run import training
from recapp.run.model import build_model
from recapp.run.recipe import read_settings
from recapp.run.training import build_strategy
from recapp.settings.records import to_plain
from recapp.stored.stored_model import read_manifest
from recapp.trainer import callbacks as own
from recapp.trainer.followed_data import MeasureFiles
from recapp.trainer.keep_checkpoints import EndTogether, KeepLast

STOP = 4
MORE = 3
QUIET = ("logger=none", "trainer.enable_progress_bar=false", "topology.reserve_bytes=0")
SCHEDULE = ("optimizer/schedule=warmup_poly", "optimizer.schedule.warmup_steps=10")

SIZES = (
    400,
    90,
    60,
    50,
    40,
    4,
    30,
    20,
    9,
    300,
    70,
    60,
    11,
    20,
    30,
    10,
    4,
    9,
    5,
    200,
    150,
    90,
    60,
    30,
    7,
    5,
)


def manifest_of(config):
    """The manifest of the checkpoint from which a run goes on; None without one."""
    return read_manifest(config.ckpt_path) if config.ckpt_path else None


def make_logs(path, rows=2100):
    """A tiny Criteo-shaped set."""
    write_clicks(path, Generate(rows=rows, seed=3), SIZES)
    return path


def on_logs(path):
    """Overrides of a run on the tiny set: 18 training batches of 96, lanes 8."""
    return [
        f"dataset.path={path}",
        "dataset.generate=null",
        f"dataset.table_rows=[{','.join(map(str, SIZES))}]",
        "dataset.batch_size=96",
        "dataset.val_batch_size=96",
        "dataset.lanes=8",
        "dataset.shuffle_rows=64",
        "model.bottom_layers=[8,16]",
        "model.top_layers=[8,1]",
        *QUIET,
    ]


def compose(path, *overrides):
    """The recipe of a run on the tiny set."""
    return composed([*on_logs(path), *overrides])


def composed(overrides):
    """The recipe of a training with these overrides."""
    config = composing.compose("train", overrides)
    OmegaConf.set_struct(config, False)
    config.pop("hydra")
    return read_settings(without_references(config), "train")


class Seen(Callback):
    """What was trained: a fingerprint of every batch, its loss and the rates used."""

    def __init__(self):
        self.batches = []
        self.losses = []
        self.rates = []
        self.validations = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append([g["lr"] for g in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(
            float(batch.dense_BI.double().sum()) + float(batch.sparse.values().clamp(min=0).sum())
        )
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(trainer.global_step)


def fit(config, folder, *extra, ckpt_path=None):
    """Train in this process; returns what was seen, the trainer and the module."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # as the worker has it
    seen = Seen()
    follows = config.dataset.follow
    last = KeepLast(Path(folder) / "checkpoints", each_epoch=follows)
    end = EndTogether(last.keep_unvalidated)
    resumed = manifest_of(config)
    strategy = build_strategy(config, training=True, resumed=resumed)
    loggers = training.build_loggers(config, Path(folder), resumed)
    clock = own.StepClock()
    callbacks = [
        own.ClaimDirectory(Path(folder)),
        own.KeepPosition(),
        *([MeasureFiles(clock)] if follows else []),
        clock,
        *training.average_of(config),
        end,
        seen,
        *extra,
        *training.build_callbacks(config, Path(folder) / "checkpoints", logging=bool(loggers)),
        last,
    ]
    trainer = training.build_trainer(config, strategy, callbacks, loggers)
    data = training.build_data(config, trains=True)
    sized = training.sized_by(config, data)
    module = training.build_module(config, lambda: build_model(sized()))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return seen, trainer, module


def fit_twice(logs, folder, first, then, change=lambda settings: None):
    """Train STOP steps by some settings and MORE by others; returns the rates of these steps, the
    optimiser at their end, the manifest between and the schedule, if there is one.

    Args:
        change: Changes the first plain settings in place, as they are stored.
    """
    before = compose(logs, f"trainer.max_steps={STOP}", *first)
    fit(before, folder / "first")
    last = folder / "first/checkpoints/last.ckpt"
    manifest = read_manifest(last)
    stored = to_plain(before)
    change(stored)
    now = compose(logs, f"trainer.max_steps={STOP + MORE}", *then)
    changed = training.changed_optimizer(stored["optimizer"], to_plain(now.optimizer))
    seen, trainer, _ = fit(now, folder / "then", changed, ckpt_path=last)
    assert len(seen.rates) == MORE
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    return seen.rates, trainer.optimizers[0], manifest, *schedules
