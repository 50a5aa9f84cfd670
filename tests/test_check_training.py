"""What cannot train is refused on rank 0 before the ranks meet."""

import pytest
from jobs import recipe, small
from tiers import one_of

from recapp import train
from recapp.errors import ConfigError, RecappError
from recapp.run import training
from recapp.run.run_checks import check_training
from recapp.run.training import average_of, build_callbacks

CHECKPOINT = "callbacks.checkpoint"


@pytest.mark.parametrize(
    ("arguments", "says"),
    one_of(
        2,
        [
            (["model.top_layers=[]"], "model.top_layers=[]: must be a list of at least one width"),
            (["model.top_layers=[8,0,1]"], "model.top_layers=[8, 0, 1]: 0 is no width"),
            (["model.top_layers=[8,2]"], "the last layer is the logit and must be 1"),
            (["model.bottom_layers=[]"], "model.bottom_layers=[]: must be a list of at least one"),
            (["model.bottom_layers=[0]"], "model.bottom_layers=[0]: 0 is no width"),
            (["metrics.names=[log_loss]"], f"{CHECKPOINT}.monitor=val_auc: not measured"),
            (
                [f"{CHECKPOINT}.monitor=val_loss"],
                f"set {CHECKPOINT}.monitor=val_log_loss {CHECKPOINT}.mode=min",
            ),
            (
                ["optimizer=adam", "+optimizer.sparse.l2_all_rows=1e-6", "tables.data_type=bf16"],
                "optimizer.sparse.l2_all_rows: table C1 has data_type=bf16, and rows that take",
            ),
            (
                ["trainer.average.kind=swa", "trainer.average.decay=.8"],
                "trainer.average.decay=0.8: has no effect with trainer.average.kind=swa: leave it",
            ),
            (["optimizer.restart_tables=['D*']"], "optimizer.restart_tables: D*: no such table"),
            ([f"{CHECKPOINT}.monitor=val_log_loss"], f"{CHECKPOINT}.mode=max: a smaller val_log_"),
            (
                ["+callbacks.e={_target_: lightning.pytorch.callbacks.EarlyStopping, "
                 "monitor: val_auc}"],
                "callbacks.e.mode=min: a larger val_auc is better; set callbacks.e.mode=max",
            ),
            (
                ["+callbacks.s={_target_: lightning.pytorch.callbacks.StochasticWeightAveraging, "
                 "swa_lrs: 0.1}"],
                "callbacks.s (StochasticWeightAveraging): cannot be used: it averages parameters",
            ),
        ],
    ),
)  # fmt: skip
def test_what_cannot_train_is_refused_before_the_ranks_meet(tmp_path, arguments, says):
    with pytest.raises(RecappError) as error:
        wanted = recipe("train", [*small(tmp_path / "logs"), *arguments])
        check_training(wanted)
        build_callbacks(wanted, tmp_path, logging=False)
        average_of(wanted)
    assert says in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "optimizer.schedule={_target_: torch.optim.Adam}",
            "optimizer.schedule._target_=torch.optim.Adam: makes a Adam, and must make a "
            "LRScheduler of torch",
        ),
        (
            "+logger.x={_target_: torch.nn.ReLU}",
            "logger.x._target_=torch.nn.ReLU: makes a ReLU, and must make a Logger of lightning",
        ),
        (
            "model={_target_: collections.OrderedDict}",
            "model._target_=collections.OrderedDict: makes a OrderedDict, and must make a Module "
            "of torch",
        ),
        (
            "model={_target_: torch.optim.Adam}",
            "model._target_=torch.optim.Adam: makes a Adam, and must make a Module of torch",
        ),
    ],
)
def test_a_class_that_makes_something_else_is_refused_before_the_ranks_meet(argument, says):
    wanted = recipe("train", [*small("logs"), argument])
    with pytest.raises(ConfigError) as error:
        check_training(wanted)
    assert str(error.value) == says


def test_a_wrong_callback_is_refused_before_a_logger_begins_a_run(tmp_path, monkeypatch):
    stopping = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitr: val_auc}"
    wanted = recipe("train", [*small(tmp_path), f"+callbacks.x={stopping}", "logger=csv"])
    monkeypatch.setattr(training, "build_loggers", pytest.fail)
    with pytest.raises(ConfigError, match=r"unknown setting callbacks\.x\.monitr"):
        train.fit(wanted, tmp_path, None)
