"""Mistakes in data are found before ranks are started; a checkpoint's ids and table sizes go with
it.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import recipe

from recapp.cli.command import run
from recapp.cli.compose import with_absolute_paths
from recapp.cli.stored_recipe import match_stored
from recapp.console import short_path
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.run.run_checks import check_data, check_tables
from recapp.stored.block_files import StoredBlock
from recapp.stored.manifest import CheckpointManifest


@pytest.fixture
def logs(tmp_path):
    """Two files, the first without rows; `user` is text that spells integers, `country` is not."""
    table = pa.table(
        {
            "label": [0, 1, 1],
            "age": [1, 2, 3],
            "user": ["1", "2", "30"],
            "country": ["DE", "US", None],
        }
    )
    pq.write_table(table.slice(0, 0), tmp_path / "part_0.parquet")
    pq.write_table(table, tmp_path / "part_1.parquet")
    return tmp_path


def settings(path, *overrides):
    own = ["dataset=custom", f"dataset.path={path}", "dataset.sparse=[user,country]", *overrides]
    return recipe("train", own)


def test_data_that_fit_their_settings_are_not_refused(logs):
    check_data(settings(logs))
    check_data(
        settings(logs, "dataset.id_rule=error", "dataset.sparse=[user]", "dataset.dense=[age]")
    )


def test_files_that_train_and_validate_are_noted(logs, capsys):
    (logs / "link.parquet").symlink_to(logs / "part_1.parquet")
    check_data(settings(logs / "part_*", f"dataset.val_path={logs}/link.parquet"))
    assert "names 1 of its files, too, so that their rows train and validate: /" in (
        capsys.readouterr().err
    )
    check_data(settings(logs / "part_0*", f"dataset.val_path={logs}/link.parquet"))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["dataset.id_rule=error"],
            (
                r"part_1\.parquet: column country, row 0 holds 'DE', which is no integer; set "
                r"dataset\.id_rule=hash"
            ),
        ),
        (
            ["tables.id_rule=clamp"],
            (
                r"column country, row 0 holds 'DE', .* or name the column in dataset\.hex if it is "
                r"hexadecimal"
            ),
        ),
        (["dataset.label=clicked"], r"part_0\.parquet: no column for clicked"),
        (
            ["dataset.path=nope://bucket/logs"],
            "^nope://bucket/logs: cannot be read: Protocol not known: nope",
        ),
        (["dataset.val_path=s3://k:hidden@b"], "^dataset.val_path=s3://b: the URI names a user"),
        (["dataset.path=/gone"], "^dataset.path=/gone: no such file or directory"),
        (["dataset.val_path=gone/*.parquet"], "dataset.val_path=.*gone/.*parquet: no file matches"),
    ],
)
def test_a_mistake_in_the_first_file_is_one_line_before_ranks_start(logs, overrides, says):
    with pytest.raises(DataError, match=says) as error:
        check_data(settings(logs, *overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_text_is_a_dense_column_where_it_spells_numbers_alone(tmp_path, kind):
    for name, last in (("good", None), ("bad", "old")):
        ages = pa.array(["1", "", "2.5", "-3", last]).cast(kind)
        pq.write_table(
            pa.table({"label": [0, 1, 1, 0, 1], "user": [1, 2, 3, 4, 5], "age": ages}),
            tmp_path / name,
        )
    own = ["dataset.dense=[age]", "dataset.sparse=[user]"]
    check_data(settings(tmp_path / "good", *own))
    with pytest.raises(DataError, match=r"column age, row 4 holds 'old', which is not a number"):
        check_data(settings(tmp_path / "bad", *own))


@pytest.mark.parametrize("key", ["table_rows", "cardinality"])
def test_sizes_are_one_for_each_sparse_column(logs, key):
    check_data(settings(logs, f"dataset.{key}=[30,20]"))
    said = rf"^dataset\.{key} has 3 of the 2 numbers needed, one for each sparse column$"
    with pytest.raises(ConfigError, match=said):
        check_data(settings(logs, f"dataset.{key}=[30,20,10]"))


def test_a_mistake_in_test_files_is_one_line_before_ranks_start(logs):
    with pytest.raises(DataError, match=r"^dataset.test_path=.*none: no such file or directory"):
        check_data(settings(logs, "dataset.test_path=none"), test=True)


def test_text_that_is_hexadecimal_is_no_mistake_under_rules_that_take_ids_for_rows(logs):
    check_data(settings(logs, "dataset.id_rule=error", "dataset.hex=[country]"))


@pytest.mark.parametrize("dataset", ["custom", "criteo_kaggle"])
@pytest.mark.parametrize("outside", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_training_and_evaluation_without_labels_are_refused_whoever_started_the_ranks(
    logs, dataset, outside, monkeypatch
):
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    for command in ("train", "eval"):
        with pytest.raises(
            ConfigError, match=r"^dataset\.label=null: training and evaluation need"
        ):
            own = [f"dataset={dataset}", f"dataset.path={logs}", "dataset.label=null"]
            columns = ["dataset.sparse=[user]"] if dataset == "custom" else []
            check_data(recipe(command, [*own, *columns]))


def test_generated_data_need_sizes(tmp_path):
    with pytest.raises(ConfigError, match=r"^dataset\.table_rows=null: must say how many ids"):
        check_data(recipe("train", [f"dataset.path={tmp_path}/new", "dataset.table_rows=null"]))


@pytest.mark.parametrize(
    "path", ["{logs}", "{logs}/part_1.parquet", "{logs}/*.parquet", "[{logs}/part_1.parquet]"]
)
def test_files_that_are_named_where_data_are_generated_are_read_by_another_option(logs, path):
    with pytest.raises((ConfigError, DataError), match=r"dataset=custom dataset\.path="):
        check_data(recipe("train", [f"dataset.path={path.format(logs=logs)}"]))


def test_a_column_that_has_a_width_is_there(logs):
    with pytest.raises(ConfigError, match=r"^dataset\.table_dims names usr, .*; did you mean user"):
        check_data(settings(logs, "dataset.table_dims={usr: 8}"))


def test_a_uri_is_shown_as_it_is_and_no_place_of_generated_data():
    assert short_path("s3://bucket/logs") == "s3://bucket/logs"
    with pytest.raises(ConfigError, match="generated into one directory of this machine"):
        check_data(recipe("train", ["dataset=generated", "dataset.path=s3://bucket/logs"]))


@pytest.mark.parametrize(
    "override",
    [
        "dataset.path=s3://key:hidden@bucket/logs",
        "dataset.path=[logs,s3://key:hidden@bucket/logs]",
        "+dataset.test_path='https://host/a.parquet?X-Amz-Signature=hidden'",
        "ckpt_path=s3://bucket/a.ckpt?access_key=hidden",
    ],
)
def test_a_secret_on_the_command_line_is_refused_before_anything_is_written(
    override, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run("train", None, argv=[override]) == 1
    shown = capsys.readouterr()
    assert "hidden" not in shown.err + shown.out and "the URI" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_secret_in_a_file_of_ones_own_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "mine/dataset/shop.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [custom]\npath:\n- s3://key:hidden@bucket/logs\n")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert run("train", None, argv=["--config-dir", "../mine", "dataset=shop"]) == 1
    shown = capsys.readouterr()
    assert "hidden" not in shown.err + shown.out and "dataset/shop.yaml" in shown.err
    assert list(work.iterdir()) == []


def test_a_uri_is_not_made_a_path():
    plain = {
        "dataset": {"path": ["s3://bucket/logs", "logs"], "val_path": "gs://b/x", "test_path": None}
    }
    dataset = with_absolute_paths(plain)["dataset"]
    assert (dataset["path"][0], dataset["val_path"]) == ("s3://bucket/logs", "gs://b/x")
    assert dataset["path"][1].startswith("/")


def checkpoint(tmp_path, rows, **info):
    """A manifest of tables with these rows."""
    blocks = [
        StoredBlock(
            name,
            tensor,
            (count, 16),
            range(count),
            range(16),
            "float32",
            "rank-00000.safetensors",
            0,
            1,
            0,
        )
        for name, count in rows.items()
        for tensor in ("weight", "sum")
    ]
    return CheckpointManifest(tmp_path / "x.ckpt", info, {}, tuple(blocks))


PLAIN = {"text": "xxh64", "hex": []}


def test_tables_that_would_be_counted_have_the_checkpoints_sizes(logs, tmp_path):
    manifest = checkpoint(tmp_path, {"user": 64, "country": 8}, ids=PLAIN)

    def rows(*overrides, manifest=manifest):
        return match_stored(settings(logs, *overrides), manifest).dataset.table_rows

    assert rows() == (64, 8)
    assert rows("dataset.cardinality=[5,6]") is None
    assert rows("dataset.table_rows=[7,9]") == (7, 9)
    assert rows(manifest=checkpoint(tmp_path, {"user": 64}, ids=PLAIN)) is None


def test_a_table_that_the_settings_do_not_make_is_no_table_to_leave_out(logs, tmp_path):
    manifest = checkpoint(tmp_path, {"user": 64, "country": 8, "wide_user": 64})
    tables = settings(logs).model_tables.tables
    with pytest.raises(CheckpointError, match="has a table wide_user, which the settings do not"):
        manifest.check_tables(tables)
    checkpoint(tmp_path, {"user": 64}).check_tables(tables)


def test_fitted_columns_have_the_rows_of_the_checkpoint(logs, tmp_path):
    own = ["dataset.dense=[age]", "dataset.buckets=8", "dataset.cardinality=[9,9]"]
    of = settings(logs, *own, "dataset.id_rule=error")
    manifest = checkpoint(tmp_path, {"user": 10, "country": 10, "age_bucket": 4}, config={})
    values = {"age_bucket.buckets": np.array([2, 3], dtype=np.float32)}
    check_tables(of.sized(None, values), manifest)
    with pytest.raises(CheckpointError, match="table age_bucket is 4 x 16 in the checkpoint, but"):
        fewer = {"age_bucket.buckets": values["age_bucket.buckets"][:1]}
        check_tables(of.sized(None, fewer), manifest)


def test_another_reading_of_ids_than_the_checkpoints_is_refused(logs, tmp_path, capsys):
    manifest = checkpoint(tmp_path, {}, ids=PLAIN)
    with pytest.raises(
        CheckpointError,
        match=(
            r"x\.ckpt was trained on ids of user that were read as plain text: set "
            r".*dataset\.hex=\[\]"
        ),
    ):
        match_stored(settings(logs, "dataset.hex=[user]"), manifest)
    assert match_stored(settings(logs), manifest).dataset.hex == ()
    assert (
        match_stored(settings(logs), checkpoint(tmp_path, {}, ids=None)).dataset.hex == ()
    )  # of a script without data of ours
    assert capsys.readouterr().err == ""


def test_groups_need_ids_of_their_own(logs):
    group = ["metrics.group=user", "metrics.by=[user]"]
    check_data(settings(logs, *group, "dataset.min_frequency={country: 2}"))
    says = r"^metrics\.group=user: dataset\.min_frequency gives all rare ids of user one id"
    with pytest.raises(ConfigError, match=says):
        check_data(settings(logs, *group, "dataset.min_frequency=2"))


def test_labels_that_are_fractions_need_a_task_that_takes_them(tmp_path):
    columns = {"share": [0.0, 0.3, 1.0], "stars": [3.5, -1.0, 2.0], "user": [1, 2, 3]}
    pq.write_table(pa.table(columns), tmp_path / "f.parquet")
    own = ["dataset=custom", f"dataset.path={tmp_path}", "dataset.sparse=[user]"]
    share = [*own, "dataset.label=share"]
    stars = [*own, "dataset.label=stars"]
    says = r"column share, row 1 holds 0\.3; a label must be 0 or 1"
    with pytest.raises(DataError, match=says):
        check_data(recipe("train", share))
    check_data(recipe("train", [*share, "task.soft_labels=true"]))
    check_data(recipe("train", [*stars, "task=rating"]))
    says = r"column stars, row 0 holds 3\.5; a label must be a number from 0 to 1"
    with pytest.raises(DataError, match=says):
        check_data(recipe("train", [*stars, "task.soft_labels=true"]))
