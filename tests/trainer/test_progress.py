"""What a run says while it runs: a line that moves on a terminal, lines elsewhere."""

import csv
import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from trainer.runs import compose, fit

from recapp.settings.records import Constructor
from recapp.tasks.task import ClickTask
from recapp.trainer import curves
from recapp.trainer.callbacks import StepClock
from recapp.trainer.curves import ProgressLines, TerminalProgress
from recapp.trainer.module import TaskModule

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal(monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def drawn(capsys):
    """Every state of the moving line, and the lines above it."""
    return [
        line.rstrip()
        for line in re.split(r"[\r\n]+", CONTROL.sub("", capsys.readouterr().err))
        if line.strip()
    ]


@pytest.fixture(scope="module")
def two_epochs(logs, tmp_path_factory):
    """The settings of two epochs of 37 steps, a validation every 30 and at the end; and where they
    run.
    """
    return compose(
        logs, "trainer.max_epochs=2", "trainer.val_check_interval=30", "dataset.batch_size=48"
    ), tmp_path_factory.mktemp("run")


def test_the_line_fits_80_columns_and_has_loss_auc_and_rate(two_epochs, terminal, capsys):
    clock = StepClock()
    fit(*two_epochs, clock, TerminalProgress(clock))
    lines = drawn(capsys)
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(
        r"epoch 2 ━+ 74/74 \d:\d\d:\d\d loss 0\.\d{4} AUC 0\.\d{4} [\d,]+ samples/s", lines[-1]
    )
    found = [
        line
        for line in lines
        if re.fullmatch(r"step \d+/74, validation: AUC 0\.\d{4}, log loss 0\.\d{4}", line)
    ]
    assert [line.split(",")[0] for line in found] == ["step 30/74", "step 60/74", "step 74/74"]


def test_a_validation_under_way_has_a_line_below_and_then_none(two_epochs, terminal, capsys):
    kept = []

    class Slow(TerminalProgress):
        def on_validation_end(self, trainer, pl_module):
            kept.append([task.description for task in self._bar.tasks])
            super().on_validation_end(trainer, pl_module)

    line = Slow()
    fit(*two_epochs, line)
    assert kept[0] == ["epoch 1", "validation"] and kept[-1] == ["epoch 2", "validation"]
    assert [task.description for task in line._bar.tasks] == ["epoch 2"]


def test_going_on_starts_where_training_does(logs, tmp_path, terminal):
    fit(compose(logs, "trainer.max_steps=5"), tmp_path)
    started = []

    class First(TerminalProgress):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            started.append([(task.completed, task.total) for task in self._bar.tasks])

    fit(
        compose(logs, "trainer.max_steps=9"),
        tmp_path / "rest",
        First(),
        ckpt_path=tmp_path / "checkpoints/last.ckpt",
    )
    assert started == [[(5, 9)]]


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


@pytest.mark.full
def test_the_progress_bar_shows_the_auc_of_now(two_epochs, terminal, capsys, monkeypatch):
    monkeypatch.setattr(curves, "SECONDS_BETWEEN_READINGS", 0)
    shown = {}

    class Listening(TerminalProgress):
        def on_train_batch_end(self, trainer, *others):
            super().on_train_batch_end(trainer, *others)
            shown[trainer.global_step] = self._bar.tasks[self._training].fields["numbers"]

    readings = Readings()
    fit(*two_epochs, readings, Listening(StepClock()))
    assert [text.split()[3] for text in shown.values()] == list(readings.auc.values())


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
