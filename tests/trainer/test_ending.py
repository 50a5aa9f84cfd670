"""Runs that end before their time: a signal saves and stops, a loss that is not finite stops and
saves nothing.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from jobs import command, metrics_of, small, validation
from lightning.pytorch import Callback
from lightning.pytorch.loops.progress import _BatchProgress, _ProcessedTracker
from trainer.runs import compose, fit

from recapp.errors import CheckpointError, TrainingError
from recapp.processes.stopping import SIGNALS, Stopped
from recapp.sparse.keyed_jagged_tensor import LABEL
from recapp.stored.stored_model import load_table, read_manifest, read_meta
from recapp.trainer.keep_checkpoints import LossWatch, _forget_begun

LAST = "checkpoints/last.ckpt"
TESTS = Path(__file__).parents[1]
HERE = os.pathsep.join([str(TESTS.parent), str(TESTS)])
TWO_EPOCHS = ["trainer.val_check_interval=6", "trainer.max_steps=24", "callbacks=none"]


@pytest.fixture(scope="module")
def unbroken(logs, tmp_path_factory):
    """A run of 24 steps in one piece, 18 of them an epoch."""
    folder = tmp_path_factory.mktemp("unbroken")
    fit(compose(logs, *TWO_EPOCHS), folder)
    return folder


class Send(Callback):
    """Sends this process a signal at a step, in training or in the validation that follows it."""

    def __init__(self, number, step, validating=False):
        self.number = number
        self.step = step
        self.validating = validating
        self.steps = 0
        self.validated = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps = trainer.global_step
        if self.steps == self.step and not self.validating:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        if trainer.global_step == self.step and self.validating and not batch_idx:
            os.kill(os.getpid(), self.number)

    def on_validation_end(self, trainer, pl_module):
        self.validated += 1


class Spoil(Callback):
    """Makes the loss of a step infinite."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            loss = type(pl_module).training_step

            def spoilt(batch, batch_idx):
                pl_module.training_step = loss.__get__(pl_module)
                return loss(pl_module, batch, batch_idx) * torch.inf

            pl_module.training_step = spoilt


class Weigh(Callback):
    """Gives the rows that train one weight, and those that validate another."""

    def __init__(self, training, validation=1.0):
        self.training = training
        self.validation = validation

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch.weights = {LABEL: torch.full((batch.rows,), self.training)}

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        batch.weights = {LABEL: torch.full((batch.rows,), self.validation)}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("dataset.weight=null", r"^(table C1, rows 0-\d+: sum|model\.bottom\.0\.weight: exp_avg)"),
        ("trainer.limit_val_batches=0", r"^model\.bottom\.0\.weight: exp_avg"),
    ],
)
def test_an_optimiser_whose_state_overflows_ends_the_run_and_nothing_is_saved(
    logs, tmp_path, changed, said
):
    with pytest.raises(CheckpointError, match=said) as raised:
        fit(compose(logs, changed), tmp_path, Weigh(1e30))  # whose square is no fp32 number
    assert "dataset.weight" in str(raised.value) and "dense_transform=log1p" in str(raised.value)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_validation_whose_rows_all_weigh_0_is_not_taken_for_a_model_that_diverged(logs, tmp_path):
    said = r"^dataset\.weight=.*: all validation rows weigh 0 in the loss of label, so its metrics "
    with pytest.raises(TrainingError, match=said):
        fit(compose(logs), tmp_path / "a", Weigh(1.0, 0.0))
    _, trainer, _ = fit(compose(logs, "metrics.names=[auc]"), tmp_path / "b", Weigh(1.0, 0.0))
    assert trainer.callback_metrics["val_auc"].isnan()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_next_step_without_validating(logs, tmp_path, number):
    before = [signal.getsignal(n) for n in SIGNALS]
    send = Send(number, 4)
    with pytest.raises(Stopped) as stopped:
        fit(compose(logs), tmp_path, send)
    assert (stopped.value.code, str(stopped.value)) == (128 + number, number.name)
    assert send.steps <= 5 and send.validated == 0
    manifest = read_manifest(tmp_path / LAST)
    assert (
        manifest.info["step"] == 5
        and manifest.info["position"]["batches"] == 5
        and manifest.metrics == {}
    )
    assert [signal.getsignal(n) for n in SIGNALS] == before


@pytest.mark.parametrize(
    ("step", "validating", "saved"),
    [
        (6, True, 6),
        *(
            pytest.param(*more, marks=pytest.mark.full)
            for more in (
                (7, False, 8),
                (6, False, 6),
                (17, False, 18),
                (18, True, 18),
                (18, False, 18),
            )
        ),
    ],
)
def test_what_a_signal_has_stopped_goes_on_to_the_bits_of_an_unbroken_run(
    logs, unbroken, tmp_path, step, validating, saved
):
    send = Send(signal.SIGTERM, step, validating)
    with pytest.raises(Stopped):
        fit(compose(logs, *TWO_EPOCHS), tmp_path / "first", send)
    assert read_manifest(tmp_path / "first" / LAST).info["step"] == saved
    assert send.validated == (step - 1) // 6
    seen, _, _ = fit(
        compose(logs, *TWO_EPOCHS), tmp_path / "rest", ckpt_path=tmp_path / "first" / LAST
    )
    assert len(seen.batches) == 24 - saved
    for table in ("C1", "C20"):
        assert load_table(tmp_path / "rest" / LAST, table).equal(load_table(unbroken / LAST, table))


def test_a_stop_does_not_give_the_metrics_of_an_earlier_state_to_the_checkpoint(logs, tmp_path):
    with pytest.raises(Stopped):
        fit(compose(logs, "trainer.val_check_interval=3"), tmp_path, Send(signal.SIGTERM, 4))
    assert read_manifest(tmp_path / LAST).metrics == {}
    (best,) = (tmp_path / "checkpoints").glob("step_*.ckpt")
    assert set(read_manifest(best).metrics) >= {"val_auc"}


def test_a_loss_that_is_not_finite_ends_the_run_with_step_rank_and_rates_and_saves_nothing(
    logs, tmp_path
):
    rest = ["trainer.max_steps=12", "trainer.val_check_interval=4", "callbacks=none"]
    spoil = Spoil(6)
    send = Send(signal.SIGTERM, 1000)
    with pytest.raises(TrainingError) as error:
        fit(compose(logs, *rest), tmp_path, spoil, send)
    said = str(error.value)
    assert said.startswith(
        "the loss of step 6 is not a finite number on rank 0: lower the learning rates, "
        "optimizer.sparse.lr (now "
    )
    assert "optimizer.dense.lr (now 0.001)" in said and "\n" not in said
    assert send.steps <= 7
    assert read_manifest(tmp_path / LAST).info["step"] == 4


def test_rates_that_blow_the_model_up_are_found_within_two_steps(logs, tmp_path):
    send = Send(signal.SIGTERM, 1000)
    with pytest.raises(
        TrainingError,
        match=r"the loss of step (\d+) is not .* optimizer\.sparse\.lr \(now 1e\+30\)",
    ) as error:
        fit(compose(logs, "optimizer.sparse.lr=1e30"), tmp_path, send)
    step = int(str(error.value).split()[4])
    assert send.steps <= step + 2
    assert not (tmp_path / LAST).exists()


@pytest.mark.parametrize("end", ["trainer.max_steps=6", "trainer.limit_val_batches=0"])
def test_a_loss_that_is_not_finite_at_the_end_is_found_before_anything_is_saved(
    logs, tmp_path, end
):
    send = Send(signal.SIGTERM, 1000)
    with pytest.raises(
        TrainingError, match=r"the loss of step (6|18) is not a finite number on rank 0"
    ):
        fit(compose(logs, end), tmp_path, Spoil(6 if "steps" in end else 18), send)
    assert send.validated == 0 and not (tmp_path / LAST).exists()


def test_the_step_of_a_loss_that_is_not_finite_is_that_of_its_batches(logs, tmp_path):
    with pytest.raises(TrainingError, match="the loss of step 2 is not a finite number"):
        fit(compose(logs, "trainer.accumulate_grad_batches=2"), tmp_path, Spoil(2))
    assert not (tmp_path / LAST).exists()


def test_a_watch_knows_the_first_step_that_was_not_finite():
    watch = LossWatch()
    for step, loss in enumerate([0.5, None, float("nan"), float("inf"), 0.3], 1):
        watch.check(step, None if loss is None else torch.tensor(loss))
        assert watch.step == (3 if step >= 3 else 0)
    watch.check_pending()
    assert watch.step == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_loss_is_known_a_step_later_or_when_it_is_asked_for():
    watch = LossWatch()
    watch.check(1, torch.tensor(float("nan"), device="cuda"))
    assert watch.step == 0
    watch.check(2, torch.tensor(0.5, device="cuda"))
    assert watch.step == 1
    other = LossWatch()
    other.check(1, torch.tensor(float("inf"), device="cuda"))
    other.check_pending()
    assert other.step == 1


def test_metrics_are_json_and_a_run_whose_metrics_are_not_numbers_is_not_ok(tmp_path):
    from recapp.reporting.run_record import read_metrics, write_metrics

    written = write_metrics(
        {"val_auc": float("nan"), "val_log_loss": 0.4, "steps": 3, "status": "ok"}, tmp_path
    )
    assert written == {
        "val_auc": None,
        "val_log_loss": 0.4,
        "steps": 3,
        "status": "undefined",
        "undefined": ["val_auc"],
    }
    assert (
        json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
        == written
        == read_metrics(tmp_path)
    )
    assert write_metrics({"x": float("inf"), "status": "stopped"}, tmp_path)["status"] == "stopped"
    assert write_metrics({"x": 1.5, "status": "ok"}, tmp_path) == {"x": 1.5, "status": "ok"}


# ---- stopped at the last step


def stopped_at(folder, step, *overrides, batch="null"):
    """A command whose two ranks get a signal after a step, or in a batch of its validation."""
    arguments = f"step:{step},number:2,batch:{batch}"
    callback = f"+callbacks.stop={{_target_:signal_at_step.SignalAtStep,{arguments}}}"
    run = f"hydra.run.dir={folder}"
    wanted = (callback, "trainer.devices=2", run, *overrides)
    ended = command("train", *wanted, cwd=folder.parent, PYTHONPATH=HERE)
    assert ended.code == 128 + signal.SIGINT, ended.err


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ("trainer.max_steps=12", 12),
        ("trainer.max_epochs=1", 20),
    ],
)
def test_a_run_stopped_at_its_last_step_is_completed_by_going_on(jobs, tmp_path, limit, steps):
    wanted = (*small(tmp_path / "data"), "trainer.val_check_interval=8", limit)
    unbroken = jobs.train(tmp_path / "unbroken", *wanted)
    assert unbroken["steps"] == steps
    stopped_at(tmp_path / "run", steps, *wanted)
    last = tmp_path / "run" / LAST
    assert read_manifest(last).step == steps and not read_manifest(last).metrics
    on = ("trust=[signal_at_step]", f"ckpt_path={last}")
    completed = jobs.train(tmp_path / "run", *on)
    assert validation(completed) == validation(unbroken) != {}
    for name in ("steps", "checkpoint_step", "status", "stopped", "plan", "steps_planned"):
        assert completed[name] == unbroken[name], name
    for run in ("run", "unbroken"):  # the last one, too
        assert read_manifest(tmp_path / run / LAST).metrics
    assert read_manifest(last).metrics == read_manifest(tmp_path / "unbroken" / LAST).metrics
    again = jobs.train(tmp_path / "again", *on)
    assert again["status"] == "ok" and again["samples_per_second"] is None
    assert "nothing is left to train" in (tmp_path / "again/rank0.out").read_text()


@pytest.mark.full
def test_where_no_row_validates_nothing_is_left_after_the_last_step(jobs, tmp_path):
    none = "trainer.limit_val_batches=0"
    jobs.train(tmp_path / "run", *small(tmp_path / "data"), "trainer.max_steps=4", none)
    assert not read_manifest(tmp_path / "run" / LAST).metrics
    jobs.train(tmp_path / "again", f"ckpt_path={tmp_path / 'run' / LAST}")
    assert "nothing is left to train" in (tmp_path / "again/rank0.out").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("at", "stop", "batch"),
    [
        (8, 7, "null"),  # the signal is read at the end of step 8, which is validated
        (8, 8, "null"),  # before the validation
        (8, 8, 1),  # in its second batch
        (20, 20, "null"),  # before that of an epoch's end
        (20, 20, 0),
    ],
)
def test_a_validation_that_a_signal_has_cut_off_comes_first(
    jobs, stored, tmp_path, at, stop, batch
):
    wanted = (
        "trainer.val_check_interval=4",
        "trainer.max_steps=26",
        "optimizer/schedule=reduce_on_plateau",  # rates follow from every validation
        "optimizer.schedule.factor=0.5",
    )
    whole = stored.small_run(*wanted)
    unbroken = metrics_of(whole)
    stopped_at(tmp_path / "run", stop, *small(whole / "logs"), *wanted, batch=batch)
    last = tmp_path / "run" / LAST
    assert read_manifest(last).step == at and not read_manifest(last).metrics
    on = jobs.train(tmp_path / "run", "trust=[signal_at_step]", f"ckpt_path={last}")
    assert validation(on) == validation(unbroken)
    assert on["checkpoint_step"] == unbroken["checkpoint_step"]
    for name in ("metrics", "position"):
        found = [getattr(read_manifest(path), name) for path in (last, whole / LAST)]
        assert found[0] == found[1], name
    states = [read_meta(path) for path in (last, whole / LAST)]
    for name in ("lr_schedulers", "loops"):
        assert states[0][name] == states[1][name]


def test_batches_of_a_validation_that_was_cut_off_are_taken_out_and_those_of_a_whole_one_stay():
    def counts(*numbers):
        names = ("ready", "completed", "started", "processed")
        return _ProcessedTracker(**dict(zip(names, numbers, strict=True)))

    cut_off = _BatchProgress(total=counts(9, 8, 9, 9), current=counts(1, 0, 1, 1))
    at_its_end = _BatchProgress(total=counts(8, 7, 8, 8), current=counts(3, 2, 3, 3))
    at_its_end.is_last_batch = True
    between = _BatchProgress(total=counts(7, 7, 7, 7), current=counts(2, 2, 2, 2))
    whole = _BatchProgress(total=counts(8, 8, 8, 8), current=counts(2, 2, 2, 2))
    whole.is_last_batch = True
    for progress, left in ((cut_off, 8), (at_its_end, 5), (between, 5), (whole, 8)):
        _forget_begun(progress)
        assert progress.total.ready == progress.total.processed == left
    assert cut_off.total == counts(8, 8, 8, 8) and at_its_end.total == counts(5, 5, 5, 5)


@pytest.mark.full
def test_going_on_after_a_completed_last_step_equals_the_unbroken_run(jobs, tmp_path):
    wanted = (*small(tmp_path / "data"), "trainer.max_steps=12")
    jobs.train(tmp_path / "unbroken", *wanted)
    stopped_at(tmp_path / "run", 12, *wanted)
    trust = "trust=[signal_at_step]"
    jobs.train(tmp_path / "run", trust, f"ckpt_path={tmp_path / 'run' / LAST}")
    for run in ("run", "unbroken"):
        named = f"ckpt_path={tmp_path / run / LAST}"
        jobs.train(tmp_path / run, trust, named, "trainer.max_steps=23")
    assert (
        read_manifest(tmp_path / "run" / LAST).metrics
        == read_manifest(tmp_path / "unbroken" / LAST).metrics
    )
