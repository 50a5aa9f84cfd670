"""Models of several checkpoints are joined into one ensemble; so are those of the last epochs."""

from pathlib import Path

import pytest
import torch
from jobs import validation
from runs import compose, fit, make_logs

from recapp.errors import CheckpointError
from recapp.recipe.early_checks import check_resumed
from recapp.stored.checkpoint import load_table, read_manifest, read_meta, verify
from recapp.stored.joined_checkpoint import join_checkpoints
from recapp.stored.training_state import dense_state
from recapp.tables.named_collections import member_name

SHORT = ("trainer.max_steps=2", "tables.wide=true")
LAST = "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return make_logs(tmp_path_factory.mktemp("logs") / "set")


@pytest.fixture(scope="module")
def trained(logs, tmp_path_factory):
    """A model, and an ensemble of two of the same model."""
    folder = tmp_path_factory.mktemp("trained")
    for name, more in (("one", ["seed=1"]), ("two", ["seed=5", "ensemble=2"])):
        (folder / name).mkdir()
        fit(compose(logs, *SHORT, *more), folder / name)
    return folder / "one" / LAST, folder / "two" / LAST


@pytest.fixture(scope="module")
def joined(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("joined") / "joined.ckpt"
    assert join_checkpoints(trained, path, {"val_auc": 0.5}) == 3
    return path


def test_members_of_a_joined_checkpoint_are_the_models_that_were_joined(trained, joined):
    one, two = trained
    tables = read_manifest(one).shapes
    assert len(read_manifest(joined).shapes) == 3 * len(tables)
    for table in tables:
        found = [load_table(joined, member_name(table, number)) for number in range(3)]
        assert torch.equal(found[0], load_table(one, table))
        assert torch.equal(found[1], load_table(two, table))
        assert torch.equal(found[2], load_table(two, member_name(table, 1)))
    dense = dense_state(read_meta(joined))
    first, others = (dense_state(read_meta(path)) for path in trained)
    for name, value in first.items():
        assert torch.equal(dense[f"members.0.{name}"], value)
        for number in (0, 1):
            same = others[f"members.{number}.{name}"]
            assert torch.equal(dense[f"members.{number + 1}.{name}"], same)
    assert len(dense) == 3 * len(first)


def test_a_joined_checkpoint_is_whole_and_says_what_it_is(joined):
    manifest = read_manifest(joined)
    assert verify(joined) > 0
    assert manifest.config["ensemble"] == 3
    assert manifest.metrics == {"val_auc": 0.5}
    assert manifest.is_joined
    assert not [p for p in joined.parent.iterdir() if p != joined]


def test_training_does_not_resume_from_a_joined_checkpoint(joined, logs):
    with pytest.raises(CheckpointError, match=r"joined.ckpt: joins several models .* last.ckpt"):
        check_resumed(compose(logs, *SHORT, "ensemble=3", f"ckpt_path={joined}"))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["model.top_layers=[4,1]"], "cannot be joined with .*: their settings model differ"),
        (["dataset.missing_flags=true"], "they read other columns, or ids in another way"),
    ],
)
def test_other_models_are_not_joined(trained, logs, tmp_path, more, says):
    (tmp_path / "other").mkdir()
    fit(compose(logs, *SHORT, *more), tmp_path / "other")
    with pytest.raises(CheckpointError, match=says):
        join_checkpoints([trained[0], tmp_path / "other" / LAST], tmp_path / "joined.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_dynamic_tables_and_single_models_are_not_joined(trained, logs, tmp_path):
    (tmp_path / "grows").mkdir()
    fit(compose(logs, "trainer.max_steps=2", "tables=dynamic"), tmp_path / "grows")
    with pytest.raises(CheckpointError, match="is dynamic, and checkpoints of dynamic tables"):
        join_checkpoints([tmp_path / "grows" / LAST] * 2, tmp_path / "joined.ckpt")
    with pytest.raises(CheckpointError, match="1 models: an ensemble has 2 to 64"):
        join_checkpoints(trained[:1], tmp_path / "joined.ckpt")


@pytest.mark.full
def test_the_mean_of_the_last_epochs_is_measured_and_a_resumed_run_is_the_same(jobs, tmp_path):
    wanted = (
        "dataset=sample",
        f"dataset.path={tmp_path}/clicks",
        "dataset.generate.rows=3000",
        "dataset.table_rows=[60,40,20]",
        "tables=from_dataset",
        "tables.id_rule=hash",
        "optimizer.restart_tables=['*']",
        "snapshots=2",
        "callbacks=none",
    )
    whole = jobs.train(tmp_path / "whole", *wanted, "+plan=mixed", "trainer.max_epochs=3")
    kept = sorted(p.name for p in Path(tmp_path, "whole/checkpoints").glob("snapshot_*"))
    assert len(kept) == 2
    measured = jobs.evaluate(tmp_path / "eval", f"ckpt_path={whole['checkpoint']}", world=1)
    assert validation(measured) == pytest.approx(validation(whole), rel=1e-6)
    assert read_manifest(whole["checkpoint"]).metrics == validation(whole)

    last = tmp_path / "whole" / LAST
    assert read_manifest(last).metrics != validation(whole)
    part = jobs.train(tmp_path / "part", *wanted, "+plan=mixed", "trainer.max_epochs=2")
    assert validation(part) != validation(whole)
    more = (f"ckpt_path={tmp_path}/part/{LAST}", "trainer.max_epochs=3", "+plan=row_wise")
    resumed = jobs.train(tmp_path / "resumed", *more)
    assert validation(resumed) == validation(whole)
