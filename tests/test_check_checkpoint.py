"""A checkpoint of another model than that of the command line is refused before ranks start."""

import pytest
from jobs import recipe

from recapp import eval as evaluation
from recapp import train
from recapp.run.stored_checks import check_fits_checkpoint


@pytest.fixture(scope="module")
def finished(stored):
    """The last checkpoint of a run, which its own settings would not train any further."""
    return f"ckpt_path={stored.small_run('trainer.max_steps=2')}/checkpoints/last.ckpt"


@pytest.fixture
def line(tmp_path, monkeypatch, capfd):
    """`line(main, *arguments)`: the one line of a command that must not start ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recapp.cli.job.launch", lambda *_, **__: pytest.fail("ranks were started"))

    def say(main, *arguments):
        assert main(["hydra.run.dir=run", *arguments]) == 1, arguments
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        return err

    return say


CHANGES = [
    (["tables.dim=32"], "table C1 is 120,001 x 16 in the checkpoint, but 120,001 x 32 by the"),
    (["dataset.table_dims={C3: 8}"], "table C3 is 14,092 x 16 in the checkpoint, but 14,092 x"),
    (
        ["tables.max_rows=10", "tables.id_rule=hash"],
        "table C1 is 120,001 x 16 in the checkpoint, but 10 x 16 by the",
    ),
    (["tables=dynamic"], "table C1 has a fixed number of rows in the checkpoint, but grows by"),
    (["tables=sample"], "tables."),
    (["tables.shared={C2: C1}"], "the checkpoint has a table C2, which the settings do not "),
    (["model.top_layers=[8,1]"], "the model's top.0.weight is "),
    (["model.bottom_layers=[32,16]"], "the model's bottom.0.weight is "),
    (["model.bottom_layers=[16]"], "the model's bottom."),
    (["model.top_layers=[8,2]"], "model.top_layers=[8, 2]: "),
]


@pytest.mark.parametrize(
    ("main", "overrides", "says"),
    [
        *((train.main, *change) for change in CHANGES),
        *((evaluation.main, *change) for change in CHANGES[::4]),
    ],
)
def test_a_changed_model_is_refused_before_ranks_start(line, finished, main, overrides, says):
    assert says in line(main, finished, *overrides)


def test_what_fits_is_not_refused(finished):
    for overrides in (["tables.dim=16", "+plan=row_wise"], ["tables.data_type=fp16"], ["seed=2"]):
        check_fits_checkpoint(recipe("train", [finished, *overrides]), overrides)
