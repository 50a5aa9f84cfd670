"""A null is what it was in training, whatever the other rows of a request or file are: an empty bag
of a feature that had bags, one missing id of any other.
"""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.click_rows import open_rows
from recapp.dataset.collate import RawRows
from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.dataset.schema import Schema
from recapp.dataset.scoring import open_input
from recapp.dataset.source import open_source
from recapp.errors import CheckpointError, DataError
from recapp.sparse.missing_ids import MISSING

COLUMNS = Schema("label", (), ("user", "tags"))
TRAINED = replace(COLUMNS, lists=frozenset({"tags"}))
NO_IDS = []
MISSING_ID = [MISSING]


def bags(batch, feature):
    return [ids.tolist() for ids in batch.sparse[feature].to_dense()]


def read(schema, user, tags):
    batch = RawRows(schema, "none").batch(pa.table({"user": user, "tags": tags}))
    return bags(batch, "user"), bags(batch, "tags")


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (pa.array([[7, None, 8], None, []]), [[7, 8], NO_IDS, NO_IDS]),
        (pa.array([None, None, None], pa.list_(pa.int64())), [NO_IDS] * 3),
        (pa.array([None, None, None]), [NO_IDS] * 3),
        (pa.array([None, None, None], pa.string()), [NO_IDS] * 3),
        (pa.array([7, None, -8]), [[7], NO_IDS, [-8]]),
        (pa.array(["7", "", None]), [[7], NO_IDS, NO_IDS]),
        (pa.array(["7", None, "7"]).dictionary_encode(), [[7], NO_IDS, [7]]),
        (pa.array([[7], [8], None], pa.list_(pa.int64(), 1)), [[7], [8], NO_IDS]),
    ],
)
def test_a_null_is_an_empty_bag_of_a_feature_that_had_bags(tags, found):
    assert read(TRAINED, pa.array([1, 2, 3]), tags) == ([[1], [2], [3]], found)


@pytest.mark.parametrize(
    ("user", "found"),
    [
        (pa.array([1, None, 3]), [[1], MISSING_ID, [3]]),
        (pa.array([None, None, None]), [MISSING_ID] * 3),
        (
            pa.array([None, [1, 2], None, [], None]),
            [MISSING_ID, [1, 2], MISSING_ID, [], MISSING_ID],
        ),
        (pa.array([[1], None, [None]]), [[1], MISSING_ID, NO_IDS]),
        (pa.array([None, [4]], pa.list_(pa.int64(), 1)), [MISSING_ID, [4]]),
    ],
)
def test_a_null_is_one_missing_id_of_any_other_feature(user, found):
    assert read(TRAINED, user, pa.array([[1]] * len(user)))[0] == found


def test_without_a_word_of_training_the_columns_say_what_a_null_is():
    assert read(COLUMNS, pa.array([[1], None]), pa.array([7, None])) == (
        [[1], NO_IDS],
        [[7], MISSING_ID],
    )


def test_a_value_that_cannot_be_read_is_named_with_its_row():
    with pytest.raises(DataError, match=r"tags, row 2 holds 0\.5"):
        read(TRAINED, pa.array([1, 2, 3]), pa.array([7, None, 0.5]))


@pytest.fixture
def logs(tmp_path):
    """Training rows, where tags are lists, and a file without a single list."""
    table = pa.table({"label": [0, 1], "user": [1, None], "tags": [[7, 8], None]})
    pq.write_table(table, tmp_path / "train.parquet")
    some = pa.table({"label": [0, 1], "user": [[1], None], "tags": [7, None]})
    pq.write_table(some, tmp_path / "some.parquet")
    return tmp_path


def test_the_training_rows_say_which_features_have_bags(logs):
    rows = open_rows(DataSettings(path=str(logs / "train.parquet"), val_share=0.5), COLUMNS)
    assert rows.schema.lists == {"tags"} and rows.schema.id_encoding()["lists"] == ["tags"]
    again = open_rows(DataSettings(path=str(logs / "some.parquet"), val_share=0.5), rows.schema)
    assert again.schema.lists == {"tags"} and again.train.bags == {"user", "tags"}


def test_files_to_score_are_read_as_training_read_its_own(logs):
    settings = ScoringSettings(input=str(logs / "some.parquet"))
    (batch,) = open_input(settings, TRAINED, "none").batches(range(2))
    assert (bags(batch, "user"), bags(batch, "tags")) == ([[1], MISSING_ID], [[7], NO_IDS])


def test_files_of_both_kinds_are_read_together_where_training_knows(logs):
    one_way = pa.table({"label": [1], "user": [[3]], "tags": [[5, 6]]})
    pq.write_table(one_way, logs / "train.parquet")
    paths = [str(logs / "some.parquet"), str(logs / "train.parquet")]
    with pytest.raises(DataError, match="tags"):
        open_source(paths, COLUMNS)
    (batch,) = open_input(ScoringSettings(input=paths), TRAINED, "none").batches(range(3))
    assert bags(batch, "tags") == [[7], NO_IDS, [5, 6]]


def test_a_stored_model_keeps_them():
    stored = json.loads(json.dumps(TRAINED.id_encoding()))
    COLUMNS.check_id_encoding(stored, "best.ckpt")
    assert COLUMNS.with_stored_lists(stored) == TRAINED
    for earlier in (COLUMNS.id_encoding(), None):
        assert COLUMNS.with_stored_lists(earlier) == COLUMNS
    with pytest.raises(CheckpointError, match=r"best\.art was trained on lists of none, which is"):
        COLUMNS.check_id_encoding({**stored, "lists": ["tags", "none"]}, "best.art", "artefact")
    for damaged in ("tags", [3], {"tags": 1}):
        with pytest.raises(CheckpointError, match=r"manifest of artefact best\.art is damaged"):
            COLUMNS.check_id_encoding({**stored, "lists": damaged}, "best.art", "artefact")
