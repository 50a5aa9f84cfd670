"""The file of scores: what ranks write becomes one file in order, whole or not at all."""

import errno
import os
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import SCHEMA, write_numbered

from recapp.dataset import scoring
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.scoring import RankInput, ScoreFile, check_output, open_input
from recapp.errors import ConfigError, DataError

ROWS = 10


@pytest.fixture
def input(tmp_path):
    write_numbered(tmp_path / "logs", [[7], [3]])
    return opened(tmp_path)


def opened(tmp_path, **settings):
    chosen = {"columns": ["one"], "rows_per_batch": 2} | settings
    return open_input(ScoringSettings(input=str(tmp_path / "logs"), **chosen), SCHEMA, "none")


def n_over_16(batch):
    return {"score": (batch.first_row + np.arange(batch.rows, dtype=np.float32)) / 16}


def write(tmp_path, input, world, scores=n_over_16, columns=("score",)):
    """The file, after each rank has written its part."""
    file = ScoreFile(tmp_path / "scores.parquet", input, columns)
    file.folder.mkdir(exist_ok=True)
    for rank in range(world):
        part = ScoreFile(file.output, input, columns)
        part.open_part(rank)
        for batch in RankInput(input, rank, world):
            if batch.rows:
                part.write(batch.kept, scores(batch))
        part.close_part()
    return file


def line(kind, call, *arguments, **options):
    with pytest.raises(kind) as raised:
        call(*arguments, **options)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_parts_join_to_the_same_file_in_order_on_any_number_of_ranks(tmp_path, input):
    contents = set()
    for world in (1, 2, 7):
        file = write(tmp_path, input, world)
        joined = file.join(world)
        contents.add(file.output.read_bytes())
        assert joined == {
            "rows": ROWS,
            "mean_score": 4.5 / 16,
            "least_score": 0.0,
            "largest_score": 9 / 16,
        }
    assert len(contents) == 1
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table.column_names == ["one", "score"]
    assert table.schema.field("score").type == pa.float32()
    assert table["one"].to_pylist() == [10 * n for n in range(ROWS)]
    assert table["score"].to_pylist() == [n / 16 for n in range(ROWS)]


def test_small_batches_share_row_groups(tmp_path, input, monkeypatch):
    monkeypatch.setattr(scoring, "ROWS_PER_GROUP", 7)
    write(tmp_path, input, 2).join(2)
    footer = pq.read_metadata(tmp_path / "scores.parquet")
    assert [footer.row_group(n).num_rows for n in range(footer.num_row_groups)] == [8, 2]


def test_no_rows_are_a_valid_file_without_rows(tmp_path):
    write_numbered(tmp_path / "logs", [[0]])
    assert write(tmp_path, opened(tmp_path), 2).join(2)["mean_score"] is None
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table.num_rows == 0 and table.column_names == ["one", "score"]


def test_without_kept_columns_there_is_the_score_alone(tmp_path, input):
    write(tmp_path, opened(tmp_path, columns=[]), 2).join(2)
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["score"]


def test_what_a_run_has_left_is_deleted_and_nothing_else(tmp_path, input):
    file = write(tmp_path, input, 3)
    (file.folder / "joined.tmp").touch()
    (file.folder / "thesis.tex").touch()
    file.delete_parts()
    assert os.listdir(file.folder) == ["thesis.tex"]


def test_scores_of_several_outputs_are_columns_by_their_names(tmp_path, input):
    def scores(batch):
        (click,) = n_over_16(batch).values()
        return {"click": click, "buy": -click}

    joined = write(tmp_path, input, 2, scores, ("click", "buy")).join(2)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table.column_names == ["one", "click", "buy"]
    assert table["buy"].to_pylist() == [-n / 16 for n in range(ROWS)]
    assert joined["mean_click"] == 4.5 / 16
    assert joined["least_buy"] == -9 / 16
    assert line(ConfigError, ScoreFile, tmp_path / "s.parquet", input, ["one"]).startswith(
        "columns: one is the column of the scores"
    )


def test_a_full_disk_is_one_line_and_leaves_no_output(tmp_path, input, monkeypatch):
    file = write(tmp_path, input, 2)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scoring.os, "fsync", full)
    said = line(DataError, file.join, 2)
    assert "No space left on device" in said and "run the same command again" in said
    file.delete_parts()
    file.folder.rmdir()
    assert "cannot be written (" in line(DataError, file.open_part, 0)
    assert not (tmp_path / "scores.parquet").exists()


def test_an_abandoned_part_is_closed_even_if_the_disk_is_full(tmp_path, input):
    file = ScoreFile(tmp_path / "scores.parquet", input, ["score"])
    file.folder.mkdir()
    before = os.listdir("/proc/self/fd")
    file.open_part(0)
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # it has an end still to write
    try:
        file.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_part_is_not_much_larger_than_the_output(tmp_path):
    rows = 8192
    columns = {"row": range(rows), "one": [f"category/{n % 50}/shoes" for n in range(rows)]}
    pq.write_table(
        pa.table({**columns, "many": [1] * rows, "other": [1] * rows}), tmp_path / "logs"
    )
    file = write(tmp_path, opened(tmp_path, rows_per_batch=4096), 1)
    file.join(1)
    assert (file.folder / "rank-0.arrow").stat().st_size < 1.5 * file.output.stat().st_size


def test_parts_that_lack_rows_do_not_become_an_output(tmp_path, input):
    file = write(tmp_path, input, 2)
    assert "has 4 scores of 10 rows" in line(DataError, file.join, 1)
    (file.folder / "rank-1.arrow").write_bytes(b"")
    line(DataError, file.join, 2)
    assert not (tmp_path / "scores.parquet").exists()


def test_the_scores_of_a_model_that_is_not_finite_are_not_hidden(tmp_path, input):
    def scores(batch):
        return {"score": np.where(batch.first_row, n_over_16(batch)["score"], np.float32("nan"))}

    joined = write(tmp_path, input, 2, scores).join(2)
    assert np.isnan(joined["mean_score"]) and joined["least_score"] == 2 / 16


def test_outputs_that_cannot_be_are_refused(tmp_path, input):
    inputs = [file.path for file in input.source.files]
    (tmp_path / "there.parquet").write_text("x")
    (tmp_path / "folder.parquet").mkdir()

    def said(name, **options):
        return line(
            ConfigError, check_output, tmp_path / name, inputs, **{"overwrite": False} | options
        )

    assert "name a file scores.parquet" in said("scores.csv")
    assert f"there is no directory {tmp_path}/no" in said("no/scores.parquet")
    assert "is a directory" in said("folder.parquet")
    assert "overwrite=true" in said("there.parquet")
    check_output(tmp_path / "there.parquet", inputs, overwrite=True)
    assert "is one of the files that are scored" in said("logs/part-0.parquet", overwrite=True)
    (tmp_path / "soft.parquet").symlink_to(inputs[0])
    assert "is one of the files that are scored" in said("soft.parquet", overwrite=True)
