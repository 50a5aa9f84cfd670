"""What cannot train is refused before ranks are started, and without torch."""

import subprocess
import sys

import pytest
from jobs import environment, small
from tiers import one_of

from recapp import train

CHECKPOINT = "callbacks.checkpoint"


@pytest.fixture
def line(tmp_path, monkeypatch, capfd):
    """`line(*arguments)`: the one line of a training that must not start ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recapp.cli.job.launch", lambda *_, **__: pytest.fail("ranks were started"))

    def say(*arguments):
        assert train.main(["hydra.run.dir=run", *small(tmp_path / "logs"), *arguments]) == 1
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        assert not (tmp_path / "logs").exists()
        return err

    return say


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
            (["tables.dim=100000000"], "tables.dim=100000000: the weights of the tables alone "),
            (
                ["topology.memory_bytes=1000000", "trainer.devices=2"],
                " GB, and the ranks have 0.002 GB: use a smaller tables.dim",
            ),
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
            (
                ["trainer.limit_train_batches=0.01"],
                "trainer.limit_train_batches=0.01: is less than one of the 20 batches of an epoch: "
                "set a number of batches, such as 1, or a share of at least 0.05",
            ),
            (
                ["trainer.limit_val_batches=0.1"],
                "trainer.limit_val_batches=0.1: is less than one of the 4 batches of a validation",
            ),
        ],
    ),
)  # fmt: skip
def test_what_cannot_train_is_refused_before_ranks_start(line, arguments, says):
    assert says in line(*arguments)


def test_it_is_refused_without_torch(tmp_path):
    said = (
        "import sys; from recapp import train; code = train.main(sys.argv[1:]); "
        "print(code, {'torch', 'lightning'} & sys.modules.keys())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", said, *small(tmp_path / "logs"), "tables.dim=100000000"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "1 set()\n" and "tables alone need" in ran.stderr
