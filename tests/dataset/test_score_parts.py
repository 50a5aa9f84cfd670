"""The directory of score parts: what is whole, whose it is, and what becomes of it."""

import errno
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import SCHEMA, write_numbered

from recapp.dataset import score_parts
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.prediction_input import open_input
from recapp.dataset.score_parts import ScoreParts, check_output, identity_of
from recapp.errors import ConfigError, DataError

ROWS = 10


@pytest.fixture
def input(tmp_path):
    write_numbered(tmp_path / "logs", [[7], [3]])
    return opened(tmp_path)


def opened(tmp_path, **settings):
    chosen = {"columns": ["one"], "rows_per_batch": 2, "rows_per_part": 4} | settings
    return open_input(ScoringSettings(input=str(tmp_path / "logs"), **chosen), SCHEMA, "none")


def parts_of(tmp_path, input, *, overwrite=False, **model):
    files = [(file.path, file.stamp) for file in input.source.files]
    identity = identity_of(
        {"checkpoint": "aa"} | model, files, input.settings, input.schema, input.transform
    )
    return ScoreParts(tmp_path / "scores.parquet", identity, overwrite=overwrite)


def scored(input, number):
    """The batches of a part; the score of row n is n / 16."""
    return [
        (batch, {"score": (batch.first_row + np.arange(batch.rows, dtype=np.float32)) / 16})
        for batch in input.batches(input.part(number))
    ]


def write_all(parts, input, numbers=None):
    parts.prepare()
    for number in range(input.parts) if numbers is None else numbers:
        parts.write(number, scored(input, number))


def line(kind, call, *arguments, **options):
    with pytest.raises(kind) as raised:
        call(*arguments, **options)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_parts_join_to_one_file_in_order_and_leave_nothing_behind(tmp_path, input):
    parts = parts_of(tmp_path, input)
    write_all(parts, input, [2, 0, 1])
    assert parts.finished(input) == [0, 1, 2]
    joined = parts.join(input)
    parts.remove()
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found.column_names == ["one", "score"]
    assert found.schema.field("score").type == pa.float32()
    assert found["one"].to_pylist() == [10 * n for n in range(ROWS)]
    assert found["score"].to_pylist() == [n / 16 for n in range(ROWS)]
    assert joined == {
        "rows": ROWS,
        "mean_score": 4.5 / 16,
        "least_score": 0.0,
        "largest_score": 9 / 16,
    }
    assert sorted(os.listdir(tmp_path)) == ["logs", "scores.parquet"]


def test_small_parts_share_row_groups(tmp_path, input, monkeypatch):
    monkeypatch.setattr(score_parts, "ROWS_PER_GROUP", 6)
    parts = parts_of(tmp_path, input)
    write_all(parts, input)
    parts.join(input)
    footer = pq.read_metadata(tmp_path / "scores.parquet")
    assert [footer.row_group(n).num_rows for n in range(footer.num_row_groups)] == [8, 2]


def test_no_rows_are_a_valid_file_without_rows(tmp_path):
    write_numbered(tmp_path / "logs", [[0]])
    input = opened(tmp_path)
    parts = parts_of(tmp_path, input)
    write_all(parts, input)
    assert parts.join(input)["mean_score"] is None
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found.num_rows == 0 and found.column_names == ["one", "score"]


def test_without_kept_columns_there_is_the_score_alone(tmp_path, input):
    input = opened(tmp_path, columns=[])
    parts = parts_of(tmp_path, input)
    write_all(parts, input)
    parts.join(input)
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["score"]


def test_a_later_run_finds_what_is_whole_and_nothing_else(tmp_path, input):
    first = parts_of(tmp_path, input)
    write_all(first, input)
    (first.folder / "part-0000001.parquet").write_bytes(b"PAR1")  # cut off
    (first.folder / "part-0000002.parquet").rename(first.folder / "part-0000002.parquet.tmp")
    again = parts_of(tmp_path, input)
    again.prepare()
    assert again.finished(input) == [0]
    assert not (again.folder / "part-0000002.parquet.tmp").exists()


def test_a_part_with_other_rows_is_not_whole(tmp_path, input):
    parts = parts_of(tmp_path, input)
    write_all(parts, input)
    os.replace(parts.folder / "part-0000002.parquet", parts.folder / "part-0000000.parquet")
    assert parts.finished(input) == [1]


def test_parts_of_another_model_are_refused_and_replaced_when_asked(tmp_path, input):
    write_all(parts_of(tmp_path, input), input)
    other = parts_of(tmp_path, input, checkpoint="bb")
    said = line(ConfigError, other.prepare)
    assert 'checkpoint: "aa" there, "bb" here' in said and "overwrite=true" in said
    assert "scores.parquet.parts" in said
    anew = parts_of(tmp_path, input, checkpoint="bb", overwrite=True)
    anew.prepare()
    assert anew.finished(input) == []
    assert json.loads((anew.folder / "identity.json").read_text())["checkpoint"] == "bb"


def test_with_overwrite_parts_of_the_same_scores_are_still_gone_on_with(tmp_path, input):
    write_all(parts_of(tmp_path, input), input, [1])
    again = parts_of(tmp_path, input, overwrite=True)
    again.prepare()
    assert again.finished(input) == [1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": []}, 'columns: ["one"] there, [] here'),
        ({"rows_per_batch": 4}, "rows_per_batch: 2 there, 4 here"),
        ({"rows_per_part": 8}, "rows_per_part: 4 there, 8 here"),
    ],
)
def test_parts_with_other_boundaries_or_columns_are_refused(tmp_path, input, settings, words):
    write_all(parts_of(tmp_path, input), input)
    assert words in line(ConfigError, parts_of(tmp_path, opened(tmp_path, **settings)).check)


def test_an_input_that_has_changed_is_refused_with_the_file(tmp_path, input):
    write_all(parts_of(tmp_path, input), input)
    os.utime(tmp_path / "logs/part-1.parquet", ns=(5, 5))
    said = line(ConfigError, parts_of(tmp_path, opened(tmp_path)).check)
    assert "input: [" in said and "part-1.parquet" in said and "part-0.parquet" not in said


def test_a_damaged_identity_is_refused_and_replaced_when_asked(tmp_path, input):
    parts = parts_of(tmp_path, input)
    write_all(parts, input)
    for text in ("{", "[]", '"x"'):
        (parts.folder / "identity.json").write_text(text)
        assert "overwrite=true" in line(ConfigError, parts.check)
    anew = parts_of(tmp_path, input, overwrite=True)
    anew.prepare()
    assert anew.finished(input) == []


def test_scores_of_several_outputs_are_columns_by_their_names(tmp_path, input):
    files = [(file.path, file.stamp) for file in input.source.files]
    what = (files, input.settings, input.schema, input.transform)
    identity = identity_of({"checkpoint": "aa"}, *what, ["click", "buy"])
    parts = ScoreParts(tmp_path / "scores.parquet", identity, overwrite=False)
    parts.prepare()
    for number in range(input.parts):
        made = scored(input, number)
        both = [(batch, {"click": own["score"], "buy": -own["score"]}) for batch, own in made]
        parts.write(number, both)
    joined = parts.join(input)
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found.column_names == ["one", "click", "buy"]
    assert found["buy"].to_pylist() == [-n / 16 for n in range(ROWS)]
    assert joined["mean_click"] == 4.5 / 16
    assert joined["least_buy"] == -9 / 16
    assert "scores: " in line(ConfigError, parts_of(tmp_path, input).check)
    assert line(ConfigError, identity_of, {}, *what, ["one"]).startswith(
        "columns: one is the column of the scores"
    )


def test_a_directory_with_other_things_is_left_alone_even_with_overwrite(tmp_path, input):
    folder = tmp_path / "scores.parquet.parts"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    said = line(ConfigError, parts_of(tmp_path, input, overwrite=True).prepare)
    assert "thesis.tex" in said and (folder / "thesis.tex").exists()


def test_a_full_disk_is_one_line_and_keeps_the_finished_parts(tmp_path, input, monkeypatch):
    parts = parts_of(tmp_path, input)
    write_all(parts, input, [0])

    def full(path, unfinished=None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(score_parts, "_whole", full)
    for call in (lambda: parts.write(1, scored(input, 1)), lambda: parts.join(input)):
        said = line(DataError, call)
        assert "No space left on device" in said and "finished parts stay in" in said
        assert "run the same command again" in said
    assert parts.finished(input) == [0] and not (tmp_path / "scores.parquet").exists()


def test_a_part_that_is_missing_when_they_are_joined_is_an_error(tmp_path, input):
    parts = parts_of(tmp_path, input)
    write_all(parts, input, [0, 2])
    assert "part-0000001.parquet" in line(DataError, parts.join, input)
    assert not (tmp_path / "scores.parquet").exists()


def test_the_scores_of_a_model_that_is_not_finite_are_not_hidden(tmp_path, input):
    parts = parts_of(tmp_path, input)
    parts.prepare()
    for number in range(input.parts):
        made = scored(input, number)
        made[0][1]["score"][0] = np.nan
        parts.write(number, made)
    assert np.isnan(parts.join(input)["mean_score"])


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
