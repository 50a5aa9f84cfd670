"""What a run says while it runs: lines where no terminal has a bar."""

import csv
import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from trainer.runs import compose, fit

from recapp.settings.records import Constructor
from recapp.tasks.task import ClickTask
from recapp.trainer.curves import ProgressLines
from recapp.trainer.module import TaskModule


@pytest.fixture(scope="module")
def two_epochs(logs, tmp_path_factory):
    """The settings of two epochs of 37 steps, a validation every 30 and at the end; and where they
    run.
    """
    return compose(
        logs, "trainer.max_epochs=2", "trainer.val_check_interval=30", "dataset.batch_size=48"
    ), tmp_path_factory.mktemp("run")


def test_lines_count_the_steps_whose_seconds_they_tell(two_epochs, capsys):
    fit(*two_epochs, ProgressLines(every=16))
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("step")]
    pattern = r"step (\d+)/74, \d+\.\d\d s for (\d+) steps, loss 0\.\d{4}, lr 0\.001, auc 0\.\d{4}"
    steps = [re.fullmatch(pattern, line) for line in lines]
    assert [tuple(map(int, found.groups())) for found in steps if found] == [
        (16, 16),
        (32, 2),
        (48, 16),
        (64, 4),
    ]
    assert len([line for line in lines if ", validation: AUC " in line]) == len(lines) - 4 == 3


class Readings(Callback):
    """The AUC of the epoch so far at every step, as text."""

    def __init__(self):
        self.auc = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.auc[trainer.global_step] = f"{pl_module.train_metrics['auc'].compute():.4f}"


@pytest.mark.full
def test_the_auc_that_is_told_is_that_of_the_epoch_up_to_this_step(two_epochs, capsys):
    readings = Readings()
    fit(*two_epochs, readings, ProgressLines(every=13))
    found = re.findall(r"step (\d+)/74, .* auc (0\.\d{4})", capsys.readouterr().err)
    assert found == [(str(step), readings.auc[step]) for step in (13, 26, 39, 52, 65)]


def test_the_curve_has_an_auc_at_every_point_also_in_the_second_epoch(two_epochs, tmp_path):
    config, _ = two_epochs
    readings = Readings()
    fit(
        replace(config, logger={"csv": Constructor("recapp.trainer.curves.CSVCurves")}),
        tmp_path,
        readings,
    )
    with open(tmp_path / "csv/metrics.csv") as file:
        found = [
            (int(row["step"]) + 1, f"{float(row['train_auc']):.4f}")
            for row in csv.DictReader(file)
            if row["train_auc"]
        ]
    assert found == [(step, readings.auc[step]) for step in (20, 40, 60, 74)]


def asked_by_rank_0_alone(comm):
    """The running training AUC, which is shown by rank 0; the other rank does something else
    meanwhile.
    """
    module = TaskModule(ClickTask(), lambda: None, lambda parameters: None)
    module.train_metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))
    auc = module.running().get("auc") if comm.rank == 0 else None
    comm.barrier()
    return auc


def test_the_running_auc_needs_no_other_rank(ranks):
    assert ranks.run(asked_by_rank_0_alone, 2) == [1.0, None]
