"""What a run writes into its directory while it trains, and what it leaves of an earlier one."""

import csv
import shutil
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from tiers import one_of
from trainer.runs import compose, fit

from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tasks.task import ClickTask
from recapp.trainer.module import TaskModule

EPOCH = 18  # batches


def settings(logs, folder=None, ckpt=None, **trainer):
    """A curve with a point every two steps."""
    more = [f"trainer.{name}={value}" for name, value in trainer.items()]
    return compose(
        logs,
        "logger=csv",
        "trainer.log_every_n_steps=2",
        *more,
        *([f"ckpt_path={folder}/checkpoints/{ckpt}"] if ckpt else []),
    )


def train(logs, folder, **trainer):
    """Steps from nothing in `folder`; its rows."""
    fit(settings(logs, **trainer), folder)
    return rows_of(folder)


def go_on(logs, folder, checkpoint="last.ckpt", *, into=None, **trainer):
    """Steps from a checkpoint of `folder`, by default in the same; its rows."""
    config = settings(logs, folder, checkpoint, **trainer)
    fit(config, into or folder, ckpt_path=config.ckpt_path)
    return rows_of(into or folder)


def rows_of(folder):
    with open(folder / "csv/metrics.csv") as file:
        return list(csv.DictReader(file))


def curve(rows, name):
    return [(int(row["step"]), row[name]) for row in rows if row.get(name)]


@pytest.fixture(scope="module")
def unbroken(logs, tmp_path_factory):
    return train(logs, tmp_path_factory.mktemp("unbroken"), max_steps=EPOCH + 8)


@pytest.mark.parametrize(
    "stop", [6, *(pytest.param(stop, marks=pytest.mark.full) for stop in (EPOCH, 5, EPOCH + 3))]
)
def test_the_curve_of_a_run_that_went_on_is_that_of_the_unbroken_run(
    logs, unbroken, tmp_path, stop
):
    train(logs, tmp_path, max_steps=stop)
    rows = go_on(logs, tmp_path, max_steps=EPOCH + 8)
    # a last step is logged wherever
    assert [point for point in curve(rows, "lr-dense") if point[0] % 2] == curve(
        unbroken, "lr-dense"
    )
    known = dict(curve(unbroken, "train_loss"))
    losses = dict(curve(rows, "train_loss"))
    if stop % 2:  # two readings of one step each, for one of two steps
        assert (float(losses.pop(stop - 1)) + float(losses.pop(stop))) / 2 == pytest.approx(
            float(known.pop(stop)), rel=1e-6
        )
    assert losses == known
    assert [step for step, _ in curve(unbroken, "train_loss")] == list(range(1, EPOCH + 8, 2))
    assert [step for step, _ in curve(rows, "val_auc")] == sorted({stop - 1, EPOCH - 1, EPOCH + 7})
    norms = dict(curve(unbroken, "grad_norm"))
    assert {step: norm for step, norm in curve(rows, "grad_norm") if step % 2} == norms
    assert list(norms) == list(dict(curve(unbroken, "train_loss"))), "it is in every log"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_training_loss_is_the_mean_of_the_steps_since_the_last_reading(logs, tmp_path, every):
    seen, _, _ = fit(settings(logs, max_steps=EPOCH + 3), tmp_path / "single")
    config = compose(
        logs, "logger=csv", f"trainer.log_every_n_steps={every}", f"trainer.max_steps={EPOCH + 3}"
    )
    fit(config, tmp_path / "windows")
    readings = curve(rows_of(tmp_path / "windows"), "train_loss")
    # over the epoch's end; the stop is a reading
    ends = [*range(every, EPOCH + 3, every), EPOCH + 3]
    windows = [seen.losses[end - 1 - (end - 1) % every : end] for end in ends]
    assert [step + 1 for step, _ in readings] == ends
    assert [float(loss) for _, loss in readings] == pytest.approx(
        [sum(window) / len(window) for window in windows], rel=1e-6
    )


class NoReading(torch.Tensor):
    """A loss that fails where its value is asked for, as a synchronisation with its device would
    be.
    """

    def __float__(self):
        raise AssertionError("the loss was read off its device")

    item = tolist = numpy = __bool__ = __float__


def test_the_loss_is_averaged_without_reading_it_off_its_device(monkeypatch):
    module = TaskModule(
        ClickTask([]), lambda: lambda batch: batch.labels_B, lambda parameters: None
    )
    module.configure_model()
    module._trainer = SimpleNamespace(
        accumulate_grad_batches=1,
        current_epoch=0,
        global_rank=0,
        global_step=0,
        log_every_n_steps=4,
    )
    module._loss_sum = module._loss_sum.as_subclass(NoReading)
    seen = []

    def log(name, value, **_):
        assert isinstance(value, NoReading)
        seen.append((name, float(value.as_subclass(torch.Tensor))))

    monkeypatch.setattr(module, "log", log)
    one = KeyedJaggedTensor(["C1"], torch.zeros(1).long(), lengths=torch.ones(1).long())
    for step, loss in enumerate((1.0, 2.0, 6.0, 3.0, 5.0)):
        module._trainer.global_step = step
        value = torch.tensor(loss).as_subclass(NoReading)
        monkeypatch.setattr(module.task, "loss", lambda outputs, batch, value=value: value)
        module.training_step(Batch(torch.zeros(1, 1), one, torch.zeros(1)), step)
    assert seen == [("train_loss", mean) for mean in (1.0, 1.5, 3.0, 3.0, 5.0)]


@pytest.mark.full
def test_going_on_from_an_earlier_checkpoint_drops_what_came_after_it(logs, unbroken, tmp_path):
    train(logs, tmp_path, max_steps=4)
    shutil.copytree(tmp_path / "checkpoints/last.ckpt", tmp_path / "checkpoints/early.ckpt")
    go_on(logs, tmp_path, "early.ckpt", max_steps=12)
    rows = go_on(logs, tmp_path, "early.ckpt", max_steps=8)
    assert [step for step, _ in curve(rows, "train_loss")] == [1, 3, 5, 7]


@pytest.mark.full
def test_a_run_from_nothing_or_in_another_directory_begins_a_new_curve(logs, tmp_path):
    train(logs, tmp_path / "one", max_steps=6)
    assert [
        step
        for step, _ in curve(
            go_on(logs, tmp_path / "one", into=tmp_path / "two", max_steps=10), "train_loss"
        )
    ] == [7, 9]
    assert [
        step for step, _ in curve(train(logs, tmp_path / "one", max_steps=4), "train_loss")
    ] == [1, 3]


def leave_an_earlier_run(folder):
    (folder / "csv").mkdir()
    for name in ("metrics.json", "resolved.yaml", "csv/metrics.csv"):
        (folder / name).write_text("of an earlier run")
    (folder / "resolved.yaml.tmp").write_text("of this run")


class Fail(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.step:
            raise ValueError("a bad batch")


@pytest.mark.parametrize(("step", "written"), one_of(3, [(0, False), (1, False), (2, True)]))
def test_a_run_that_fails_before_it_writes_leaves_the_earlier_results_and_none_after_that(
    logs, tmp_path, step, written
):
    leave_an_earlier_run(tmp_path)
    with pytest.raises(ValueError, match="a bad batch"):
        fit(settings(logs), tmp_path, Fail(step))
    assert (tmp_path / "metrics.json").exists() != written
    assert (tmp_path / "resolved.yaml").read_text() == (
        "of this run" if written else "of an earlier run"
    )
    assert ((tmp_path / "csv/metrics.csv").read_text() == "of an earlier run") != written


def test_without_a_curve_the_first_checkpoint_takes_over(logs, tmp_path):
    leave_an_earlier_run(tmp_path)
    fit(compose(logs, "trainer.max_steps=1"), tmp_path)
    assert (
        not (tmp_path / "metrics.json").exists()
        and (tmp_path / "resolved.yaml").read_text() == "of this run"
    )
