"""Runs that follow files, in this process. Each row has a number of its own, its dense value."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback
from trainer.runs import QUIET, composed

BATCH = 32
LANES = 4


def table(rows, first=0):
    """Rows with the numbers from `first` on; the clock of row n is 1000 - n."""
    numbers = np.arange(first, first + rows)
    columns = {"user": numbers % 13 + 1, "item": numbers * 7 % 5 + 1}
    labels = (columns["user"] + columns["item"]) % 3 == 0
    return pa.table(
        {
            "label": labels.astype(np.int64),
            "number": numbers.astype(np.float32),
            "clock": 100_000 - numbers,
            **columns,
        }
    )


def put(path, rows, first=0):
    """Write a file as a careful writer does: under a hidden name first."""
    hidden = path.with_name(f".{path.name}")
    pq.write_table(table(rows, first), hidden, row_group_size=50)
    os.replace(hidden, path)


def of_run(path):
    """The overrides of a run that follows a path until nothing comes."""
    return [
        "dataset=custom",
        f"dataset.path={path}",
        "dataset.follow=true",
        "dataset.follow_seconds=0.01",
        "dataset.follow_idle=0.1",
        "dataset.dense=[number]",
        "dataset.dense_transform=none",
        "dataset.sparse=[user,item]",
        "dataset.table_rows=[16,8]",
        f"dataset.batch_size={BATCH}",
        f"dataset.val_batch_size={BATCH}",
        f"dataset.lanes={LANES}",
        "dataset.shuffle_rows=16",
        "model.bottom_layers=[4,16]",
        "model.top_layers=[4,1]",
        *QUIET,
        "trainer.limit_val_batches=0",
    ]


def settings(path, *overrides):
    """The recipe of a run that follows a path."""
    return composed([*of_run(path), *overrides])


class Numbers(Callback):
    """The numbers of the rows of each step, in their order; and what happens behind a step.

    Args:
        events: From the number of a step in this run to a function that is called behind it.
    """

    def __init__(self, events=None):
        self.steps = []
        self.losses = []
        self.events = events or {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(batch.dense_BI[:, 0].long().tolist())
        self.losses.append(float(outputs["loss"]))
        if event := self.events.get(len(self.steps)):
            event()
