"""A stored model of another shape than the settings make is refused before ranks meet."""

import pytest
from jobs import recipe, refusal
from tiers import one_of

from recapp.errors import CheckpointError, ConfigError
from recapp.eval import measure
from recapp.predict import score
from recapp.run.run_checks import check_tables, check_training
from recapp.stored import stored_model
from recapp.stored.stored_model import read_manifest


@pytest.fixture(scope="module")
def finished(stored):
    """The last checkpoint of a run, which its own settings would not train any further."""
    return stored.small_run("trainer.max_steps=2") / "checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("command", "overrides", "says"),
    one_of(
        2,
        [
            (
                "train",
                ["tables.dim=32"],
                "table C1 is 120,001 x 16 in the checkpoint, but 120,001 x 3",
            ),
            (
                "train",
                ["dataset.table_dims={C3: 8}"],
                "table C3 is 14,092 x 16 in the checkpoint, but",
            ),
            (
                "eval",
                ["tables.max_rows=10", "tables.id_rule=hash"],
                "table C1 is 120,001 x 16 in the checkpoint, but 10 x 16 by the",
            ),
            (
                "train",
                ["tables=dynamic"],
                "table C1 has a fixed number of rows in the checkpoint, but",
            ),
            (
                "train",
                ["tables.shared={C2: C1}"],
                "the checkpoint has a table C2, which the settings ",
            ),
        ],
    ),
)
def test_other_tables_than_those_of_a_checkpoint_are_refused(finished, command, overrides, says):
    with pytest.raises(CheckpointError, match=says):
        check_tables(
            recipe(command, [f"ckpt_path={finished}", *overrides]), read_manifest(finished)
        )


def test_a_model_that_cannot_be_made_is_refused(finished):
    changed = recipe("train", [f"ckpt_path={finished}", "model.top_layers=[8,2]"])
    with pytest.raises(ConfigError, match=r"model.top_layers=\[8, 2\]: "):
        check_training(changed)


def test_another_dense_part_is_refused_when_it_is_loaded(jobs, finished, tmp_path):
    given = [f"ckpt_path={finished}", "model.top_layers=[8,1]"]
    kind, line = refusal(jobs.evaluate, tmp_path / "eval", *given, world=1)
    assert kind == "CheckpointError" and "set model as it was when it was saved" in line


def test_what_fits_is_not_refused(finished):
    for overrides in (["tables.dim=16", "+plan=row_wise"], ["tables.data_type=fp16"], ["seed=2"]):
        check_tables(
            recipe("train", [f"ckpt_path={finished}", *overrides]), read_manifest(finished)
        )


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_a_command_and_its_rank_open_a_stored_model_once(
    stored, finished, tmp_path, monkeypatch, command
):
    """Lightning's restore opens it once more: the version that all ranks see when they have met."""
    versions = []
    once = stored_model.Snapshot._open_now.__func__
    counted = classmethod(lambda *one: versions.append(1) or once(*one))
    monkeypatch.setattr(stored_model.Snapshot, "_open_now", counted)
    rows = [f"input={finished.parents[1]}/logs", f"output={tmp_path}/scores.parquet"]
    given = recipe(command, [f"ckpt_path={finished}", *(rows if command == "predict" else [])])
    assert len(versions) == 1  # of the command
    measure(given, tmp_path) if command == "eval" else score(given)
    assert len(versions) == 3
