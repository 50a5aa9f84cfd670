"""What the strategy and the optimiser promise an ordinary LightningModule."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from tiers import one_of
from trainer.runs import compose, fit

from recapp.engine.sharded_state import TableStrips
from recapp.errors import ConfigError, RecappError
from recapp.processes.rank_environment import RankInfo
from recapp.run import training
from recapp.run.model import build_model
from recapp.run.training import build_strategy
from recapp.stored.stored_model import read_meta
from recapp.trainer.callbacks import StepClock
from recapp.trainer.curves import NoteEarlyStop


def test_a_schedule_reaches_tables_and_dense_part_alike(logs, tmp_path):
    schedule = [
        "optimizer/schedule=warmup_poly",
        "optimizer.schedule.warmup_steps=4",
        "optimizer.schedule.decay_start=6",
        "optimizer.schedule.decay_steps=4",
        "optimizer.schedule.decay_power=1",
    ]
    seen, trainer, _ = fit(compose(logs, "trainer.max_steps=10", *schedule), tmp_path)
    factors = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert [g["name"] for g in trainer.optimizers[0].param_groups] == [
        "dense",
        "sparse/rowwise_adagrad",
    ]
    for rates, factor in zip(seen.rates, factors, strict=True):
        assert rates == pytest.approx([1e-3 * factor, 0.05 * factor])


def test_the_logged_rate_is_the_one_the_update_uses(logs, tmp_path):
    used = []

    class Watch(Callback):
        def on_train_start(self, trainer, pl_module):
            store = trainer.strategy.sharded_tables()[0].state.stores[0]
            update = store.update
            store.update = lambda *args: (used.append(args[4]), update(*args))[1]

    schedule = ["optimizer/schedule=warmup_poly", "optimizer.schedule.warmup_steps=5"]
    seen, _, _ = fit(compose(logs, "trainer.max_steps=5", *schedule), tmp_path, Watch())
    assert used == [rates[1] for rates in seen.rates]


def test_zero_rates_change_nothing(logs, tmp_path):
    config = compose(logs, "trainer.max_steps=3", "optimizer.dense.lr=0", "optimizer.sparse.lr=0")
    before = {}

    class Keep(Callback):
        def on_train_start(self, trainer, pl_module):
            before.update(
                {
                    b.table: b.data.clone()
                    for c in trainer.strategy.sharded_tables()
                    for b in c.blocks()
                    if b.tensor == "weight"
                }
            )

    _, trainer, _ = fit(config, tmp_path, Keep())
    for block in (
        b for c in trainer.strategy.sharded_tables() for b in c.blocks() if b.tensor == "weight"
    ):
        assert block.data.equal(before[block.table])


@pytest.mark.parametrize(
    ("setting", "says"),
    one_of(
        3,
        [
            ("trainer.precision=16-mixed", "use bf16-mixed"),
            ("trainer.accumulate_grad_batches=0", "must be a whole number of at least 1"),
            ("+trainer.max_step=3", "did you mean trainer.max_steps"),
            (
                "optimizer.sparse._target_=torch.optim.Adam",
                "as those of recapp.optim.rules do: sgd",
            ),
            ("optimizer.dense._target_=torch.optim.Adm", "no such constructor"),
            ("+optimizer.dense.learning_rate=1", "learning_rate"),
            ("metrics.names=[auk]", "did you mean auc"),
            ("dataset.lanes=0", "lanes"),
            ("+plan.tables.C99=row_wise", "no such table"),
            ("+plan.tables.C9=row_wize", "did you mean row_wise"),
            ("tables=sample", "large_table"),
            ("model.top_layers=[8,2]", "model.top_layers"),
            (
                "optimizer.schedule={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1}",
                r"^optimizer.schedule \(.*OneCycleLR\): .* add cycle_momentum: false to optimizer",
            ),
        ],
    ),
)
def test_settings_that_cannot_be_right_are_refused_with_the_way_out(logs, tmp_path, setting, says):
    with pytest.raises(Exception, match=says) as caught:
        fit(compose(logs, "trainer.max_steps=1", setting), tmp_path)
    assert isinstance(caught.value, RecappError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "least"), [("train", "0.05"), ("val", "0.25")])
def test_a_share_of_batches_below_one_is_refused_in_one_line(logs, tmp_path, name, least):
    setting = f"limit_{name}_batches"
    with pytest.raises(ConfigError) as error, training.in_one_line():
        fit(compose(logs, f"trainer.{setting}=0.0001"), tmp_path)
    assert f"Try at least `{setting}={least}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_dense_part_may_run_in_half_precision(logs, tmp_path, precision):
    seen, trainer, _ = fit(
        compose(logs, "trainer.max_steps=3", f"trainer.precision={precision}"), tmp_path
    )
    assert all(loss == loss for loss in seen.losses)
    assert all(
        b.data.dtype == torch.float32 for c in trainer.strategy.sharded_tables() for b in c.blocks()
    )


def test_a_checkpoint_keeps_tables_as_rectangles_only_and_goes_on_from_them(logs, tmp_path):
    """A module's own state dict has tables; what Lightning pickles has none, and is loaded strictly
    all the same.
    """
    _, _, module = fit(compose(logs, "trainer.max_steps=4"), tmp_path)
    stored = read_meta(tmp_path / "checkpoints/last.ckpt")["state_dict"]
    whole = module.state_dict()
    tables = [name for name, value in whole.items() if isinstance(value, TableStrips)]
    assert len(tables) == 26 and set(stored) == set(whole) - set(tables)
    _, _, again = fit(
        compose(logs, "trainer.max_steps=4"),
        tmp_path / "again",
        ckpt_path=tmp_path / "checkpoints/last.ckpt",
    )
    for name, value in again.state_dict().items():
        mine, theirs = (value[0][2], whole[name][0][2]) if name in tables else (value, whole[name])
        assert torch.equal(mine, theirs), name


def test_evaluation_holds_no_optimiser_state_and_reproduces_validation(logs, tmp_path):
    config = compose(logs, "trainer.max_steps=8")
    _, trainer, _ = fit(config, tmp_path)
    trained = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
    strategy = build_strategy(config, training=False)
    tester = training.build_trainer(config, strategy, [], [])
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    results = tester.validate(
        training.build_module(config, partial(build_model, config)),
        datamodule=training.build_data(config),
        ckpt_path=path,
        verbose=False,
    )
    assert {k: float(v) for k, v in results[0].items()} == trained
    assert {b.tensor for c in strategy.sharded_tables() for b in c.blocks()} == {"weight"}


@pytest.mark.parametrize(("visible", "gpu"), [(1, 0), (4, 2)])
def test_a_rank_whose_launcher_shows_it_one_gpu_takes_that(logs, monkeypatch, visible, gpu):
    """As `srun --gpus-per-task=1` does. There is no GPU here: nothing is computed."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    of_srun = RankInfo(2, 4, 2, 4, 0, "localhost", 29500)
    for reader in ("recapp.trainer.strategy", "recapp.run.training"):
        monkeypatch.setattr(f"{reader}.rank_info", lambda: of_srun)
    config = compose(logs, "trainer.accelerator=gpu")
    strategy = build_strategy(config, training=True)
    trainer = training.build_trainer(config, strategy, [], [])
    assert trainer.strategy.root_device == torch.device("cuda", gpu)
    assert trainer.world_size == 4 and trainer.global_rank == 2 and trainer.local_rank == 2


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_step_waits_for_is_left_open_where_the_host_does_not_wait(
    logs, tmp_path, monkeypatch, waits
):
    monkeypatch.setattr("recapp.transport.communicator.Comm.host_waits", waits)
    clock = StepClock()
    seen = {}

    class Logged(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.update(trainer.callback_metrics)

    fit(compose(logs, "trainer.max_steps=12"), tmp_path, clock, Logged())
    known = {name for name in clock.summary() if name.endswith("_wait_ms")}
    assert known == ({"input_wait_ms", "exchange_wait_ms"} if waits else set())
    assert "samples_per_s" in seen and ("input_wait_ms" in seen) is waits


def test_cpu_time_is_that_of_steps_without_validation(logs, tmp_path, monkeypatch):
    spent = [0.0]
    monkeypatch.setattr("recapp.trainer.callbacks.time.process_time", lambda: spent[0])
    clock = StepClock()

    class Works(Callback):
        def on_train_batch_end(self, *_):
            spent[0] += 0.5

        def on_validation_batch_end(self, *_):
            spent[0] += 100.0

    settings = compose(logs, "trainer.max_steps=14", "trainer.val_check_interval=3")
    fit(settings, tmp_path, Works(), clock)
    found = clock.summary()["cpu_seconds_per_sample"]
    assert found * clock.rows[0] == pytest.approx(0.5)


STOPPING = [
    "callbacks=early_stopping",
    "callbacks.early_stopping.patience=1",
    "callbacks.early_stopping.min_delta=1",
    # the first validation is the best, the second one too many
    "trainer.val_check_interval=2",
]


def test_early_stopping_says_when_and_why_once(logs, tmp_path, capsys):
    stop = NoteEarlyStop()
    _, trainer, _ = fit(compose(logs, *STOPPING), tmp_path, stop)
    assert trainer.global_step == 4 and stop.reason.startswith(
        "step 4/18: Monitored metric val_auc did not improve in the last 1 records"
    )
    assert capsys.readouterr().err.splitlines() == [f"stopped early at {stop.reason}"]
    again = NoteEarlyStop()
    config = compose(
        logs, *STOPPING[:2], "trainer.max_steps=6", "callbacks.early_stopping.min_delta=-1"
    )
    _, trainer, _ = fit(
        config, tmp_path / "rest", again, ckpt_path=tmp_path / "checkpoints/last.ckpt"
    )
    assert trainer.global_step == 6 and again.reason is None


@pytest.mark.full
def test_a_run_that_resumes_at_the_end_of_an_epoch_stops_early_as_another(logs, tmp_path):
    settings = [
        STOPPING[0],
        "+callbacks.own={_target_: lightning.pytorch.callbacks.EarlyStopping, patience: 1, "
        "monitor: val_log_loss, min_delta: 1}",
        "trainer.limit_train_batches=2",
    ]
    fit(compose(logs, *settings, "trainer.max_epochs=1"), tmp_path)
    config = compose(logs, *settings, "trainer.max_epochs=4")
    last = tmp_path / "checkpoints/last.ckpt"
    _, trainer, _ = fit(config, tmp_path / "rest", ckpt_path=last)
    assert trainer.global_step == 4


@pytest.mark.parametrize("end", [["trainer.max_steps=4"], ["trainer.max_steps=3"]])
def test_a_run_that_ends_as_it_should_was_not_stopped(logs, tmp_path, end):
    stop = NoteEarlyStop()
    fit(compose(logs, *STOPPING, *end), tmp_path, stop)
    assert stop.reason is None
